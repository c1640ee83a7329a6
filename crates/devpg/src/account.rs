//! System account of the private PostgreSQL server, and commands that run under it.
//!
//! PostgreSQL refuses to run as root, so a root process selects or creates another account.
//! Callers: the other modules of this crate.

use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt, lchown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::error::{EmbeddedError, last_lines};

/// Name of the account that root creates for the server if no suitable account exists.
const OWN: &str = "linkis-rm";

/// Name of the account that unrelated programs share. The server must not use it, because they could reach its files.
const SHARED: &str = "nobody";

const STANDARD_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Account that the server runs as.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Account {
    pub(super) name: String,
    pub(super) uid: u32,
    pub(super) gid: u32,
    /// Whether this process runs as root and must change to the account.
    pub(super) switch: bool,
}

/// Returns whether this process runs as root.
pub(super) fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Returns a command without this process's environment, directory and terminal.
pub(super) fn clean_command(program: impl AsRef<std::ffi::OsStr>) -> Command {
    let mut command = Command::new(program);
    command.env_clear().env("PATH", STANDARD_PATH).env("LC_ALL", "C").env("TZ", "GMT");
    // A process group of its own: Ctrl-C reaches this process only, which then stops the server in order.
    command.current_dir("/").stdin(Stdio::null()).process_group(0);
    command
}

impl Account {
    /// Selects the account: this process's own, or as root the owner of the data, else `linkis-rm`, else `postgres`,
    /// else a new `linkis-rm`.
    ///
    /// # Errors
    /// Fails if there is no such account and none can be created, or `getent` cannot be run.
    pub(super) fn choose(data_dir: &Path) -> Result<Self, EmbeddedError> {
        if !is_root() {
            let uid = rustix::process::geteuid().as_raw();
            return Self::look_up(&uid.to_string(), false)?.ok_or(EmbeddedError::NoAccount { uid });
        }
        if let Ok(metadata) = fs::metadata(data_dir)
            && metadata.uid() != 0
        {
            let uid = metadata.uid();
            let owner = Self::look_up(&uid.to_string(), true)?.ok_or(EmbeddedError::NoAccount { uid })?;
            if owner.name != SHARED {
                return Ok(owner);
            }
        }
        for name in [OWN, "postgres"] {
            if let Some(account) = Self::look_up(name, true)? {
                return Ok(account);
            }
        }
        Self::make()
    }

    fn make() -> Result<Self, EmbeddedError> {
        tracing::info!("PostgreSQL does not run as root: making the system account `{OWN}` for it");
        let mut command = clean_command("useradd");
        command.args(["--system", "--user-group", "--no-create-home", "--home-dir", "/nonexistent"]);
        let output = command.args(["--shell", "/usr/sbin/nologin", OWN]).output();
        // Another instance may have created it at the same time.
        Self::look_up(OWN, true)?.ok_or_else(|| EmbeddedError::NoServerAccount {
            detail: match output {
                Ok(output) => last_lines(&String::from_utf8_lossy(&output.stderr), 1),
                Err(error) => error.to_string(),
            },
        })
    }

    /// Returns the name of the account with this user id, if it has one.
    pub(super) fn name_of(uid: u32) -> Result<Option<String>, EmbeddedError> {
        Ok(Self::look_up(&uid.to_string(), false)?.map(|account| account.name))
    }

    fn look_up(key: &str, switch: bool) -> Result<Option<Self>, EmbeddedError> {
        let output = clean_command("getent").args(["passwd", key]).output().map_err(|source| EmbeddedError::Run {
            program: "getent",
            package: "libc-bin",
            source,
        })?;
        Ok(Self::parse(&String::from_utf8_lossy(&output.stdout), switch))
    }

    /// Parses a passwd line: `name:password:uid:gid:...`.
    fn parse(line: &str, switch: bool) -> Option<Self> {
        let mut fields = line.trim_end().split(':');
        let name = fields.next().filter(|name| !name.is_empty())?.to_owned();
        let uid = fields.nth(1)?.parse().ok()?;
        let gid = fields.next()?.parse().ok()?;
        Some(Self { name, uid, gid, switch })
    }

    /// Returns a command that runs as the account and receives `death_signal` when the calling thread ends.
    ///
    /// The thread must therefore exist until the command has ended. `setpriv` replaces itself by the program, so the
    /// child's pid is the program's.
    pub(super) fn command(&self, program: &Path, death_signal: &str) -> Command {
        let mut command = clean_command("setpriv");
        command.args(["--pdeathsig", death_signal]);
        if self.switch {
            command.arg("--reuid").arg(self.uid.to_string());
            command.arg("--regid").arg(self.gid.to_string());
            command.arg("--clear-groups");
        }
        command.arg(program);
        command
    }

    /// Changes the owner of a new file or directory to the account.
    pub(super) fn own(&self, path: &Path) -> io::Result<()> {
        if self.switch { lchown(path, Some(self.uid), Some(self.gid)) } else { Ok(()) }
    }

    /// Changes the owner of everything in the directory `path` that belongs to `former`. The directory itself is last,
    /// so that an interrupted change continues at the next start. Links are not followed, and files of other owners
    /// stay unchanged.
    pub(super) fn take_over(&self, path: &Path, former: u32) -> io::Result<()> {
        let mut command = clean_command("chown");
        command.args(["--recursive", "--no-dereference"]).arg(format!("--from={former}"));
        let output = command.arg(format!("{}:{}", self.uid, self.gid)).arg("--").arg(path).output()?;
        if output.status.success() {
            return Ok(());
        }
        Err(io::Error::other(last_lines(&String::from_utf8_lossy(&output.stderr), 1)))
    }

    /// Checks that the account can pass through, or execute, `path`.
    ///
    /// # Errors
    /// [`EmbeddedError::OutOfReach`] with the directory on the path that denies access.
    pub(super) fn check_reach(&self, path: &Path) -> Result<(), EmbeddedError> {
        if !self.switch {
            return Ok(());
        }
        // The system decides, because it alone knows every rule; the permission bits only locate the obstacle.
        let output = self.command(Path::new("test"), "KILL").arg("-x").arg(path).output().map_err(setpriv_failed)?;
        if output.status.success() {
            return Ok(());
        }
        Err(EmbeddedError::OutOfReach {
            path: path.to_owned(),
            closed: self.first_closed(path),
            account: self.name.clone(),
        })
    }

    fn first_closed(&self, path: &Path) -> PathBuf {
        let mut way: Vec<&Path> = path.ancestors().collect();
        way.reverse();
        let closed = way.into_iter().find(|step| {
            fs::metadata(step).is_ok_and(|m| !may_pass(m.mode(), m.uid() == self.uid, m.gid() == self.gid))
        });
        closed.unwrap_or(path).to_owned()
    }
}

/// Returns whether the permission bits let the account pass through a directory.
fn may_pass(mode: u32, is_owner: bool, in_group: bool) -> bool {
    let bit = if is_owner {
        0o100
    } else if in_group {
        0o010
    } else {
        0o001
    };
    mode & bit != 0
}

/// Returns the error for a command of [`Account::command`] that could not be spawned.
pub(super) fn setpriv_failed(source: io::Error) -> EmbeddedError {
    EmbeddedError::Run { program: "setpriv", package: "util-linux", source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passwd_lines_are_parsed() {
        let account = Account::parse("postgres:x:101:104:admin,,,:/var/lib/postgresql:/bin/bash\n", true);
        assert_eq!(account, Some(Account { name: "postgres".to_owned(), uid: 101, gid: 104, switch: true }));
        assert_eq!(Account::parse("", false), None);
        assert_eq!(Account::parse("postgres:x:many:104:", false), None);
    }

    #[test]
    fn permission_of_most_specific_class_decides() {
        assert!(may_pass(0o700, true, false));
        assert!(!may_pass(0o701, false, true));
        assert!(may_pass(0o701, false, false));
        assert!(!may_pass(0o077, true, true));
    }
}
