//! Nodes of the trace as EMs of the service.

use std::{collections::HashSet, error::Error};

use rm_client::RmClient;
use rm_model::{name::Labels, operation::RegisterEm};
use tokio::task::JoinSet;
use tonic::Code;

use super::{
    calls::{APPLICATION, CallError, em_instance, repeated},
    trace::{Node, Trace},
};

/// Returns the nodes that are registered at the service.
pub async fn registered<'a>(
    client: &RmClient,
    address: &str,
    trace: &'a Trace,
) -> Result<Vec<&'a Node>, Box<dyn Error>> {
    let ems = match client.ems().await {
        Err(error) if matches!(error.code(), Some(Code::Unavailable | Code::Unknown)) => {
            return Err(format!("no service answers at {address}; to start one, type: cargo run --release").into());
        }
        ems => ems?,
    };
    let names: HashSet<_> = ems
        .iter()
        .filter(|em| em.instance.application_name.as_str() == APPLICATION)
        .map(|em| em.instance.instance.as_str())
        .collect();
    Ok(trace.nodes.iter().filter(|node| names.contains(node.name.as_str())).collect())
}

/// Returns the labels of a node. They exclude no task, because the tasks of the trace accept every GPU model.
fn labels(node: &Node) -> Result<Labels, CallError> {
    let model = Some(("gpu_model".to_owned(), node.model.clone())).filter(|(_, model)| !model.is_empty());
    Ok(Labels::parse("labels", model.into_iter().collect())?)
}

/// Registers all nodes, `in_flight` at a time.
pub async fn register(client: &RmClient, nodes: &[Node], in_flight: usize) -> Result<(), CallError> {
    let mut calls = JoinSet::new();
    for node in nodes {
        let (client, total) = (client.clone(), node.total().to_resource()?);
        let (labels, reserved) = (labels(node)?, Labels::default());
        let registration = RegisterEm { em: em_instance(node)?, protected: total.zero_like(), total, labels, reserved };
        if calls.len() == in_flight {
            joined(&mut calls).await?;
        }
        calls.spawn(async move {
            let what = || format!("registering {}", registration.em);
            repeated(what, || client.register(registration.clone())).await.map(|_| 0)
        });
    }
    while joined(&mut calls).await?.is_some() {}
    Ok(())
}

/// Unregisters the nodes, `in_flight` at a time. Returns the number of their tickets.
pub async fn unregister(client: &RmClient, nodes: &[&Node], in_flight: usize) -> Result<i64, CallError> {
    let (mut calls, mut removed) = (JoinSet::new(), 0);
    for node in nodes {
        let (client, em) = (client.clone(), em_instance(node)?);
        if calls.len() == in_flight {
            removed += joined(&mut calls).await?.unwrap_or_default();
        }
        calls.spawn(async move {
            let what = || format!("unregistering {em}");
            repeated(what, || client.unregister(&em)).await.map(|(removed, ..)| removed)
        });
    }
    while let Some(more) = joined(&mut calls).await? {
        removed += more;
    }
    Ok(removed)
}

async fn joined(calls: &mut JoinSet<Result<i64, CallError>>) -> Result<Option<i64>, CallError> {
    Ok(match calls.join_next().await {
        Some(done) => Some(done??),
        None => None,
    })
}
