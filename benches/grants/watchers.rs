//! Viewers of the service during a measurement: pages and `top`s with the requests of real ones. The figures have the
//! cost of the service; browsers and terminals are not measured.

use std::{fs::File, io, os::fd::OwnedFd, process::Stdio, thread, time::Duration};

use rustix::{
    pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt},
    termios::{Winsize, tcsetwinsize},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    task::JoinSet,
};

use crate::{
    Failure,
    process::{self, ChildGuard, Server},
};

/// Viewers of a measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Audience {
    /// One page, and a scrape of the metrics.
    Few,
    /// Ten pages and ten `top`s.
    Many,
}

impl Audience {
    pub fn name(self) -> &'static str {
        match self {
            Self::Few => "a page and a scrape each second",
            Self::Many => "10 pages and 10 tops",
        }
    }

    fn pages(self) -> usize {
        match self {
            Self::Few => 1,
            Self::Many => 10,
        }
    }

    fn tops(self) -> usize {
        match self {
            Self::Few => 0,
            Self::Many => 10,
        }
    }
}

/// Interval between two scrapes.
const SCRAPE: Duration = Duration::from_secs(1);

/// Interval at which a page requests its lists, as in `overview.js`.
const SOON: Duration = Duration::from_secs(2);
/// Interval at which a page requests refusals, as in `overview.js`.
const LATER: Duration = Duration::from_secs(30);

/// Timeout until a page has its first event.
const READY_TIMEOUT: Duration = Duration::from_secs(20);

/// Time before a measurement: a new page requests all lists immediately.
const SETTLE: Duration = Duration::from_secs(2);

/// Open pages and `top`s.
pub(crate) struct Watchers {
    /// A task ends only if it fails.
    pages: JoinSet<Failure>,
    tops: Vec<ChildGuard>,
}

impl Watchers {
    /// Opens the viewers and waits until all pages have their first event.
    pub async fn open(server: &Server, audience: Audience) -> Result<Self, Failure> {
        let (mut pages, mut tops) = (JoinSet::new(), Vec::new());
        let (seen, mut ready) = tokio::sync::mpsc::channel(audience.pages());
        if audience == Audience::Few {
            let address = server.http_address().to_owned();
            pages.spawn(async move { ask(&address, "/metrics", SCRAPE).await });
        }
        for _ in 0..audience.pages() {
            let (address, seen) = (server.http_address().to_owned(), seen.clone());
            pages.spawn(async move {
                tokio::select! {
                    failure = follow(&address, seen) => failure,
                    failure = ask(&address, "/api/v1/ListTickets?state=locked&page_size=8", SOON) => failure,
                    failure = ask(&address, "/api/v1/ListActions?newest_first=true&page_size=8", SOON) => failure,
                    failure = ask(&address, "/api/v1/ListRefusals?page_size=1000", LATER) => failure,
                }
            });
        }
        for _ in 0..audience.tops() {
            tops.push(top(&server.url())?);
        }
        let all_ready = async {
            for _ in 0..audience.pages() {
                tokio::select! {
                    Some(()) = ready.recv() => {}
                    Some(failure) = pages.join_next() => return Err(failure?),
                }
            }
            Ok(())
        };
        tokio::time::timeout(READY_TIMEOUT, all_ready).await.map_err(|_| "a page shows nothing")??;
        tokio::time::sleep(SETTLE).await;
        Ok(Self { pages, tops })
    }

    /// Closes the viewers. Fails if one of them ended before.
    pub fn close(mut self) -> Result<(), Failure> {
        if let Some(failure) = self.pages.try_join_next() {
            return Err(format!("a page: {}", failure?).into());
        }
        if !self.tops.iter_mut().all(ChildGuard::is_alive) {
            return Err("a top ended by itself".into());
        }
        Ok(())
    }
}

/// Reads the event stream, and signals the first event.
async fn follow(address: &str, seen: tokio::sync::mpsc::Sender<()>) -> Failure {
    let following = async {
        let mut stream = send(address, "/api/v1/events").await?;
        let (mut buffer, mut text) = (vec![0; 1 << 16], Some(String::new()));
        loop {
            let read = stream.read(&mut buffer).await?;
            if read == 0 {
                return Err::<(), Failure>("the stream ended".into());
            }
            let Some(begun) = &mut text else { continue };
            begun.push_str(&String::from_utf8_lossy(&buffer[..read]));
            if begun.contains("event: picture") {
                text = None;
                seen.send(()).await?;
            }
        }
    };
    following.await.err().unwrap_or_else(|| "the stream ended".into())
}

/// Repeats a request, with a pause after each response.
async fn ask(address: &str, path: &str, pause: Duration) -> Failure {
    loop {
        let asked = async {
            let mut answer = Vec::new();
            send(address, path).await?.read_to_end(&mut answer).await?;
            let is_answered = answer.starts_with(b"HTTP/1.1 200 ");
            let begin = String::from_utf8_lossy(&answer[..answer.len().min(200)]).into_owned();
            if is_answered { Ok::<_, Failure>(()) } else { Err(format!("{path}: {begin}").into()) }
        };
        if let Err(failure) = asked.await {
            return failure;
        }
        tokio::time::sleep(pause).await;
    }
}

async fn send(address: &str, path: &str) -> Result<TcpStream, Failure> {
    let mut stream = TcpStream::connect(address).await?;
    let request = format!("GET {path} HTTP/1.1\r\nHost: {address}\r\nCache-Control: max-age=1\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    Ok(stream)
}

/// Starts the program's `top` on a terminal whose output is read.
fn top(url: &str) -> Result<ChildGuard, Failure> {
    let (mut ours, theirs) = terminal()?;
    let end = || theirs.try_clone().map(Stdio::from);
    // Low priority, because on another machine it would not share the processor.
    let mut command = process::command("nice");
    command
        .args(["-n", "19", env!("CARGO_BIN_EXE_linkis-rm")])
        .args(["top", "--address", url])
        .env("TERM", "xterm")
        .stdin(end()?)
        .stdout(end()?)
        .stderr(end()?);
    let running = ChildGuard::start(&mut command)?;
    // The end of a terminal appears as an error.
    thread::spawn(move || drop(io::copy(&mut ours, &mut io::sink())));
    Ok(running)
}

/// Returns both ends of a pseudo-terminal.
fn terminal() -> Result<(File, OwnedFd), Failure> {
    let ours = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY)?;
    grantpt(&ours)?;
    unlockpt(&ours)?;
    let name = ptsname(&ours, Vec::new())?;
    let theirs = File::options().read(true).write(true).open(name.to_str()?)?;
    tcsetwinsize(&theirs, Winsize { ws_row: 50, ws_col: 200, ws_xpixel: 0, ws_ypixel: 0 })?;
    Ok((ours.into(), theirs.into()))
}
