//! Parsing of `/ws/v1/cluster/info`, `/metrics` and `/apps`: the active state, the size and the applications of a cluster.
//!
//! A reply without a required value is an error, and a reply has at most [`APPLICATIONS_MAX`] applications. Caller: `fetch`.

use rm_model::queue::{Application, QueueAmounts};

use super::{
    MIB, YarnParseError,
    json::{self, JsonValue, Rounds},
};

/// Maximum number of applications, and maximum length of a text of an application in bytes.
const APPLICATIONS_MAX: usize = 50_000;
const TEXT_BYTES_MAX: usize = 255;

/// Returns whether the ResourceManager is the active one. A single ResourceManager is active.
pub(super) fn is_active(json: &[u8]) -> Result<bool, YarnParseError> {
    let answer = json::read(json, &["clusterInfo", "haState"])?;
    let info = answer.objects("clusterInfo").next().ok_or(YarnParseError::Missing { what: "clusterInfo" })?;
    let state = info.text("haState").ok_or(YarnParseError::Missing { what: "clusterInfo.haState" })?;
    Ok(state.eq_ignore_ascii_case("ACTIVE"))
}

/// Returns the size of the cluster.
pub(super) fn size(json: &[u8]) -> Result<QueueAmounts, YarnParseError> {
    let answer = json::read(json, &["clusterMetrics", "totalMB", "totalVirtualCores"])?;
    let metrics = answer.objects("clusterMetrics").next().ok_or(YarnParseError::Missing { what: "clusterMetrics" })?;
    let total = |key, what| metrics.int(key).map(|total| total.max(0)).ok_or(YarnParseError::Missing { what });
    Ok(QueueAmounts {
        memory: total("totalMB", "clusterMetrics.totalMB")?.saturating_mul(MIB),
        cores: total("totalVirtualCores", "clusterMetrics.totalVirtualCores")?,
    })
}

const APPLICATION_KEYS: &[&str] =
    &["apps", "app", "id", "name", "user", "queue", "state", "allocatedMB", "allocatedVCores", "startedTime"];

/// Parses the applications, ordered by id.
pub(super) fn applications(json: &[u8]) -> Result<Vec<Application>, YarnParseError> {
    let answer = json::read(json, APPLICATION_KEYS)?;
    if answer.all("apps").next().is_none() {
        return Err(YarnParseError::Missing { what: "apps" });
    }
    let mut applications = Vec::new();
    for app in answer.objects("apps").flat_map(|apps| apps.objects("app")) {
        if applications.len() >= APPLICATIONS_MAX {
            return Err(YarnParseError::TooMany { most: APPLICATIONS_MAX });
        }
        applications.push(application(app)?);
    }
    applications.sort_by(|a, b| a.id.cmp(&b.id));
    applications.dedup_by(|a, b| a.id == b.id);
    Ok(applications)
}

fn application(app: &JsonValue) -> Result<Application, YarnParseError> {
    let text = |key| {
        let text = app.text(key).unwrap_or_default();
        text.get(..text.floor_char_boundary(TEXT_BYTES_MAX)).unwrap_or_default().to_owned()
    };
    let id = text("id");
    if id.is_empty() {
        return Err(YarnParseError::Missing { what: "app.id" });
    }
    // An application without containers has -1, or no amount.
    let amount = |what: &'static str| {
        let mut stated = app.all(what).filter(|value| !value.is_empty()).peekable();
        let is_stated = stated.peek().is_some();
        match stated.find_map(|value| value.whole(Rounds::Down)) {
            None if is_stated => Err(YarnParseError::NoAllocation { what, id: id.clone() }),
            amount => Ok(amount.unwrap_or_default().max(0)),
        }
    };
    let allocated =
        QueueAmounts { memory: amount("allocatedMB")?.saturating_mul(MIB), cores: amount("allocatedVCores")? };
    Ok(Application {
        name: text("name"),
        user: text("user"),
        queue: text("queue"),
        state: text("state"),
        allocated,
        start_millis: app.int("startedTime").unwrap_or_default().max(0),
        id,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn active_resource_manager_is_recognised() {
        for (json, active) in [
            (r#"{"clusterInfo": {"id": 1, "state": "STARTED", "haState": "ACTIVE"}}"#, true),
            (r#"{"clusterInfo": {"haState": "active"}}"#, true),
            (r#"{"clusterInfo": {"haState": "STANDBY"}}"#, false),
            (r#"{"clusterInfo": {"haState": "INITIALIZING"}}"#, false),
        ] {
            assert_eq!(is_active(json.as_bytes()), Ok(active), "{json}");
        }
        for json in ["{}", r#"{"clusterInfo": {}}"#, r#"{"clusterInfo": null}"#, "[]", "1"] {
            assert!(matches!(is_active(json.as_bytes()), Err(YarnParseError::Missing { .. })), "{json}");
        }
    }

    #[test]
    fn cluster_metrics_give_total_size() {
        let parsed = size(br#"{"clusterMetrics": {"totalMB": 1024, "totalVirtualCores": 7, "totalMBX": 1}}"#);
        assert_eq!(parsed, Ok(QueueAmounts { memory: 1 << 30, cores: 7 }));
        assert!(size(br#"{"clusterMetrics": {"totalMB": 1024}}"#).is_err());
    }

    #[test]
    fn applications_are_parsed_with_allocation() {
        let json = br#"{"apps": {"app": [
            {"id": "application_2", "user": "b", "name": "n", "queue": "etl", "state": "ACCEPTED", "allocatedMB": -1,
             "allocatedVCores": -1, "startedTime": 0, "trackingUrl": "x"},
            {"id": "application_1", "user": "a", "name": "n", "queue": "root.eng.etl", "state": "RUNNING",
             "allocatedMB": 12288, "allocatedVCores": 3, "startedTime": 1795304054064}
        ]}}"#;
        let parsed = applications(json).unwrap();
        assert_eq!(parsed.iter().map(|app| app.id.as_str()).collect::<Vec<_>>(), ["application_1", "application_2"]);
        assert_eq!(parsed[0].allocated, QueueAmounts { memory: 12 << 30, cores: 3 });
        assert_eq!(parsed[1].allocated, QueueAmounts::default());
        for none in [r#"{"apps": null}"#, r#"{"apps": {}}"#, r#"{"apps": ""}"#, r#"{"apps": {"app": []}}"#] {
            assert_eq!(applications(none.as_bytes()), Ok(vec![]), "{none}");
        }
        let one = br#"{"apps": {"app": {"id": "application_1"}}}"#;
        assert_eq!(applications(one).unwrap().len(), 1, "old releases write a single element without brackets");
        assert!(applications(br#"{"apps": {"app": [{}]}}"#).is_err());
        let stated = |json: &str| {
            let json =
                format!(r#"{{"apps": {{"app": [{{"id": "a", "allocatedMB": {json}, "allocatedVCores": 1}}]}}}}"#);
            applications(json.as_bytes()).map(|parsed| parsed[0].allocated.memory)
        };
        assert_eq!([stated("\"12288.0\""), stated("null")], [Ok(12 << 30), Ok(0)]);
        for json in ["\"12 GB\"", "[[1]]", "\"NaN\""] {
            assert_eq!(
                stated(json),
                Err(YarnParseError::NoAllocation { what: "allocatedMB", id: "a".into() }),
                "{json}"
            );
        }
        assert!(applications(b"{}").is_err());
    }

    #[test]
    fn application_name_is_truncated() {
        let json = format!(r#"{{"apps": {{"app": [{{"id": "a", "name": "{}"}}]}}}}"#, "ü".repeat(10_000));
        assert_eq!(applications(json.as_bytes()).unwrap()[0].name.len(), 254);
    }
}
