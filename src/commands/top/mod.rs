//! `top`: live view of the cluster on a terminal.
//!
//! A task calls the service at an interval and sends the cluster feed; the main loop renders it and handles keys.
//! Never: changes anything in the service.
//!
//! - `state`: cluster feed and view state; `draw`: rendering of both;
//! - `keys`: parser of terminal input; `screen`: the terminal.

use std::time::Duration;

use clap::Args;
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::watch,
    time::{Instant, sleep},
};

use crate::config::parse_duration;
use rm_client::calls;
use rm_proto::v1::{EmResource, GetOverviewRequest, ListEmsRequest, ListWaitingRequest};

use super::{
    error::{CommandFailure, CommandReply},
    output::{is_attended, terminal},
    service::{EndpointArguments, ServiceClient},
};

pub mod draw;
mod keys;
mod screen;
pub mod state;

use screen::Screen;
use state::{ClusterFeed, ViewState};

/// Timeout of a call, after which the view shows the failure.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Maximum number of EMs.
const EMS_MAX: usize = 20_000;

/// Maximum number of waiting requests.
const LINE_MAX: i32 = 8;

/// Pause between two lists of all EMs, as a multiple of the duration of the list. The load stays low even with ten viewers.
const EM_REST_FACTOR: u32 = 100;

/// Arguments of `top`.
#[derive(Debug, Clone, Args)]
pub struct TopCommand {
    #[command(flatten)]
    service: EndpointArguments,

    /// Interval between updates.
    #[arg(long, value_name = "DURATION", default_value = "1s", value_parser = interval)]
    interval: Duration,
}

fn interval(text: &str) -> Result<Duration, String> {
    parse_duration("--interval", text, "500ms", "1h")
}

impl TopCommand {
    /// Shows the cluster until the user quits.
    pub async fn run(self) -> Result<CommandReply, CommandFailure> {
        let service = self.service.connect(TIMEOUT)?;
        if !is_attended() || terminal::size().is_none() {
            return Err(CommandFailure::Usage(
                "top needs a terminal; linkis-rm overview prints the totals once".to_owned(),
            ));
        }
        // The first calls run before the terminal is taken, so that their failure is printed normally.
        let mut cluster = ClusterFeed { address: service.address().to_owned(), ..ClusterFeed::default() };
        let mut next_ems = Instant::now();
        look(&service, &mut cluster, &mut next_ems).await?;
        let (sender, mut receiver) = watch::channel(cluster.clone());
        let polling = tokio::spawn(follow(service, cluster, next_ems, self.interval, sender));
        let shown = show(&mut receiver).await;
        polling.abort();
        shown?;
        Ok(CommandReply::Yes)
    }
}

/// Renders each new feed and handles keys, resizes and signals.
async fn show(receiver: &mut watch::Receiver<ClusterFeed>) -> Result<(), CommandFailure> {
    let (mut terminate, mut hangup) = (signal(SignalKind::terminate())?, signal(SignalKind::hangup())?);
    let mut resized = signal(SignalKind::window_change())?;
    let screen = Screen::enter()?;
    let mut typed = screen::typed();
    let mut look = ViewState::default();
    loop {
        let Some(size) = terminal::size() else { return Ok(()) };
        let picture = draw::draw(&receiver.borrow_and_update(), &mut look, size);
        screen.show(&picture)?;
        tokio::select! {
            key = typed.recv() => match key {
                Some(key) if look.press(key, picture.page) => {}
                _ => return Ok(()),
            },
            changed = receiver.changed() => if changed.is_err() { return Ok(()) },
            _ = resized.recv() => {}
            _ = terminate.recv() => return Ok(()),
            _ = hangup.recv() => return Ok(()),
        }
    }
}

/// Calls the service at the interval, while the view is open.
async fn follow(
    service: ServiceClient,
    mut cluster: ClusterFeed,
    mut next_ems: Instant,
    interval: Duration,
    sender: watch::Sender<ClusterFeed>,
) {
    loop {
        sleep(interval).await;
        cluster.problem = match look(&service, &mut cluster, &mut next_ems).await {
            Ok(()) => None,
            Err(failure) => Some(failure.to_string()),
        };
        if sender.send(cluster.clone()).is_err() {
            return;
        }
    }
}

/// Fetches the overview and the head of the wait queues, and at longer intervals all EMs.
async fn look(
    service: &ServiceClient,
    cluster: &mut ClusterFeed,
    next_ems: &mut Instant,
) -> Result<(), CommandFailure> {
    let overview = service.make(&calls::GET_OVERVIEW, &GetOverviewRequest {}).await?;
    let overview = overview.overview.unwrap_or_default();
    // Without waiting requests, the call is omitted.
    let line = match overview.line.is_some_and(|line| line.waiting > 0) {
        true => {
            let head = ListWaitingRequest { page_size: LINE_MAX, ..Default::default() };
            service.make(&calls::LIST_WAITING, &head).await?.waiting
        }
        false => Vec::new(),
    };
    let begin = Instant::now();
    if *next_ems <= begin {
        (cluster.ems, cluster.has_more_ems) = ems(service).await?;
        *next_ems = begin + begin.elapsed() * EM_REST_FACTOR;
    }
    cluster.overview = overview;
    cluster.line = line;
    Ok(())
}

/// Returns the EMs, and whether there are more.
async fn ems(service: &ServiceClient) -> Result<(Vec<EmResource>, bool), CommandFailure> {
    let mut ems = Vec::new();
    let mut page_token = String::new();
    loop {
        let page = ListEmsRequest { page_size: 1000, page_token, ..Default::default() };
        let page = service.make(&calls::LIST_EMS, &page).await?;
        ems.extend(page.ems);
        page_token = page.next_page_token;
        if page_token.is_empty() || ems.len() >= EMS_MAX {
            return Ok((ems, !page_token.is_empty()));
        }
    }
}
