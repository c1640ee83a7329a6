//! Withdrawal of chosen tickets: an operator keeps an engine.
//!
//! Never: chooses a ticket; the task `background::reclaim` does. Caller: `rm_edge::admin`.

use async_recursion::async_recursion as boxed;
use sqlx::Connection as _;
use uuid::Uuid;

use crate::{commit::commit, error::Error};
use rm_model::{name::Name, operation::Rejection, principal::Actor};
use rm_store::{
    Store, StoreError,
    reclaim::{self, WithdrawalResult},
    session::within_timeout,
};

/// Service for chosen tickets. Clones share it.
#[derive(Clone, Debug)]
pub struct ReclaimService {
    store: Store,
}

impl ReclaimService {
    /// Creates the service.
    pub fn new(store: Store) -> Self {
        Self { store }
    }

    /// Withdraws the choice of a ticket. Its engine stays, and is not chosen again for an hour. A repetition changes nothing.
    ///
    /// # Errors
    /// - [`Rejection::NotChosen`] if the ticket is not chosen, or has ended.
    /// - [`Error::CommitUnknown`] if the connection broke during the commit.
    /// - Database errors.
    #[boxed]
    pub async fn withdraw(&self, by: &Actor, ticket_id: Uuid, reason: &Name) -> Result<(), Error> {
        let mut connection = self.store.operators().acquire().await?;
        let withdrawn = within_timeout(async {
            let mut transaction = connection.begin().await?;
            // The task plans again: a plan from before the withdrawal could recall the ticket.
            reclaim::begin(&mut *transaction, Uuid::new_v4()).await?;
            let result = reclaim::withdraw(&mut transaction, ticket_id, by, reason).await?;
            Ok::<_, StoreError>((result, transaction))
        });
        match withdrawn.await? {
            (WithdrawalResult::New, transaction) => commit(transaction).await,
            // The transaction is rolled back: the task's plan stays valid.
            (WithdrawalResult::Repeated, _) => Ok(()),
            (WithdrawalResult::NotChosen, _) => Err(Rejection::NotChosen(ticket_id).into()),
        }
    }
}
