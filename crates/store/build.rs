//! Lists the files of `migrations/home` and `migrations/cell` as Rust constants.

use std::{env, error::Error, fmt::Write as _, fs, path::Path};

fn main() -> Result<(), Box<dyn Error>> {
    let root = Path::new(&env::var("CARGO_MANIFEST_DIR")?).join("../../migrations").canonicalize()?;
    println!("cargo:rerun-if-changed={}", root.display());
    let mut code = String::new();
    for (side, constant) in [("home", "HOME"), ("cell", "CELL")] {
        let mut files: Vec<_> =
            fs::read_dir(root.join(side))?.map(|entry| Ok(entry?.path())).collect::<Result<_, std::io::Error>>()?;
        files.sort();
        writeln!(code, "pub(super) const {constant}: &[MigrationFile] = &[")?;
        for file in files {
            let name = file.file_stem().and_then(|name| name.to_str()).ok_or("the name of a migration is not UTF-8")?;
            let (version, description) = name.split_once('_').ok_or("a migration is named VERSION_description.sql")?;
            let (version, description) = (version.parse::<i64>()?, description.replace('_', " "));
            writeln!(
                code,
                "    MigrationFile {{ version: {version}, description: {description:?}, sql: include_str!({file:?}) }},"
            )?;
        }
        writeln!(code, "];")?;
    }
    fs::write(Path::new(&env::var("OUT_DIR")?).join("migrations.rs"), code)?;
    Ok(())
}
