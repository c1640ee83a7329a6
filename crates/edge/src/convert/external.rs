//! External clusters: converts providers, external queues and applications.
//!
//! Parsers fail with a [`FieldError`] that names the field. Messages never contain the secrets of a provider. Caller:
//! `crate::external`.

use secrecy::SecretString;
use uuid::Uuid;

use rm_model::{
    external::YARN,
    name::{FieldError, Labels, Name, check_at_most},
    provider::Provider,
    queue::{self, QueueNaming, QueueTree},
};
use rm_proto::v1 as proto;
use rm_service::external::{
    CheckedProvider, ExpectedProvider, ProviderCheck, ProviderKey, ProviderSelector, ProviderView, PutProvider,
};

use super::answer::timestamp;
use crate::server_info::duration;

/// Maximum size of a provider configuration, in bytes.
const CONFIG_BYTES_MAX: usize = 16 * 1024;

/// Parses a provider to be stored.
///
/// # Errors
/// A missing or invalid field, or a configuration above 16 KiB.
pub fn put(message: Option<proto::Provider>) -> Result<PutProvider, FieldError> {
    let message = message.ok_or_else(|| FieldError::new("provider", "is required"))?;
    let provider = Provider {
        resource_type: Name::parse_new("provider.resource_type", &message.resource_type)?,
        name: Name::parse_new("provider.name", &message.name)?,
        labels: Labels::parse("provider.labels", message.labels)?,
    };
    provider.labels.check_new("provider.labels")?;
    check_at_most("provider.config", message.config.len(), "bytes", CONFIG_BYTES_MAX)?;
    Ok(PutProvider { provider, config: SecretString::from(message.config) })
}

/// Parses the provider to check: the type and name of a stored one, or a whole one.
///
/// # Errors
/// An invalid field, or both or none of name and provider.
pub fn checked(message: proto::CheckProviderRequest) -> Result<CheckedProvider, FieldError> {
    let proto::CheckProviderRequest { resource_type, name, provider } = message;
    match (name.as_str(), provider) {
        ("", None) => Err(FieldError::new("name", "is required, or a provider")),
        ("", Some(_)) if !resource_type.is_empty() => {
            Err(FieldError::new("resource_type", "belongs to name; omit it, because the provider has a type"))
        }
        ("", provider) => put(provider).map(CheckedProvider::New),
        (name, None) => {
            let resource_type = if resource_type.is_empty() { YARN } else { &resource_type };
            Ok(CheckedProvider::Stored(Name::parse("resource_type", resource_type)?, Name::parse("name", name)?))
        }
        (_, Some(_)) => Err(FieldError::new("provider", "must not be set besides name")),
    }
}

/// Converts the result of a check.
pub fn check_result(check: &ProviderCheck) -> proto::check_provider_response::Result {
    use proto::check_provider_response::Result;
    let count = |count: usize| i32::try_from(count).unwrap_or(i32::MAX);
    match check {
        ProviderCheck::Content(content) => Result::Content(proto::ProviderContent {
            queues: count(content.queues),
            applications: count(content.applications),
            queues_duration: duration(content.queues_duration),
            applications_duration: duration(content.applications_duration),
        }),
        ProviderCheck::Failure(error) => {
            Result::Failure(proto::ProviderFailure { message: error.to_string(), may_pass: error.may_pass() })
        }
        ProviderCheck::TimedOut(after) => Result::Failure(proto::ProviderFailure {
            message: format!("no complete reply within {} s", after.as_secs()),
            may_pass: true,
        }),
    }
}

/// Returns the state of a provider that a change expects: any without an etag, absent with an empty one.
pub fn expected(etag: Option<&str>) -> ExpectedProvider {
    match etag {
        None => ExpectedProvider::Anything,
        Some("") => ExpectedProvider::Nothing,
        Some(etag) => Uuid::parse_str(etag).map_or(ExpectedProvider::Unknown, ExpectedProvider::Etag),
    }
}

/// Converts a provider to a message, without its secrets.
pub fn provider(shown: &ProviderView) -> proto::Provider {
    let ProviderView { record, config } = shown;
    proto::Provider {
        resource_type: record.provider.resource_type.to_string(),
        name: record.provider.name.to_string(),
        labels: record.provider.labels.as_map().clone(),
        config: config.clone(),
        etag: record.etag.to_string(),
        updated_by: record.updated_by.to_string(),
        update_time: Some(timestamp(record.update_time)),
    }
}

/// Parses a provider selector. The resource type defaults to YARN, and labels select without a name.
///
/// # Errors
/// An invalid field, or both a name and labels.
pub fn selector(message: Option<&proto::ProviderSelector>) -> Result<ProviderSelector, FieldError> {
    let unset = proto::ProviderSelector::default();
    let proto::ProviderSelector { resource_type, name, labels } = message.unwrap_or(&unset);
    let resource_type = if resource_type.is_empty() { YARN } else { resource_type };
    let resource_type = Name::parse("provider.resource_type", resource_type)?;
    let by = match name.as_str() {
        "" => ProviderKey::Labels(Labels::parse("provider.labels", labels.clone())?.as_map().clone()),
        _ if !labels.is_empty() => {
            return Err(FieldError::new("provider.labels", "cannot be combined with a name; omit one of them"));
        }
        name => ProviderKey::Name(Name::parse("provider.name", name)?),
    };
    Ok(ProviderSelector { resource_type, by })
}

fn amounts(amounts: queue::QueueAmounts) -> proto::QueueAmounts {
    proto::QueueAmounts { memory: amounts.memory, cores: amounts.cores, millicores: 0 }
}

/// Converts an external queue to a message. `queues` is its cluster snapshot.
pub fn queue(queues: &QueueTree, queue: &queue::ExternalQueue) -> proto::Queue {
    let state = proto::QueueState::from(queues.state(queue));
    let amounts = |of: queue::QueueAmounts| match queues.naming() {
        QueueNaming::Namespaces => proto::QueueAmounts { memory: of.memory, cores: 0, millicores: of.cores },
        QueueNaming::Fair | QueueNaming::Capacity => amounts(of),
    };
    let (max, used) = queues.max_and_used(queue);
    let custom = |(name, amounts): (&str, queue::CustomAmounts)| {
        let queue::CustomAmounts { max, used } = amounts;
        (name.to_owned(), proto::CustomAmounts { max, used, left: max.saturating_sub(used) })
    };
    proto::Queue {
        path: queue.path.clone(),
        state: state.into(),
        max: max.map(amounts),
        used: Some(amounts(used)),
        left: max.map(|_| amounts(queues.left(queue))),
        running_applications: queue.running_applications,
        pending_applications: queue.pending_applications,
        custom: queues.custom(queue).into_iter().map(custom).collect(),
    }
}

/// Converts an application to a message. `path` is its queue, and `ticket_id` its live ticket if one is recorded.
pub fn application(application: &queue::Application, path: &str, ticket_id: Option<Uuid>) -> proto::Application {
    let queue::Application { id, name, user, queue: _, state, allocated, start_millis } = application;
    let start_time = prost_types::Timestamp {
        seconds: start_millis.div_euclid(1000),
        nanos: i32::try_from(start_millis.rem_euclid(1000) * 1_000_000).unwrap_or_default(),
    };
    proto::Application {
        application_id: id.clone(),
        name: name.clone(),
        user: user.clone(),
        queue: path.to_owned(),
        state: state.clone(),
        allocated: Some(amounts(*allocated)),
        start_time: Some(start_time),
        ticket_id: ticket_id.map(|id| id.to_string()).unwrap_or_default(),
    }
}
