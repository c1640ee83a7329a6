//! Caller that adopts running engines, also where they do not fit. Some of them report, and all of them end.

use std::env;

use rm_client::RmClient;
use rm_model::{
    adoption::AdoptTicket,
    operation::{ReleaseTicket, UpdateTicket},
};
use uuid::Uuid;

use super::{
    journal::Answer,
    random::Random,
    workload::{ENGINE_TYPES, Hosts, Shared, TENANTS, of_tenant},
};
use crate::harness::*;

/// Adopts one engine after another. An earlier release has no adoption.
pub async fn run(shared: Shared, mut random: Random) {
    if env::var("LINKIS_RM_FAULTS_OTHER").is_ok() {
        return;
    }
    while shared.goes_on(random.millis(5, 150)).await {
        let host = random.pick([Hosts::HOT[0], Hosts::HOT[1], Hosts::BIG[0], Hosts::RESIZED, Hosts::FLEETING]);
        let adopt = AdoptTicket {
            // A random id, as in Linkis.
            ticket_id: Uuid::new_v4(),
            user: name(&format!("shared{}", random.between(0, 4))),
            creator: name(random.pick(["IDE", "notebook", "batch"])),
            engine_type: random.pick(ENGINE_TYPES).to_owned(),
            em: em(host),
            labels: of_tenant(random.pick(TENANTS)),
            engine: engine(host),
            used: load(random.between(1, 6), random.between(1, 4), 1),
        };
        live(&shared, &mut random, &adopt).await;
    }
}

async fn live(shared: &Shared, random: &mut Random, adopt: &AdoptTicket) {
    let (journal, ticket_id) = (&shared.journal, adopt.ticket_id);
    journal.adopting(ticket_id);
    let adopting = async |rm: RmClient| rm.adopt_ticket(adopt).await;
    if shared.insist(random, "adopt", adopting).await.is_none() {
        return;
    }
    journal.adopted(adopt);
    if random.percent(50) {
        let used = load(1, 1, 1);
        let report =
            UpdateTicket { ticket_id, user: adopt.user.clone(), em: adopt.em.clone(), used: used.clone(), epoch: None };
        let report_use = async |rm: RmClient| rm.resource_reported(&report).await;
        if shared.insist(random, "reported", report_use).await.is_some() {
            journal.note(ticket_id, "reported", |life| life.reported = Some(used));
        }
    }
    if random.percent(30) {
        // A repetition changes nothing, after any report; another content is rejected.
        shared.insist(random, "adopt", adopting).await;
        let other = AdoptTicket { creator: name("another"), ..adopt.clone() };
        let answer = journal.call("adopt another", shared.client(random).adopt_ticket(&other)).await;
        journal.check(!matches!(answer, Answer::Done(_)), || format!("{other:?} was adopted instead of {adopt:?}"));
    }
    random.pause(0, 300).await;
    journal.note(ticket_id, "release asked", |life| life.release_asked = true);
    let release = ReleaseTicket { ticket_id, user: adopt.user.clone(), em: adopt.em.clone() };
    let give_back = async |rm: RmClient| rm.resource_released(&release).await;
    if shared.insist(random, "released", give_back).await.is_some() {
        journal.note(ticket_id, "released", |life| life.over = true);
    }
    if random.percent(20) {
        let again = journal.call("adopt", shared.client(random).adopt_ticket(adopt)).await;
        journal.check(!matches!(again, Answer::Done(_)), || format!("{ticket_id} was adopted when it was over"));
    }
}
