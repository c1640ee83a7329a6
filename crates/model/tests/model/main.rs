//! Model tests: the ledger against reference models, the cells' protocols and the order of waiting
//! requests in every state, and resources against Apache Linkis.

mod cell_claims_model;
mod cell_shares_model;
mod conformance;
mod harness;
mod ledger_model;
mod ledger_steps;
mod order_model;
