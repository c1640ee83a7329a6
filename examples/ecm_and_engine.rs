//! Life of one engine, from both sides: an EM that provides the capacity of its machine and requests resources, and the
//! engine that it starts.
//!
//! Start the service with `cargo run --release`; then, in another terminal:
//!
//! ```text
//! cargo run --example ecm_and_engine [-- http://127.0.0.1:50051]
//! cargo run --example ecm_and_engine -- http://rm1:50051,http://rm2:50051
//! ```

#![expect(clippy::print_stdout, reason = "an example prints its steps")]

use std::{
    error::Error,
    iter::{once, successors},
    process::ExitCode,
    time::Duration,
};

use rm_client::{ClientError, Code, ResourceRequest, ResultResource, RmClient};
use rm_model::{
    em::{Em, EmInstance},
    name::{Labels, Name},
    operation::{ConfirmTicket, RegisterEm},
    report::{EmReport, Health},
    resource::{Dimension, Resource, format_size},
    ticket::{EngineInstance, TicketState},
};
use uuid::Uuid;

const DEFAULT_ADDRESS: &str = "http://127.0.0.1:50051";
const CALL_TIMEOUT: Duration = Duration::from_secs(10);
const GIB: i64 = 1 << 30;

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let address = std::env::args().nth(1).unwrap_or_else(|| DEFAULT_ADDRESS.into());
    match play(&address).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let causes = successors(error.source(), |cause: &&dyn Error| (*cause).source()).map(ToString::to_string);
            eprintln!("{}", once(error.to_string()).chain(causes).collect::<Vec<_>>().join(": "));
            if error.downcast_ref::<ClientError>().is_some_and(|error| error.code() == Some(Code::Unavailable)) {
                eprintln!("Is the service running at {address}? To start one, type: cargo run --release");
            }
            ExitCode::FAILURE
        }
    }
}

async fn play(address: &str) -> Result<(), Box<dyn Error>> {
    let client = RmClient::new(address, CALL_TIMEOUT)?;
    let em = EmInstance::parse("em", "linkis-cg-engineconnmanager", "example-host:9102")?;
    let user = Name::parse("user", "alice")?;

    // The EM registers with its capacity. The protected part is never granted.
    let total = Resource::load_instance(16 * GIB, 8, 4)?;
    let protected = Resource::load_instance(2 * GIB, 1, 0)?;
    let registration =
        RegisterEm { em: em.clone(), total, protected, labels: Labels::default(), reserved: Labels::default() };
    let registered = client.register(registration).await?;
    step("registered", &em.to_string());
    step("", &fullness(&registered)?);

    // The EM requests resources before it starts an engine. The request id makes a repetition safe when a reply is
    // lost. The client repeats such a call automatically, and generates an id if there is none. A caller that repeats a
    // request after its own restart stores the id.
    let creator = Name::parse("creator", "IDE")?;
    let request = ResourceRequest {
        engine_type: "spark-3.2.1".into(),
        request_id: Some(Uuid::new_v4().to_string()),
        ..ResourceRequest::new(Some(em.clone()), user.clone(), creator, Resource::load_instance(8 * GIB, 4, 1)?)
    };
    let ResultResource::Available(grant) = client.request_resource(&request).await? else {
        return Err(format!("{em} is full: were tickets left on it? restart the service, or try another one").into());
    };
    step("granted", &format!("ticket {}, locked until {}", grant.ticket_id, grant.expires_at));
    let again = client.request_resource(&request).await?;
    let same = again == ResultResource::Available(grant.clone());
    step(
        "repeated",
        if same { "returns the same ticket and locks nothing more" } else { "returns another result: a defect" },
    );
    step("", &fullness(&client.em(&em).await?)?);

    // The engine runs and needs less than was locked: the service frees the difference.
    let engine = EngineInstance::parse("engine", "linkis-cg-engineconn", "example-host:41001")?;
    let used = Some(Resource::load_instance(6 * GIB, 2, 1)?);
    // The epoch names the registration that the EM acts for. A stale EM process that still runs beside its successor
    // thus changes nothing.
    let inited = ConfirmTicket { used, epoch: Some(registered.epoch), ..grant.inited(user.clone(), engine) };
    let ticket = client.resource_inited(&inited).await?;
    if let TicketState::Used { engine, resource, .. } = &ticket.state {
        step(
            "inited",
            &format!("{}/{} uses {}", engine.application_name, engine.instance, amounts(resource.amounts())),
        );
    }
    step("", &fullness(&client.em(&em).await?)?);

    // The EM reports its state and its engines. A ticket that is missing from several reports is ended.
    let report = EmReport {
        em: em.clone(),
        epoch: registered.epoch,
        sequence: 1,
        health: Health::Healthy,
        load: None,
        tickets: vec![grant.ticket_id],
        observed: None,
        idle: vec![],
    };
    let heartbeat = client.heartbeat(&report).await?;
    let (unknown, interval) = (heartbeat.unknown_tickets.len(), heartbeat.interval);
    step("reported", &format!("one engine; {unknown} are unknown, and the next report is wanted within {interval:?}"));

    // A request above the capacity gets a refusal and no error. The refusal states which dimensions are short.
    let too_much = Resource::load_instance(12 * GIB, 6, 1)?;
    let request = ResourceRequest { resource: too_much, request_id: None, ..request };
    if let ResultResource::NotEnough(refusal) = client.request_resource(&request).await? {
        step("refused", &format!("{}: {}", refusal.code, refusal.reason));
        for short in &refusal.shortfalls {
            let [requested, left, most] =
                [short.requested, short.available, short.max].map(|n| amount(&short.dimension, n));
            step("", &format!("{} is short: requested {requested}, left {left}, in all {most}", short.dimension));
        }
        step("", if refusal.never_fits { "it will never fit here" } else { "it fits once others have gone" });
    }

    // The engine ends, and the EM unregisters.
    client.resource_released(&grant.released(user)).await?;
    step("released", &fullness(&client.em(&em).await?)?);
    let removed = client.unregister_fenced(&em, registered.epoch).await?;
    step("unregistered", &format!("{em}, and {removed} tickets with it"));
    Ok(())
}

fn step(what: &str, text: &str) {
    println!("{what:<13} {text}");
}

/// Returns the used, locked and left amounts of an EM.
fn fullness(em: &Em) -> Result<String, Box<dyn Error>> {
    let (used, locked, left) =
        (amounts(em.used.amounts()), amounts(em.locked.amounts()), amounts(em.left()?.amounts()));
    Ok(format!("used {used}; locked {locked}; left {left}"))
}

fn amounts(amounts: impl Iterator<Item = (Dimension, i64)>) -> String {
    let show = |(dimension, value): (Dimension, i64)| match dimension {
        Dimension::Memory => amount(&dimension, value),
        _ => format!("{value} {dimension}"),
    };
    amounts.map(show).collect::<Vec<_>>().join(", ")
}

fn amount(dimension: &Dimension, value: i64) -> String {
    if *dimension == Dimension::Memory { format_size(value) } else { value.to_string() }
}
