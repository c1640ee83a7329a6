//! Floors: the same work by pgbench, without the service and the network.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use rm_devpg::{EmbeddedPostgres, PORT, USER};
use sqlx::ConnectOptions as _;

use crate::{
    Failure, Workload, machine,
    meter::Meter,
    process::{self, ChildGuard},
    sample::Sample,
};

/// Numbers of clients. A floor is its best rate over them.
pub(crate) const CLIENTS: [usize; 4] = [1, 4, 16, 64];

/// Name of the floors' database.
pub(crate) const DATABASE: &str = "floors";
const SCHEMA: &str = include_str!("floors/schema.sql");

/// Method of a grant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Floor {
    /// One transaction that locks both counters: the usual solution.
    ForUpdate,
    /// One transaction that inserts lock rows. Other transactions wait for their unique index.
    InTransaction,
    /// One transaction per statement, with lock rows that are polled.
    Literal,
}

impl Floor {
    pub const ALL: [Self; 3] = [Self::ForUpdate, Self::InTransaction, Self::Literal];

    pub fn name(self) -> &'static str {
        match self {
            Self::ForUpdate => "for_update",
            Self::InTransaction => "in_transaction",
            Self::Literal => "literal",
        }
    }

    fn script(self) -> &'static str {
        match self {
            Self::ForUpdate => include_str!("floors/for_update.sql"),
            Self::InTransaction => include_str!("floors/in_transaction.sql"),
            Self::Literal => include_str!("floors/literal.sql"),
        }
    }
}

/// Runs pgbench in a separate database.
pub(crate) struct Floors {
    pgbench: PathBuf,
    libraries: Option<PathBuf>,
    socket_dir: PathBuf,
    dir: PathBuf,
    threads_max: u64,
}

impl Floors {
    /// Finds pgbench and creates its tables.
    pub async fn prepare(database: &EmbeddedPostgres, dir: &Path) -> Result<Self, Failure> {
        let pgbench = find_pgbench(database.bin_dir())?;
        let options = machine::create_database(database, DATABASE).await?;
        sqlx::raw_sql(SCHEMA).execute(&mut options.connect().await?).await?;
        for floor in Floor::ALL {
            fs::write(dir.join(floor.name()), floor.script())?;
        }
        Ok(Self {
            libraries: fetched_libraries(database.bin_dir()),
            pgbench,
            socket_dir: database.socket_dir().to_owned(),
            dir: dir.to_owned(),
            threads_max: u64::try_from(std::thread::available_parallelism()?.get())?,
        })
    }

    /// Makes grants for `window` with `clients` concurrent clients. The grants of a single client are also timed
    /// individually.
    pub async fn measure(
        &self,
        floor: Floor,
        workload: Workload,
        clients: usize,
        window: Duration,
        meter: &mut Meter,
    ) -> Result<Sample, Failure> {
        let before = meter.read().await?;
        let said = self.run(self.command(floor, workload, clients, window)).await?;
        let rate = said.lines().find_map(rate).filter(|rate| *rate > 0.0).ok_or("pgbench prints no rate")?;
        let done = said.lines().find_map(done).ok_or("pgbench prints no number of transactions")?;
        let times = if clients == 1 { self.take_times()? } else { Vec::new() };
        let cost = Some(meter.read().await?.since(before, done));
        Ok(Sample { rate, times, cost, shares: Vec::new(), errors: 0, error: None })
    }

    fn command(&self, floor: Floor, workload: Workload, clients: usize, window: Duration) -> Command {
        let mut command = process::command(&self.pgbench);
        command.current_dir(&self.dir).args(["--no-vacuum", "--protocol=prepared", "--file", floor.name()]);
        command.arg("--host").arg(&self.socket_dir).args(["--port", &PORT.to_string(), "--username", USER]);
        let threads = self.threads_max.min(clients as u64);
        command.args(["--client", &clients.to_string(), "--jobs", &threads.to_string()]);
        command.args(["--time", &window.as_secs().max(1).to_string(), "--define", &format!("ems={}", workload.ems())]);
        if clients == 1 {
            command.args(["--log", "--log-prefix=times"]);
        }
        command.arg(DATABASE).envs(self.libraries.iter().map(|dir| ("LD_LIBRARY_PATH", dir)));
        command
    }

    /// Runs pgbench and returns its output.
    async fn run(&self, mut command: Command) -> Result<String, Failure> {
        let (output, errors) = (self.dir.join("pgbench.out"), self.dir.join("pgbench.err"));
        command.stdout(Stdio::from(File::create(&output)?)).stderr(Stdio::from(File::create(&errors)?));
        let status = ChildGuard::start(&mut command)?.ended().await?;
        if !status.success() {
            let errors = fs::read_to_string(&errors).unwrap_or_default();
            let last = errors.lines().last().unwrap_or("it says nothing");
            return Err(format!("pgbench failed ({status}): {last}").into());
        }
        Ok(fs::read_to_string(&output)?)
    }

    /// Returns the durations in the logs of pgbench and removes the logs.
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

/// Parses `tps = 2880.123 (without initial connection time)`.
fn rate(line: &str) -> Option<f64> {
    line.strip_prefix("tps = ")?.split(' ').next()?.parse().ok()
}

/// Parses `number of transactions actually processed: 14400`, which may continue with the planned number.
fn done(line: &str) -> Option<u64> {
    line.strip_prefix("number of transactions actually processed: ")?.split('/').next()?.parse().ok()
}

/// Finds pgbench beside the server's programs, else on `PATH`.
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

/// Returns the libraries of downloaded programs: `libraries` beside `usr/lib/postgresql/15/bin`. Installed programs
/// have none there.
fn fetched_libraries(bin_dir: &Path) -> Option<PathBuf> {
    bin_dir.ancestors().nth(5).map(|tree| tree.join("libraries")).filter(|dir| dir.is_dir())
}
