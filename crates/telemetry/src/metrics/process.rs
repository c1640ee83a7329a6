//! Metrics of the process from `/proc/self`: memory, processor time, open files. Absent on systems other than Linux.

use std::{fmt, fs, os::unix::fs::MetadataExt as _};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric as _},
    metrics::{MetricType, gauge::ConstGauge},
};

/// Collector that reads `/proc/self` at each scrape.
#[derive(Debug)]
pub(super) struct ProcessMetrics {
    /// Unix time of the start of the process, in seconds.
    start_time: Option<f64>,
}

impl ProcessMetrics {
    pub fn new() -> Self {
        // Read once: the start time is constant, and the kernel's statistics take longer to read than those of a
        // process.
        let start_time = ProcessStat::read().zip(boot_time()).map(|(stat, boot_time)| boot_time + stat.started);
        Self { start_time }
    }
}

impl Collector for ProcessMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let mut write = |name: &str, help: &str, kind: MetricType, value: Option<f64>| match value {
            Some(value) => ConstGauge::new(value).encode(encoder.encode_descriptor(name, help, None, kind)?),
            None => Ok(()),
        };
        let stat = ProcessStat::read();
        let (cpu, memory) = (stat.as_ref().map(|stat| stat.cpu), stat.as_ref().map(|stat| stat.resident_memory));
        write("process_cpu_seconds_total", "Processor time of the process.", MetricType::Counter, cpu)?;
        write("process_resident_memory_bytes", "Memory of the process that is in RAM.", MetricType::Gauge, memory)?;
        write("process_open_fds", "Files and sockets that the process has open.", MetricType::Gauge, open_files())?;
        let max_fds = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.map(|most| most as f64);
        write("process_max_fds", "Files and sockets that the process may have open.", MetricType::Gauge, max_fds)?;
        write(
            "process_start_time_seconds",
            "When the process was started, in seconds since 1970: it changes with each restart.",
            MetricType::Gauge,
            self.start_time,
        )
    }
}

/// Values of `/proc/self/stat`.
#[derive(Debug, PartialEq)]
struct ProcessStat {
    /// Processor time in seconds.
    cpu: f64,
    /// Start of the process in seconds after the boot of the machine.
    started: f64,
    /// Resident memory in bytes.
    resident_memory: f64,
}

impl ProcessStat {
    fn read() -> Option<Self> {
        let text = fs::read_to_string("/proc/self/stat").ok()?;
        Self::parse(&text, rustix::param::clock_ticks_per_second() as f64, rustix::param::page_size() as f64)
    }

    fn parse(text: &str, ticks_per_second: f64, page_size: f64) -> Option<Self> {
        // The second field is the program name in brackets, which may contain spaces and brackets.
        let (_, rest) = text.rsplit_once(')')?;
        // The first remaining field is field 3 of proc(5).
        let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
        let field = |number: usize| fields.get(number - 3)?.parse::<f64>().ok();
        Some(Self {
            cpu: (field(14)? + field(15)?) / ticks_per_second,
            started: field(22)? / ticks_per_second,
            resident_memory: field(24)? * page_size,
        })
    }
}

/// Returns the Unix time of the machine's boot, in seconds.
fn boot_time() -> Option<f64> {
    let text = fs::read_to_string("/proc/stat").ok()?;
    text.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()
}

/// Returns the number of open files. Kernels since 6.2 show it as the size of the directory; for older ones the entries
/// are counted.
fn open_files() -> Option<f64> {
    let folder = "/proc/self/fd";
    match fs::metadata(folder).ok()?.size() {
        0 => Some(fs::read_dir(folder).ok()?.count() as f64),
        limit => Some(limit as f64),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn process_stat_with_any_program_name_is_parsed() {
        let stat =
            "42 (a) b (c) S 1 42 42 0 -1 4194560 1 2 3 4 250 50 5 6 20 0 9 0 1000 123456 2560 18446744073709551615";
        let parsed = ProcessStat::parse(stat, 100.0, 4096.0);
        assert_eq!(parsed, Some(ProcessStat { cpu: 3.0, started: 10.0, resident_memory: 2560.0 * 4096.0 }));
        for cut in ["", "42 (a", "42 (a) S 1 2 3"] {
            assert_eq!(ProcessStat::parse(cut, 100.0, 4096.0), None, "{cut}");
        }
    }

    #[test]
    fn process_stat_of_this_process_is_plausible() {
        let stat = ProcessStat::read().unwrap();
        assert!(stat.resident_memory > 1e6, "{stat:?}");
        let now = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().as_secs_f64();
        let age = now - ProcessMetrics::new().start_time.unwrap();
        assert!((-2.0..3600.0).contains(&age), "{age}");
        assert!(open_files().unwrap() >= 3.0);
    }
}
