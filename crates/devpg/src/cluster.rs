//! State directory of the private server: its lock, the database files, the socket directory and the server log.
//!
//! Preparation only creates files; the server starts later. An interrupted preparation never leaves a partial database.
//! Caller: the parent module.

use std::collections::hash_map::DefaultHasher;
use std::env;
use std::ffi::OsString;
use std::fs::{self, DirBuilder, File, OpenOptions, Permissions, TryLockError};
use std::hash::{Hash, Hasher};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use super::account::{Account, is_root, setpriv_failed};
use super::binaries::Binaries;
use super::error::{EmbeddedError, first_complaints};
use super::server::end_old;
use super::{DATA_DIR, EmbeddedSettings, PORT, USER};

/// Name of the socket directory, below the state directory if that path is short enough for a socket.
const SOCKET_DIR: &str = "socket";

/// Name of the map from accounts to database users.
const MAP: &str = "owner";

/// Files of an unfinished state directory, and those of a new file system.
const OWN_FILES: [&str; 13] = [
    "lock",
    DATA_DIR,
    "data.init",
    SOCKET_DIR,
    "server.log",
    "server.log.1",
    "pg_hba.conf",
    "pg_hba.conf.new",
    "pg_ident.conf",
    "pg_ident.conf.new",
    "postgresql",
    "postgresql.tmp",
    "lost+found",
];

/// Maximum length of a Unix socket path, in bytes.
const SOCKET_PATH_BYTES_MAX: usize = 107;

/// Time that a second instance waits for the first to release the directory.
const LOCK_WAIT: Duration = Duration::from_millis(500);
const LOCK_POLL: Duration = Duration::from_millis(10);

/// Size in bytes above which the log is rotated at start; one older log is kept.
const LOG_BYTES_MAX: u64 = 8 << 20;

const SERVER_OPTIONS: [(&str, &str); 13] = [
    ("listen_addresses", ""),
    ("unix_socket_permissions", "0700"),
    ("max_connections", "100"),
    ("shared_buffers", "256MB"),
    ("max_wal_size", "4GB"),
    // The statements of a disconnected client, and its locks, end soon.
    ("client_connection_check_interval", "500ms"),
    // Counter rows are updated continuously: their dead versions must not accumulate for a minute.
    ("autovacuum_naptime", "10s"),
    // Avoids /dev/shm, which is small in containers and which systemd clears when an ordinary user logs out.
    ("min_dynamic_shared_memory", "16MB"),
    // Statements are short, and the compiler may be absent.
    ("jit", "off"),
    // A failed statement is reported to its client. The log, which is bounded only at start, records events of the
    // server.
    ("log_min_messages", "log"),
    ("log_checkpoints", "off"),
    ("logging_collector", "off"),
    ("log_destination", "stderr"),
];

/// A database ready to start: all settings are decided and no process runs.
#[derive(Debug)]
pub(super) struct PostgresCluster {
    pub(super) socket_dir: PathBuf,
    pub(super) binaries: Binaries,
    /// Lock of the state directory, owned by this process until the value is dropped.
    _lock: File,
    state_dir: PathBuf,
    account: Account,
    options: Vec<(String, String)>,
}

impl PostgresCluster {
    /// Locks the state directory, selects the binaries, and creates the database on first use.
    ///
    /// # Errors
    /// [`EmbeddedError`]; no process runs after any of them.
    pub(super) fn prepare(settings: EmbeddedSettings) -> Result<Self, EmbeddedError> {
        let state_dir = open_state_dir(&settings.data_dir)?;
        check_contents(&state_dir)?;
        let lock = lock(&state_dir)?;
        let data_dir = state_dir.join(DATA_DIR);
        let account = Account::choose(&data_dir)?;
        account.check_reach(&state_dir)?;
        let made_by = version_of(&data_dir)?;
        take_over(&data_dir, &state_dir.join(SOCKET_DIR), &account).map_err(EmbeddedError::directory(&data_dir))?;
        let binaries = Binaries::find(&state_dir, made_by)?;
        account.check_reach(&binaries.program("postgres"))?;
        let socket_dir = open_socket_dir(&state_dir, &account)?;
        let options = settings.server_options;
        let cluster = Self { socket_dir, binaries, _lock: lock, state_dir, account, options };
        if made_by.is_none() {
            cluster.init(&data_dir)?;
        }
        cluster.write_access_rules()?;
        Ok(cluster)
    }

    pub(super) fn data_dir(&self) -> PathBuf {
        self.state_dir.join(DATA_DIR)
    }

    /// Returns the files by which a server claims the data and the socket.
    pub(super) fn lock_files(&self) -> [PathBuf; 2] {
        [self.data_dir().join("postmaster.pid"), self.socket_dir.join(format!(".s.PGSQL.{PORT}.lock"))]
    }

    pub(super) fn log_path(&self) -> PathBuf {
        self.state_dir.join("server.log")
    }

    /// Creates the database under a temporary name and renames it, so that an interruption leaves no partial database.
    fn init(&self, data_dir: &Path) -> Result<(), EmbeddedError> {
        let unfinished = self.state_dir.join("data.init");
        match fs::remove_dir_all(&unfinished) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(EmbeddedError::directory(unfinished)(error));
            }
            _ => {}
        }
        make_private_dir(&unfinished, &self.account).map_err(EmbeddedError::directory(&unfinished))?;
        tracing::info!("creating a PostgreSQL {} database in {}", self.binaries.major, data_dir.display());
        let mut command = self.account.command(&self.binaries.program("initdb"), "KILL");
        self.binaries.set_environment(&mut command);
        command.args(["-U", USER, "--auth-local=peer", "--auth-host=reject", "-E", "UTF8", "--locale=C"]);
        command.args(["--data-checksums", "--no-instructions"]);
        let output = command.arg("-D").arg(&unfinished).output().map_err(setpriv_failed)?;
        if !output.status.success() {
            let detail = first_complaints(&String::from_utf8_lossy(&output.stderr));
            return Err(EmbeddedError::Initdb { path: data_dir.to_owned(), detail });
        }
        fs::rename(&unfinished, data_dir).map_err(EmbeddedError::directory(data_dir))?;
        let synced = File::open(&self.state_dir).and_then(|dir| dir.sync_all());
        synced.map_err(EmbeddedError::directory(&self.state_dir))
    }

    /// Writes the access rules anew, regardless of those in the data. Peer authentication by the operating system
    /// decides, besides the 0700 socket directory.
    fn write_access_rules(&self) -> Result<(), EmbeddedError> {
        let rules = format!("local all \"{USER}\" peer map={MAP}\n");
        let accounts = [Some(self.account.name.clone()), Account::name_of(0)?];
        let map: String = accounts.into_iter().flatten().map(|name| map_line(&name)).collect();
        for (path, text) in self.access_files().iter().zip([rules, map]) {
            let write = || {
                let new = path.with_extension("conf.new");
                match fs::remove_file(&new) {
                    Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                    _ => {}
                }
                let mut file = OpenOptions::new().write(true).create_new(true).mode(0o644).open(&new)?;
                file.write_all(text.as_bytes())?;
                file.set_permissions(Permissions::from_mode(0o644))?;
                fs::rename(&new, path)
            };
            write().map_err(EmbeddedError::directory(path))?;
        }
        Ok(())
    }

    /// Returns the paths of the access rules and the account map, which are outside the data, because only this program
    /// writes them.
    fn access_files(&self) -> [PathBuf; 2] {
        ["pg_hba.conf", "pg_ident.conf"].map(|name| self.state_dir.join(name))
    }

    /// Returns the command that becomes the server, with output to `log`.
    pub(super) fn server_command(&self, log: File) -> Result<Command, EmbeddedError> {
        let stdout = log.try_clone().map_err(EmbeddedError::directory(self.log_path()))?;
        let mut command = self.account.command(&self.binaries.program("postgres"), "INT");
        self.binaries.set_environment(&mut command);
        command.stdout(stdout).stderr(Stdio::from(log));
        command.arg("-D").arg(self.data_dir()).arg("-k").arg(&self.socket_dir);
        command.arg("-c").arg(format!("port={PORT}"));
        for (name, path) in ["hba_file=", "ident_file="].into_iter().zip(self.access_files()) {
            let mut option = OsString::from(name);
            option.push(path);
            command.arg("-c").arg(option);
        }
        for (name, value) in SERVER_OPTIONS {
            command.arg("-c").arg(format!("{name}={value}"));
        }
        // A later option overrides an earlier one.
        for (name, value) in &self.options {
            command.arg("-c").arg(format!("{name}={value}"));
        }
        Ok(command)
    }

    /// Opens the log for appending. Rotates it first if it is too large.
    pub(super) fn open_log(&self) -> Result<File, EmbeddedError> {
        let path = self.log_path();
        let open = || {
            match fs::symlink_metadata(&path) {
                // Any other kind of file was not created here, and root must not write through a link.
                Ok(found) if !found.is_file() || found.len() > LOG_BYTES_MAX => {
                    fs::rename(&path, path.with_extension("log.1"))?;
                }
                _ => {}
            }
            OpenOptions::new().append(true).create(true).mode(0o600).open(&path)
        };
        open().map_err(EmbeddedError::directory(&path))
    }

    /// Returns the first complaints in the log after the byte `from`.
    pub(super) fn log_tail(&self, from: u64) -> String {
        let mut text = Vec::new();
        let read = File::open(self.log_path()).and_then(|mut file| {
            file.seek(SeekFrom::Start(from))?;
            file.take(64 << 10).read_to_end(&mut text)
        });
        match read {
            Ok(_) => first_complaints(&String::from_utf8_lossy(&text)),
            Err(error) => format!("its log cannot be read: {error}"),
        }
    }
}

/// Returns a line of the map from accounts to database users.
fn map_line(account: &str) -> String {
    format!("{MAP} \"{}\" \"{USER}\"\n", account.replace('"', "\"\""))
}

/// Changes the owner of the files of an earlier release's account. The data directory is last, because its owner marks
/// completion.
fn take_over(data_dir: &Path, socket_dir: &Path, account: &Account) -> io::Result<()> {
    let former = match fs::metadata(data_dir) {
        Ok(found) if account.switch && found.uid() != 0 && found.uid() != account.uid => found.uid(),
        _ => return Ok(()),
    };
    if !end_old(data_dir) {
        return Err(io::Error::other("the PostgreSQL server of an earlier run does not stop"));
    }
    tracing::info!("the data in {} now belongs to `{}`", data_dir.display(), account.name);
    if socket_dir.exists() {
        account.take_over(socket_dir, former)?;
    }
    account.take_over(data_dir, former)
}

fn open_state_dir(path: &Path) -> Result<PathBuf, EmbeddedError> {
    let open = || {
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent)?;
        }
        // The account that root selects must pass through the directory; secret content has its own 0700 directory.
        let mode = if is_root() { 0o755 } else { 0o700 };
        match DirBuilder::new().mode(mode).create(path) {
            Ok(()) => fs::set_permissions(path, Permissions::from_mode(mode))?,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                // An empty directory was created for this program. A directory with content stays unchanged.
                let found = fs::metadata(path)?;
                if is_root() && found.uid() == 0 && fs::read_dir(path)?.next().is_none() {
                    fs::set_permissions(path, Permissions::from_mode(found.mode() | 0o011))?;
                }
            }
            Err(error) => return Err(error),
        }
        fs::canonicalize(path)
    };
    open().map_err(EmbeddedError::directory(path))
}

/// Rejects a directory with unknown files, unless it contains a database.
fn check_contents(state_dir: &Path) -> Result<(), EmbeddedError> {
    if has_database(state_dir) {
        return Ok(());
    }
    let other = || -> io::Result<Option<OsString>> {
        for entry in fs::read_dir(state_dir)? {
            let name = entry?.file_name();
            if !OWN_FILES.iter().any(|own| name == *own) {
                return Ok(Some(name));
            }
        }
        Ok(None)
    };
    match other().map_err(EmbeddedError::directory(state_dir))? {
        Some(found) => Err(EmbeddedError::OtherFiles { path: state_dir.to_owned(), found: found.into() }),
        None => Ok(()),
    }
}

/// Returns whether a state directory contains a database.
pub(super) fn has_database(state_dir: &Path) -> bool {
    state_dir.join(DATA_DIR).join("PG_VERSION").exists()
}

fn lock(state_dir: &Path) -> Result<File, EmbeddedError> {
    let path = state_dir.join("lock");
    let open = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&path);
    let file = open.map_err(EmbeddedError::directory(&path))?;
    let begun = Instant::now();
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            // The files of a killed process stay open for a moment.
            Err(TryLockError::WouldBlock) if begun.elapsed() < LOCK_WAIT => thread::sleep(LOCK_POLL),
            Err(TryLockError::WouldBlock) => return Err(EmbeddedError::InUse { path: state_dir.to_owned() }),
            Err(TryLockError::Error(error)) => return Err(EmbeddedError::directory(path)(error)),
        }
    }
}

/// Returns the major version that created the data; `None` if there is none yet.
fn version_of(data_dir: &Path) -> Result<Option<u32>, EmbeddedError> {
    let path = data_dir.join("PG_VERSION");
    match fs::read_to_string(&path) {
        Ok(text) => {
            let unreadable = || io::Error::new(io::ErrorKind::InvalidData, "it has no version number");
            let major = text.trim().parse().map_err(|_| EmbeddedError::directory(path)(unreadable()))?;
            Ok(Some(major))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            // An empty directory may exist at the place of the database.
            if fs::read_dir(data_dir).is_ok_and(|mut entries| entries.next().is_some()) {
                let other = io::Error::new(io::ErrorKind::InvalidData, "it holds something other than a database");
                return Err(EmbeddedError::directory(data_dir)(other));
            }
            Ok(None)
        }
        Err(error) => Err(EmbeddedError::directory(path)(error)),
    }
}

fn make_private_dir(path: &Path, account: &Account) -> io::Result<()> {
    DirBuilder::new().mode(0o700).create(path)?;
    account.own(path)
}

/// Creates the socket directory: in the state directory, or in the system's temporary directory if that path is too
/// long.
fn open_socket_dir(state_dir: &Path, account: &Account) -> Result<PathBuf, EmbeddedError> {
    let mut hasher = DefaultHasher::new();
    state_dir.hash(&mut hasher);
    let name = format!("linkis-rm-{:016x}", hasher.finish());
    let mut candidates = vec![state_dir.join(SOCKET_DIR)];
    for dir in [env::temp_dir(), PathBuf::from("/tmp")] {
        // Another user may have taken a name there.
        candidates.extend((0..8).map(|number| dir.join(format!("{name}-{number}"))));
    }
    let mut refused = io::Error::from(io::ErrorKind::InvalidFilename);
    for path in candidates.iter().filter(|path| socket_fits(path)) {
        match use_socket_dir(path, account) {
            Ok(()) => {
                account.check_reach(path)?;
                return Ok(path.clone());
            }
            Err(error) => refused = error,
        }
    }
    Err(EmbeddedError::directory(state_dir.join(SOCKET_DIR))(refused))
}

fn use_socket_dir(path: &Path, account: &Account) -> io::Result<()> {
    match make_private_dir(path, account) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            let found = fs::symlink_metadata(path)?;
            let private = found.is_dir() && found.uid() == account.uid && found.mode() & 0o077 == 0;
            if private { Ok(()) } else { Err(error) }
        }
        made => made,
    }
}

fn socket_fits(dir: &Path) -> bool {
    let socket = dir.join(format!(".s.PGSQL.{PORT}"));
    let bytes = socket.as_os_str().as_bytes();
    // The server parses this option as a list, in which these two characters are special.
    bytes.len() <= SOCKET_PATH_BYTES_MAX && !bytes.contains(&b',') && !bytes.contains(&b'"')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn account_name_with_spaces_is_one_word_of_ident_map() {
        assert_eq!(map_line("postgres"), "owner \"postgres\" \"postgres\"\n");
        assert_eq!(map_line("DOM\\a \"b"), "owner \"DOM\\a \"\"b\" \"postgres\"\n");
    }

    #[test]
    fn socket_path_of_107_plain_bytes_fits() {
        let rest = "/.s.PGSQL.5432".len();
        let of = |bytes: usize| PathBuf::from(format!("/{}", "d".repeat(bytes - rest - 1)));
        assert!(socket_fits(&of(107)));
        assert!(!socket_fits(&of(108)));
        assert!(!socket_fits(Path::new("/state,dir")));
    }
}
