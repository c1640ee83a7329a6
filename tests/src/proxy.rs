//! Proxy in front of the socket of PostgreSQL, which delays, cuts or freezes connections when a test demands it.

use std::{
    io,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{
        UnixListener, UnixStream,
        unix::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::watch,
};
use tokio_util::task::AbortOnDropHandle;

use crate::scratch;

/// Name of PostgreSQL's socket in its folder.
const SOCKET: &str = ".s.PGSQL.5432";

/// Time for a sent commit to reach the database before its connection is cut.
const COMMIT_ARRIVES: Duration = Duration::from_millis(50);

/// Moment at which a committing connection is cut.
#[derive(Clone, Copy, Debug)]
pub enum Cut {
    /// The COMMIT never reaches the database.
    BeforeCommit,
    /// The database commits, and its reply is lost.
    AfterCommit,
    /// The database commits, the connection stays, and no bytes pass on any connection, as in [`FaultPlan::Hole`].
    Silence,
}

/// Treatment of bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum FaultPlan {
    /// Bytes pass.
    Fair,
    /// Bytes pass late.
    Slow(Duration),
    /// Bytes of the server wait.
    Mute,
    /// Bytes pass in neither direction, and no connection ends.
    Hole,
}

/// Treatment of open connections.
#[derive(Clone, Copy, Debug, Default)]
struct Generations {
    /// Connections before this number are closed.
    living: u64,
    /// Connections before this number pass no bytes, as behind a firewall that dropped their state.
    known: u64,
    /// Number of the next connection.
    now: u64,
}

/// A proxy with a socket in its own folder, which exists until the proxy is dropped.
pub struct Proxy {
    folder: PathBuf,
    way: Arc<Way>,
    _accepting: AbortOnDropHandle<()>,
}

/// State of all connections of a proxy.
struct Way {
    target: PathBuf,
    weather: watch::Sender<FaultPlan>,
    generations: watch::Sender<Generations>,
    cuts: Mutex<Option<(Cut, u32)>>,
    passed: AtomicU64,
}

impl Proxy {
    /// Starts a proxy in front of the PostgreSQL whose socket is in the folder `target`. PostgreSQL may stop and start meanwhile.
    pub fn start(name: &str, target: &Path) -> Self {
        let folder = scratch(&format!("proxy-{name}"));
        std::fs::create_dir_all(&folder).unwrap();
        let listener = UnixListener::bind(folder.join(SOCKET)).unwrap();
        let way = Arc::new(Way {
            target: target.join(SOCKET),
            weather: watch::Sender::new(FaultPlan::Fair),
            generations: watch::Sender::default(),
            cuts: Mutex::default(),
            passed: AtomicU64::default(),
        });
        let accepting = AbortOnDropHandle::new(tokio::spawn(accept(listener, way.clone())));
        Self { folder, way, _accepting: accepting }
    }

    /// Returns the folder of the proxy's socket.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Cuts the next `count` connections that commit.
    pub fn cut_commits(&self, cut: Cut, count: u32) {
        *self.way.cuts.lock().unwrap() = (count > 0).then_some((cut, count));
    }

    /// Returns how many messages have passed in both directions.
    pub fn passed(&self) -> u64 {
        self.way.passed.load(Ordering::SeqCst)
    }

    /// Returns the number of connections that are still to be cut.
    pub fn cuts_left(&self) -> u32 {
        self.way.cuts.lock().unwrap().map_or(0, |(_, count)| count)
    }

    /// Accepts no further connections; open ones stay.
    pub fn close(&self) {
        std::fs::rename(self.folder.join(SOCKET), self.folder.join("closed")).unwrap();
    }

    /// Accepts connections again.
    pub fn open(&self) {
        std::fs::rename(self.folder.join("closed"), self.folder.join(SOCKET)).unwrap();
    }

    /// Closes all open connections.
    pub fn cut_all(&self) {
        self.way.generations.send_modify(|generations| {
            generations.now += 1;
            generations.living = generations.now;
        });
    }

    /// Makes all open connections silent; new ones pass bytes.
    pub fn forget_all(&self) {
        self.way.generations.send_modify(|generations| {
            generations.now += 1;
            generations.known = generations.now;
        });
    }

    /// Sets the treatment of bytes from now on.
    pub fn set_fault_plan(&self, weather: FaultPlan) {
        self.way.weather.send_replace(weather);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        // The scratch folder of a run that failed is removed by the next run.
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

async fn accept(listener: UnixListener, way: Arc<Way>) {
    loop {
        let (client, _) = listener.accept().await.unwrap();
        tokio::spawn(serve(client, way.clone()));
    }
}

/// Serves one connection until either side closes it, or it is cut.
async fn serve(client: UnixStream, way: Arc<Way>) {
    let generation = way.generations.borrow().now;
    let mut generations = way.generations.subscribe();
    let Ok(server) = UnixStream::connect(&way.target).await else { return };
    let ((mut from_client, to_client), (from_server, to_server)) = (client.into_split(), server.into_split());
    let answers = AbortOnDropHandle::new(tokio::spawn(copy(from_server, to_client, way.clone(), generation)));
    tokio::select! {
        // Either side may close at any time.
        _ = forward(&mut from_client, to_server, answers, &way, generation) => {}
        _ = generations.wait_for(|generations| generation < generations.living) => {}
    }
}

async fn copy(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, way: Arc<Way>, generation: u64) -> io::Result<()> {
    let mut buffer = vec![0; 1 << 16];
    loop {
        let read = from.read(&mut buffer).await?;
        if read == 0 {
            return Ok(());
        }
        // The sender lives as long as `way`.
        let _ = way.weather.subscribe().wait_for(|weather| *weather != FaultPlan::Mute).await;
        way.pass(generation).await;
        to.write_all(&buffer[..read]).await?;
    }
}

/// Forwards the bytes of the client until one of its commits must be cut.
async fn forward(
    from: &mut OwnedReadHalf,
    mut to: OwnedWriteHalf,
    answers: AbortOnDropHandle<io::Result<()>>,
    way: &Way,
    generation: u64,
) -> io::Result<()> {
    let mut buffer = vec![0; 1 << 16];
    loop {
        let read = from.read(&mut buffer).await?;
        if read == 0 {
            return Ok(());
        }
        let said = &buffer[..read];
        way.pass(generation).await;
        let commits = [&b"COMMIT\0"[..], b"COMMIT AND CHAIN\0"]
            .iter()
            .any(|commit| said.windows(commit.len()).any(|said| said == *commit));
        match commits.then(|| way.take_cut()).flatten() {
            None => to.write_all(said).await?,
            Some(Cut::BeforeCommit) => return Ok(()),
            Some(Cut::AfterCommit) => {
                answers.abort();
                to.write_all(said).await?;
                tokio::time::sleep(COMMIT_ARRIVES).await;
                return Ok(());
            }
            Some(Cut::Silence) => {
                way.weather.send_replace(FaultPlan::Hole);
                to.write_all(said).await?;
            }
        }
    }
}

impl Way {
    /// Waits until bytes of a connection may pass.
    async fn pass(&self, generation: u64) {
        let weather = *self.weather.borrow();
        match weather {
            FaultPlan::Fair | FaultPlan::Mute => {}
            FaultPlan::Slow(late) => tokio::time::sleep(late).await,
            FaultPlan::Hole => {
                // The sender lives as long as `self`.
                let _ = self.weather.subscribe().wait_for(|weather| *weather != FaultPlan::Hole).await;
            }
        }
        let Generations { living, known, .. } = *self.generations.borrow();
        if generation < living.max(known) {
            std::future::pending::<()>().await;
        }
        self.passed.fetch_add(1, Ordering::SeqCst);
    }

    /// Returns whether the current commit must be cut.
    fn take_cut(&self) -> Option<Cut> {
        let mut cuts = self.cuts.lock().unwrap();
        let (cut, count) = (*cuts)?;
        *cuts = (count > 1).then_some((cut, count - 1));
        Some(cut)
    }
}
