//! What is true of resources, EMs and tickets, and who may have what: pure, without IO, clock or randomness.
//!
//! - [`name`]: names and labels, validated once;
//! - [`principal`]: who calls;
//! - [`access`]: who may do what; [`token`]: by what callers are known;
//! - [`resource`]: the one algebra of amounts;
//! - [`em`]: a host, its counters, and whether it can answer for a request;
//! - [`drain`]: that nothing new is granted on it; [`hold`]: that nothing about it is changed for a while;
//! - [`ticket`]: one grant and its life; [`end`]: how it ends; [`adopt`]: an engine that runs already;
//! - [`ticket_digest`]: whether two sets of tickets are the same;
//! - [`scope`], [`limit`]: sets of labels, what their tickets hold together, and how much they may; [`limit_mode`]: what becomes of more;
//! - [`cap`]: how much a request allows itself;
//! - [`provider`], [`queue`]: clusters whose queues somebody else keeps, and what these have;
//! - [`external`]: how much room such a queue has, by what its cluster showed and what was granted since;
//! - [`policy`]: which limits are for the tickets on a kind of EM;
//! - [`refusal`]: "not enough", explained in Linkis's words; [`refusal_sum`]: how often who met which;
//! - [`scope_kind`]: what a scope is, where names would be too many; [`usage_sum`]: what was used over time;
//! - [`line`]: who waits where, and what the places ahead keep for themselves;
//! - [`judgement`]: whether a request can be granted;
//! - [`report`]: what EMs report, and what follows for their tickets;
//! - [`observation`]: what they see engines use, by which nothing is decided;
//! - [`action`]: the history of what was done; [`state`]: how something stood before and after;
//! - [`audit`]: what is stored against what the tickets say; [`counters`]: what was stored after a commit;
//! - [`overview`]: the whole cluster in a few numbers;
//! - [`timestamp`]: moments as text;
//! - [`operation`]: what can be asked of the ledger, and how it can answer;
//! - [`selector`], [`placement`]: which EMs a request may go to, and which is proposed;
//! - [`ledger`]: `(state, operation) → (outcome, deltas)`.

pub mod access;
pub mod action;
pub mod adopt;
pub mod audit;
pub mod cap;
pub mod counters;
pub mod drain;
pub mod em;
pub mod end;
pub mod external;
pub mod hold;
pub mod judgement;
pub mod ledger;
pub mod limit;
pub mod limit_mode;
pub mod line;
pub mod name;
pub mod observation;
pub mod operation;
pub mod overview;
pub mod placement;
pub mod policy;
pub mod principal;
pub mod provider;
pub mod queue;
pub mod refusal;
pub mod refusal_sum;
pub mod report;
pub mod resource;
pub mod scope;
pub mod scope_kind;
pub mod selector;
#[cfg(feature = "server")]
pub mod state;
pub mod ticket;
pub mod ticket_digest;
pub mod timestamp;
#[cfg(feature = "server")]
pub mod token;
pub mod usage_sum;
