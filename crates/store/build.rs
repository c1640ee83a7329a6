//! Lists the files of `migrations/home` and `migrations/cell` as Rust constants.

use std::{env, error::Error, fmt::Write as _, fs, path::Path};

/// The folder of the migrations, relative to the package. No absolute path is written, so that a target folder can serve another checkout.
const FOLDER: &str = "../../migrations";

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed={FOLDER}");
    let mut code = String::new();
    for (side, constant) in [("home", "HOME"), ("cell", "CELL")] {
        let mut files: Vec<_> = fs::read_dir(Path::new(FOLDER).join(side))?
            .map(|entry| Ok(entry?.path()))
            .collect::<Result<_, std::io::Error>>()?;
        files.sort();
        writeln!(code, "pub(super) const {constant}: &[Migration] = &[")?;
        for file in files {
            let path = file.to_str().ok_or("the name of a migration is not UTF-8")?;
            let name = file.file_stem().and_then(|name| name.to_str()).ok_or("the name of a migration is not UTF-8")?;
            let (version, description) = name.split_once('_').ok_or("a migration is named VERSION_description.sql")?;
            let (version, description) = (version.parse::<i64>()?, description.replace('_', " "));
            writeln!(
                code,
                "    Migration {{ version: {version}, description: {description:?}, \
                 sql: include_str!(concat!(env!(\"CARGO_MANIFEST_DIR\"), \"/{path}\")) }},"
            )?;
        }
        writeln!(code, "];")?;
    }
    fs::write(Path::new(&env::var("OUT_DIR")?).join("migrations.rs"), code)?;
    Ok(())
}
