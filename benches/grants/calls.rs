//! The calls that the load is made of, every answer looked at.

use std::time::Duration;

use linkis_rm::transport::proto::{
    self, request_resource_response::Result as Answer, resource::Kind,
    resource_manager_service_client::ResourceManagerServiceClient,
};
use tonic::{
    Request,
    metadata::{Ascii, MetadataValue},
    transport::{Channel, Endpoint},
};

use crate::{Failure, Workload, random::Random, secured::Credentials};

/// How many users ask.
const USERS: u64 = 1000;
const CREATOR: &str = "IDE";

/// As a client sets it; no call is expected to come near.
const CALL_TIMEOUT: Duration = Duration::from_secs(30);

/// More than is ever asked for.
const PLENTY: (i64, i64, i64) = (1 << 52, 1 << 52, 1 << 52);
/// The queue that engines are in, if they are in one: two levels below the root.
pub(crate) const QUEUE: &str = "root.eng.etl";
/// What every engine needs.
const ONE_ENGINE: (i64, i64, i64) = (1 << 30, 1, 1);

/// A connection to a server; clones share it.
#[derive(Clone)]
pub(crate) struct Client {
    service: ResourceManagerServiceClient<Channel>,
    /// What says who calls, if anybody asks.
    authorization: Option<MetadataValue<Ascii>>,
    /// Whether engines need something of a queue, too.
    in_queue: bool,
}

/// For whom an engine is to be started, and where.
pub(crate) struct Place {
    em: proto::EmInstance,
    user: String,
}

impl Place {
    /// One of the users, on one of the EMs that have plenty.
    pub fn choose(workload: Workload, random: &mut Random) -> Self {
        let em = em(workload, random.up_to(workload.ems()));
        Self { em, user: format!("user{}", random.up_to(USERS)) }
    }

    /// One of the users, on one of the EMs that are full.
    pub fn choose_full(workload: Workload, random: &mut Random) -> Self {
        let em = full_em(workload, random.up_to(workload.ems()));
        Self { em, user: format!("user{}", random.up_to(USERS)) }
    }
}

/// A grant.
pub(crate) struct Ticket {
    id: String,
    place: Place,
}

impl Client {
    /// Connects to the server at `url`, encrypted and with a token if there are credentials.
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

    /// From now on engines need as much of a queue as of their EM.
    pub fn use_queue(&mut self) {
        self.in_queue = true;
    }

    /// What every engine needs.
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

    /// Registers the EMs of a workload: those so large that nothing is ever refused, and as many with room for one engine.
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

    /// Fills the EMs that have room for one engine; answers how many grants that took.
    pub async fn fill(&mut self, workload: Workload) -> Result<u64, Failure> {
        for number in 1..=workload.ems() {
            self.grant(Place { em: full_em(workload, number), user: "user1".to_owned() }).await?;
        }
        Ok(workload.ems())
    }

    /// Asks for an engine's resources, which have to be granted.
    pub async fn grant(&mut self, place: Place) -> Result<Ticket, Failure> {
        match self.ask(&place).await? {
            Some(Answer::Available(available)) if !available.ticket_id.is_empty() => {
                Ok(Ticket { id: available.ticket_id, place })
            }
            Some(Answer::NotEnough(refusal)) => Err(format!("refused: {}", refusal.reason).into()),
            _ => Err("an answer without a ticket".into()),
        }
    }

    /// Asks for an engine's resources, which have to be refused.
    pub async fn refusal(&mut self, place: Place) -> Result<(), Failure> {
        match self.ask(&place).await? {
            Some(Answer::NotEnough(refusal)) if !refusal.never_fits => Ok(()),
            _ => Err("granted on an EM that is full, or said never to fit".into()),
        }
    }

    async fn ask(&mut self, place: &Place) -> Result<Option<Answer>, Failure> {
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

    /// Reports that the engine of a ticket runs, and uses all of it.
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

    /// Gives back what a ticket holds.
    pub async fn released(&mut self, ticket: Ticket) -> Result<(), Failure> {
        let Place { em, user } = ticket.place;
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
