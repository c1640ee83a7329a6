//! Fetches the lists of a Kubernetes server page by page, and computes the queues from them.
//!
//! Each fetch is bounded by one deadline and [`ROUNDS_MAX`] attempts. Caller: the parent module.

use tokio::time::Instant;

use crate::{
    FetchError,
    background_parse::patiently,
    http::{ClusterHttp, HttpFailure, ROUNDS_MAX, rest},
};
use rm_model::queue::QueueTree;

use super::{
    KubernetesParseError,
    access::ServerAccess,
    capacity::{self, Quotas},
    config::AccessSource,
    objects::{self, KubernetesPage, ListItem, Namespace, Node, Pod, ResourceQuota},
};

/// Number of objects per page. A page of large pods has some megabytes.
const PAGE_SIZE: &str = "500";

/// Maximum number of restarts of a list whose continue token expired (status 410).
const RESTARTS_MAX: usize = 2;

/// Selects pods that are on a node and have not ended: only these have requests there.
const ON_NODES: &str = "spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed";

/// Path and field selector of a list.
#[derive(Clone, Copy)]
struct ListRequest {
    path: &'static str,
    selector: Option<&'static str>,
}

const NAMESPACES: ListRequest = ListRequest { path: "/api/v1/namespaces", selector: None };
const QUOTAS: ListRequest = ListRequest { path: "/api/v1/resourcequotas", selector: None };
const NODES: ListRequest = ListRequest { path: "/api/v1/nodes", selector: None };
const PODS: ListRequest = ListRequest { path: "/api/v1/pods", selector: Some(ON_NODES) };

/// Fetches all namespaces with their free capacity.
pub(super) async fn queues(source: &AccessSource, http: &ClusterHttp) -> Result<QueueTree, FetchError> {
    let deadline = Instant::now() + http.fetch_timeout();
    let (mut round, mut is_renewed) = (0, false);
    loop {
        if round > 0 {
            tokio::time::sleep_until((Instant::now() + rest(round)).min(deadline)).await;
        }
        let asked = tokio::time::timeout_at(deadline, look(source, http)).await;
        let failure = match asked.unwrap_or(Err(HttpFailure::Timeout)) {
            Ok(queues) => return Ok(queues),
            Err(failure) => failure,
        };
        // The credentials may have been renewed at that moment.
        let again = failure == HttpFailure::Unknown && !is_renewed;
        is_renewed |= again;
        round += 1;
        if !(again || failure.may_pass()) || round >= ROUNDS_MAX || Instant::now() >= deadline {
            return Err(FetchError { failures: vec![(source.to_string(), failure)] });
        }
    }
}

async fn look(source: &AccessSource, http: &ClusterHttp) -> Result<QueueTree, HttpFailure> {
    let asked = KubernetesServer { access: ServerAccess::read(source, http).await?, http };
    let namespaces = asked.list::<Namespace>(NAMESPACES).await?;
    let quotas = Quotas::new(asked.list::<ResourceQuota>(QUOTAS).await?);
    let nodes = match namespaces.iter().all(|(name, _)| quotas.decide_alone(name)) {
        true => None,
        false => Some((asked.list::<Node>(NODES).await?, asked.list::<Pod>(PODS).await?)),
    };
    let nodes = nodes.as_ref().map(|(nodes, pods)| (nodes.as_slice(), pods.as_slice()));
    Ok(capacity::queues(&namespaces, &quotas, nodes)?)
}

/// A server with its access data.
struct KubernetesServer<'a> {
    access: ServerAccess,
    http: &'a ClusterHttp,
}

impl KubernetesServer<'_> {
    /// Fetches a whole list in its reduced form.
    async fn list<T: ListItem>(&self, what: ListRequest) -> Result<Vec<T::Kept>, HttpFailure> {
        for _ in 0..RESTARTS_MAX {
            match self.pages::<T>(what).await {
                Err(HttpFailure::Status(410)) => {}
                listed => return listed,
            }
        }
        self.pages::<T>(what).await
    }

    async fn pages<T: ListItem>(&self, what: ListRequest) -> Result<Vec<T::Kept>, HttpFailure> {
        // The number of pages is bounded, too: empty pages could follow without end.
        let (mut all, mut next, mut pages) = (Vec::new(), None, 0);
        loop {
            let KubernetesPage { items, next: more } = self.page::<T>(what, next.as_deref()).await?;
            all.extend(items);
            pages += 1;
            if all.len() > T::MOST || (more.is_some() && pages >= T::MOST / 100) {
                return Err(KubernetesParseError::TooMany { most: T::MOST, what: T::NAME }.into());
            }
            next = more;
            if next.is_none() {
                return Ok(all);
            }
        }
    }

    async fn page<T: ListItem>(
        &self,
        what: ListRequest,
        next: Option<&str>,
    ) -> Result<KubernetesPage<T::Kept>, HttpFailure> {
        let ServerAccess { address, token, client } = &self.access;
        let mut query = vec![("limit", PAGE_SIZE)];
        query.extend(what.selector.map(|selector| ("fieldSelector", selector)));
        query.extend(next.map(|next| ("continue", next)));
        let body = self.http.get_by(client, address, (what.path, &query), token.as_ref()).await;
        let body = body.map_err(|failure| match failure {
            HttpFailure::Unauthorized(401) => HttpFailure::Unknown,
            HttpFailure::Unauthorized(_) => HttpFailure::Forbidden(T::NAME),
            failure => failure,
        })?;
        Ok(patiently(move || objects::page::<T>(&body)).await??)
    }
}

#[cfg(test)]
#[path = "fetch_tests.rs"]
mod tests;
