//! How much memory a process has, by the kernel.

use std::fs;

use crate::Failure;

/// What resets the peak, written into `/proc/PID/clear_refs`.
const RESET_PEAK: &str = "5";

/// The memory of a process, and what it was when the look began.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Memory {
    process: u32,
    /// Megabytes.
    pub idle: f64,
}

impl Memory {
    /// Takes what the process has now as idle, and forgets its peak so far.
    pub fn of(process: u32) -> Result<Self, Failure> {
        fs::write(format!("/proc/{process}/clear_refs"), RESET_PEAK)?;
        Ok(Self { process, idle: megabytes(process, "VmRSS:")? })
    }

    /// How far it went above that, in megabytes; `None` if it has ended.
    pub fn peak(self) -> Option<f64> {
        Some(megabytes(self.process, "VmHWM:").ok()? - self.idle)
    }

    /// How far above that it is now, in megabytes; `None` if it has ended.
    pub fn above(self) -> Option<f64> {
        Some(megabytes(self.process, "VmRSS:").ok()? - self.idle)
    }
}

fn megabytes(process: u32, name: &str) -> Result<f64, Failure> {
    let text = fs::read_to_string(format!("/proc/{process}/status"))?;
    let line = text.lines().find_map(|line| line.strip_prefix(name)).ok_or("its memory cannot be seen in /proc")?;
    let kibibytes: f64 = line.trim().strip_suffix("kB").unwrap_or(line).trim().parse()?;
    Ok(kibibytes / 1024.0)
}
