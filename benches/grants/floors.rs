//! The floor: the same work by pgbench, with no service and no network in between.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use linkis_rm::store::embedded::{Embedded, PORT, USER};
use sqlx::ConnectOptions as _;

use crate::{
    Failure, Latency, Sample, Workload, machine,
    process::{self, Running},
};

/// A floor is its best over these numbers of clients.
pub(crate) const CLIENTS: [u64; 4] = [1, 4, 16, 64];

const DATABASE: &str = "floors";
const SCHEMA: &str = include_str!("floors/schema.sql");
const FOR_UPDATE: &str = include_str!("floors/for_update.sql");

/// Runs pgbench in a database of its own.
pub(crate) struct Floors {
    pgbench: PathBuf,
    libraries: Option<PathBuf>,
    socket_dir: PathBuf,
    dir: PathBuf,
    script: PathBuf,
    threads_max: u64,
}

impl Floors {
    /// Finds pgbench and creates its tables.
    pub async fn prepare(database: &Embedded, dir: &Path) -> Result<Self, Failure> {
        let pgbench = find_pgbench(database.bin_dir())?;
        let options = machine::create_database(database, DATABASE).await?;
        sqlx::raw_sql(SCHEMA).execute(&mut options.connect().await?).await?;
        let script = dir.join("for_update.sql");
        fs::write(&script, FOR_UPDATE)?;
        Ok(Self {
            libraries: fetched_libraries(database.bin_dir()),
            pgbench,
            socket_dir: database.socket_dir().to_owned(),
            dir: dir.to_owned(),
            script,
            threads_max: u64::try_from(std::thread::available_parallelism()?.get())?,
        })
    }

    /// Grants for `window`, with so many clients at once; a single one is also timed, grant by grant.
    pub async fn measure(&self, workload: Workload, clients: u64, window: Duration) -> Result<Sample, Failure> {
        let (output, errors) = (self.dir.join("pgbench.out"), self.dir.join("pgbench.err"));
        let mut command = process::command(&self.pgbench);
        command.current_dir(&self.dir).args(["--no-vacuum", "--protocol=prepared", "--file"]).arg(&self.script);
        command.arg("--host").arg(&self.socket_dir).args(["--port", &PORT.to_string(), "--username", USER]);
        command.args(["--client", &clients.to_string(), "--jobs", &clients.min(self.threads_max).to_string()]);
        command.args(["--time", &window.as_secs().max(1).to_string(), "--define", &format!("ems={}", workload.ems())]);
        if clients == 1 {
            command.args(["--log", "--log-prefix=times"]);
        }
        command.arg(DATABASE).envs(self.libraries.iter().map(|dir| ("LD_LIBRARY_PATH", dir)));
        command.stdout(Stdio::from(File::create(&output)?)).stderr(Stdio::from(File::create(&errors)?));
        let status = Running::start(&mut command)?.ended().await?;
        let said = fs::read_to_string(&output)?;
        let rate = said.lines().find_map(rate).filter(|rate| status.success() && *rate > 0.0).ok_or_else(|| {
            let errors = fs::read_to_string(&errors).unwrap_or_default();
            format!("pgbench failed ({status}): {}", errors.lines().last().unwrap_or("it says nothing"))
        })?;
        let latency = if clients == 1 { Latency::of(self.take_times()?) } else { None };
        Ok(Sample { rate, latency })
    }

    /// The times that pgbench has logged, which are removed.
    fn take_times(&self) -> Result<Vec<Duration>, Failure> {
        let mut times = Vec::new();
        for entry in fs::read_dir(&self.dir)? {
            let entry = entry?;
            if entry.file_name().to_string_lossy().starts_with("times.") {
                let log = fs::read_to_string(entry.path())?;
                // The third field of a line, in microseconds.
                times.extend(
                    log.lines().filter_map(|line| line.split(' ').nth(2)?.parse().ok().map(Duration::from_micros)),
                );
                fs::remove_file(entry.path())?;
            }
        }
        Ok(times)
    }
}

/// From `tps = 2880.123 (without initial connection time)`.
fn rate(line: &str) -> Option<f64> {
    line.strip_prefix("tps = ")?.split(' ').next()?.parse().ok()
}

/// Beside the server's programs, else on `PATH`.
fn find_pgbench(bin_dir: &Path) -> Result<PathBuf, Failure> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let dirs = std::iter::once(bin_dir.to_owned()).chain(std::env::split_paths(&path));
    dirs.map(|dir| dir.join("pgbench")).find(|program| program.is_file()).ok_or_else(|| {
        format!(
            "pgbench is neither in {} nor on PATH; it comes with PostgreSQL's server or contrib package",
            bin_dir.display()
        )
        .into()
    })
}

/// Programs that were fetched, rather than installed, come with their libraries: `libraries` beside `usr/lib/postgresql/15/bin`.
fn fetched_libraries(bin_dir: &Path) -> Option<PathBuf> {
    bin_dir.ancestors().nth(5).map(|tree| tree.join("libraries")).filter(|dir| dir.is_dir())
}
