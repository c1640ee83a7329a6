//! Calls of the load: grants, confirmations, releases and refusals. Every reply is checked, and an unexpected one is an
//! error.

use std::time::Duration;

use rm_proto::v1::{
    self as proto, request_resource_response::Result as Answer, resource::Kind,
    resource_manager_service_client::ResourceManagerServiceClient,
};
use tonic::{
    Request,
    metadata::{Ascii, MetadataValue},
    transport::{Channel, Endpoint},
};

use crate::{Failure, Workload, random::Random, secured::Credentials};

/// Number of users that request resources.
const USERS: u64 = 1000;
const CREATOR: &str = "IDE";

/// Deadline of a call, as a client sets it. No call is expected to take nearly as long.
const CALL_TIMEOUT: Duration = Duration::from_secs(30);

/// Capacity above every demand: bytes of memory, cores, instances.
const PLENTY: (i64, i64, i64) = (1 << 52, 1 << 52, 1 << 52);
/// External queue of the engines, if they use one: two levels below the root.
pub(crate) const QUEUE: &str = "root.eng.etl";
/// Demand of every engine: bytes of memory, cores, instances.
const ONE_ENGINE: (i64, i64, i64) = (1 << 30, 1, 1);

/// Connection to a server; clones share it.
#[derive(Clone)]
pub(crate) struct Client {
    service: ResourceManagerServiceClient<Channel>,
    /// Credentials of the caller, if the server requires any.
    authorization: Option<MetadataValue<Ascii>>,
    /// Whether engines also use an external queue.
    in_queue: bool,
}

/// User and EM of an engine.
pub(crate) struct TargetEm {
    em: proto::EmInstance,
    user: String,
}

impl TargetEm {
    /// Selects a user and an EM with ample capacity.
    pub fn choose(workload: Workload, random: &mut Random) -> Self {
        let em = em(workload, random.up_to(workload.ems()));
        Self { em, user: format!("user{}", random.up_to(USERS)) }
    }

    /// Selects a user and a full EM.
    pub fn choose_full(workload: Workload, random: &mut Random) -> Self {
        let em = full_em(workload, random.up_to(workload.ems()));
        Self { em, user: format!("user{}", random.up_to(USERS)) }
    }
}

/// A live grant.
pub(crate) struct Ticket {
    id: String,
    place: TargetEm,
}

impl Client {
    /// Connects to the server at `url`. With credentials, the connection uses TLS and a token.
    pub async fn connect(url: &str, credentials: Option<&Credentials>) -> Result<Self, Failure> {
        let endpoint = Endpoint::from_shared(url.to_owned())?.tcp_nodelay(true);
        let (channel, authorization) = match credentials {
            None => (endpoint.connect().await?, None),
            Some(credentials) => (credentials.connect(&endpoint).await?, Some(credentials.authorization.clone())),
        };
        Ok(Self { service: ResourceManagerServiceClient::new(channel), authorization, in_queue: false })
    }

    fn call<M>(&self, message: M) -> Request<M> {
        let mut request = Request::new(message);
        request.set_timeout(CALL_TIMEOUT);
        if let Some(authorization) = &self.authorization {
            request.metadata_mut().insert("authorization", authorization.clone());
        }
        request
    }

    /// Makes engines use an external queue, with the amounts that they use of their EM.
    pub fn use_queue(&mut self) {
        self.in_queue = true;
    }

    /// Returns the demand of one engine.
    fn one_engine(&self) -> Option<proto::Resource> {
        if !self.in_queue {
            return resource(ONE_ENGINE);
        }
        let (memory, cores, instances) = ONE_ENGINE;
        let yarn = proto::YarnResource {
            queue_name: QUEUE.to_owned(),
            queue_memory: memory,
            queue_cores: cores,
            queue_instances: instances,
            application_id: String::new(),
        };
        let load_instance = Some(proto::LoadInstanceResource { memory, cores, instances });
        let both = proto::DriverAndYarnResource { load_instance, yarn: Some(yarn) };
        Some(proto::Resource { kind: Some(Kind::DriverAndYarn(both)) })
    }

    /// Registers the EMs of a workload: those with ample capacity, and as many with capacity for one engine.
    pub async fn register(&mut self, workload: Workload) -> Result<(), Failure> {
        for number in 1..=workload.ems() {
            for (em, total) in [(em(workload, number), PLENTY), (full_em(workload, number), ONE_ENGINE)] {
                let message = proto::RegisterRequest { em: Some(em), total: resource(total), ..Default::default() };
                let call = self.call(message);
                self.service.register(call).await?;
            }
        }
        Ok(())
    }

    /// Fills the EMs with capacity for one engine. Returns the number of grants.
    pub async fn fill(&mut self, workload: Workload) -> Result<u64, Failure> {
        for number in 1..=workload.ems() {
            self.grant(TargetEm { em: full_em(workload, number), user: "user1".to_owned() }).await?;
        }
        Ok(workload.ems())
    }

    /// Requests the resources of an engine; any reply but a grant is an error.
    pub async fn grant(&mut self, place: TargetEm) -> Result<Ticket, Failure> {
        match self.ask(&place).await? {
            Some(Answer::Available(available)) if !available.ticket_id.is_empty() => {
                Ok(Ticket { id: available.ticket_id, place })
            }
            Some(Answer::NotEnough(refusal)) => Err(format!("refused: {}", refusal.reason).into()),
            _ => Err("an answer without a ticket".into()),
        }
    }

    /// Requests the resources of an engine; any reply but a temporary refusal is an error.
    pub async fn refusal(&mut self, place: TargetEm) -> Result<(), Failure> {
        match self.ask(&place).await? {
            Some(Answer::NotEnough(refusal)) if !refusal.never_fits => Ok(()),
            _ => Err("granted on an EM that is full, or said never to fit".into()),
        }
    }

    async fn ask(&mut self, place: &TargetEm) -> Result<Option<Answer>, Failure> {
        let message = proto::RequestResourceRequest {
            em: Some(place.em.clone()),
            user: place.user.clone(),
            creator: CREATOR.to_owned(),
            resource: self.one_engine(),
            ..Default::default()
        };
        let call = self.call(message);
        Ok(self.service.request_resource(call).await?.into_inner().result)
    }

    /// Confirms the engine of a ticket with its full demand as use.
    pub async fn inited(&mut self, ticket: &Ticket) -> Result<(), Failure> {
        let engine = proto::EngineInstance { application_name: "engine".to_owned(), instance: ticket.id.clone() };
        let message = proto::ResourceInitedRequest {
            ticket_id: ticket.id.clone(),
            user: ticket.place.user.clone(),
            em: Some(ticket.place.em.clone()),
            used: self.one_engine(),
            engine: Some(engine),
            ..Default::default()
        };
        let call = self.call(message);
        self.service.resource_inited(call).await?;
        Ok(())
    }

    /// Releases a ticket.
    pub async fn released(&mut self, ticket: Ticket) -> Result<(), Failure> {
        let TargetEm { em, user } = ticket.place;
        let message = proto::ResourceReleasedRequest { ticket_id: ticket.id, user, em: Some(em), ..Default::default() };
        let call = self.call(message);
        self.service.resource_released(call).await?;
        Ok(())
    }
}

fn em(workload: Workload, number: u64) -> proto::EmInstance {
    let instance = match workload {
        Workload::Hot => "hot:9102".to_owned(),
        Workload::Spread => format!("host{number}:9102"),
    };
    proto::EmInstance { application_name: "ecm".to_owned(), instance }
}

fn full_em(workload: Workload, number: u64) -> proto::EmInstance {
    let em = em(workload, number);
    proto::EmInstance { instance: format!("full-{}", em.instance), ..em }
}

fn resource((memory, cores, instances): (i64, i64, i64)) -> Option<proto::Resource> {
    let amounts = proto::LoadInstanceResource { memory, cores, instances };
    Some(proto::Resource { kind: Some(Kind::LoadInstance(amounts)) })
}
