//! Use cases, between the transport and the store.
//!
//! - `reading`: what requests are judged by, for a look and for a commit;
//! - [`request_resource`]: resolves a request, judges it first without locks, and has it granted;
//! - [`admission`]: the read-only look, many requests at a time;
//! - [`committer`]: the one way to change anything, many operations to a transaction;
//! - [`audit`]: whether the counters are what the tickets say, and making them so;
//! - [`limits`]: who may hold how much;
//! - [`external`]: clusters whose queues somebody else keeps;
//! - [`history`]: what was done, read to its live end; [`follow`]: the same as it goes on;
//! - [`holds`]: what nobody may change for a while;
//! - [`fair_share`]: places of which nobody has more than his share;
//! - [`heartbeat`]: takes what EMs report, and gives up the tickets that they miss;
//! - [`background`]: what is done although nobody waits for it: expiry, lost EMs, jobs in steps, retention;
//! - [`overview`]: the whole cluster at a moment;
//! - [`refusals`]: who was refused by what, remembered;
//! - [`shared_try`]: one try for all who want the same at the same time;
//! - [`standby`]: what may be a little old, from a host that follows the primary;
//! - [`tasks`]: what all of it runs in;
//! - [`ticket_lookup`]: whose a ticket is, and where, for callers that know only its id;
//! - [`tokens`]: by what callers are known; [`jwt`]: by what others say of them;
//! - [`usage`]: who holds what;
//! - [`waiting`]: whose callers wait in line, and who wakes them.

pub mod admission;
pub mod audit;
pub mod background;
pub mod committer;
pub mod external;
pub mod fair_share;
pub mod follow;
pub mod heartbeat;
pub mod history;
pub mod holds;
pub mod jwt;
pub mod limits;
pub mod overview;
mod reading;
pub mod refusals;
pub mod request_resource;
pub mod shared_try;
pub mod standby;
pub mod tasks;
pub mod ticket_lookup;
pub mod tokens;
pub mod usage;
pub mod waiting;
