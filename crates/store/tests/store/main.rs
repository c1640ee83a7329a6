//! Tests of the store on a real PostgreSQL: locks, constraints, bounded pages, and the steps of longer jobs.

use std::time::Duration;

use rm_model::{
    em::{Em, EmInstance},
    ledger::Deltas,
    name::Labels,
    resource::Resource,
};
use rm_store::{Store, StoreError, batch_write, em_resource, session};
use rm_tests::new_database;
use sqlx::{PgConnection, PgPool};
use time::OffsetDateTime;

mod bounded_pages;
mod locking;
mod snapshot_install;

/// Retention of the history.
const HISTORY: Duration = Duration::from_secs(3600);

/// A new database with the schema, and a store on it.
async fn fresh() -> (PgPool, Store) {
    let options = new_database("template0").await;
    (PgPool::connect_lazy_with(options.clone()), Store::open(options, HISTORY).await.unwrap())
}

fn em(host: &str) -> EmInstance {
    EmInstance::parse("em", "ecm", host).unwrap()
}

/// Memory in bytes, cores and instances, so many of each.
fn load(amount: i64) -> Resource {
    Resource::load_instance(amount, amount, amount).unwrap()
}

/// Writes rows as a batch does.
async fn write(connection: &mut PgConnection, deltas: Deltas) -> Result<(), StoreError> {
    let now = session::clock(&mut *connection).await.unwrap();
    batch_write::write(connection, &deltas, now, None, None).await.map(drop)
}

/// Registers an EM with a capacity of ten.
async fn register(connection: &mut PgConnection, instance: &EmInstance) {
    let (total, none) = (load(10), load(0));
    let em = Em {
        instance: instance.clone(),
        total,
        protected: none.clone(),
        used: none.clone(),
        locked: none,
        used_tickets: Default::default(),
        labels: Labels::default(),
        reserved: Labels::default(),
        epoch: 1,
        register_time: OffsetDateTime::UNIX_EPOCH,
        version: 1,
        going: None,
        counted: Default::default(),
        drain: None,
        is_held: false,
    };
    em_resource::insert(connection, &[em]).await.unwrap();
}
