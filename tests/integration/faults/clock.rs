//! The clock of one instance, set with libfaketime if it is installed. The time of day of the program jumps; its monotonic clock,
//! the database's clock and the machine's clock do not.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// Path of the library on Debian, for any processor.
const LIBRARIES: &str = "/usr/lib";
const LIBRARY: &str = "faketime/libfaketime.so.1";

/// Clock of one instance.
pub struct Clock {
    library: PathBuf,
    file: PathBuf,
}

impl Clock {
    /// Whether clocks can be set here.
    pub fn can_be_set() -> bool {
        library().is_some()
    }

    /// A clock without an offset, which a file in the folder sets.
    pub fn in_folder(folder: &Path, number: usize) -> Option<Self> {
        let clock = Self { library: library()?, file: folder.join(format!("clock-{number}")) };
        clock.set(0);
        Some(clock)
    }

    /// Makes the process of `command` use this clock.
    pub fn rule(&self, command: &mut Command) {
        command
            .env("LD_PRELOAD", &self.library)
            .env("FAKETIME_TIMESTAMP_FILE", &self.file)
            .env("FAKETIME_NO_CACHE", "1")
            .env("FAKETIME_DONT_FAKE_MONOTONIC", "1");
    }

    /// Sets the clock to `seconds` after the right time; negative for before it.
    pub fn set(&self, seconds: i64) {
        let new = self.file.with_extension("new");
        fs::write(&new, format!("{seconds:+}\n")).unwrap();
        // Renames, because a partly written file has no valid time.
        fs::rename(new, &self.file).unwrap();
    }
}

fn library() -> Option<PathBuf> {
    let folders = fs::read_dir(LIBRARIES).ok()?.filter_map(Result::ok);
    folders.map(|folder| folder.path().join(LIBRARY)).find(|library| library.exists())
}
