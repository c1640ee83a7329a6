//! Memory of a process, as the kernel reports it.

use std::fs;

use crate::Failure;

/// Value that resets the peak when it is written to `/proc/PID/clear_refs`.
const RESET_PEAK: &str = "5";

/// A process with its memory at the start of the measurement.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Memory {
    process: u32,
    /// Resident memory at the start, in megabytes.
    pub idle: f64,
}

impl Memory {
    /// Records the current memory as idle and resets the peak.
    pub fn of(process: u32) -> Result<Self, Failure> {
        fs::write(format!("/proc/{process}/clear_refs"), RESET_PEAK)?;
        Ok(Self { process, idle: megabytes(process, "VmRSS:")? })
    }

    /// Returns the peak above idle, in megabytes; `None` if the process has ended.
    pub fn peak(self) -> Option<f64> {
        Some(megabytes(self.process, "VmHWM:").ok()? - self.idle)
    }

    /// Returns the current memory above idle, in megabytes; `None` if the process has ended.
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
