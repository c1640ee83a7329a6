//! Requests in queues of an external cluster, and changes of the cluster and its provider.

use std::time::Duration;

use serde_json::{Value, json};

use super::{Action, GB, Generator, Wanted};
use crate::cluster::{ADDRESS, APPLICATIONS, STATES, application_id};

impl Generator {
    /// Pushes a call that writes the provider of the cluster, and a step that waits for the next snapshot.
    pub(super) fn put_cluster(&mut self) {
        let max_age = self.pick(&["4m", "5m"]).unwrap();
        let config = json!({"rmWebAddress": format!("http://{ADDRESS}"), "authorEnable": false, "refreshInterval": "200ms", "maxAge": max_age});
        let provider = json!({"resource_type": "Yarn", "name": "default", "config": config.to_string()});
        self.push("ExternalResourceService", "PutProvider", json!({"provider": provider}));
        self.next.push_back(Action::Change("cluster_shows", vec![self.cluster.to_string()]));
    }

    /// Returns a step that changes or reads the cluster.
    pub(super) fn cluster(&mut self) -> Action {
        let read = |method, body| {
            let mut wanted = Wanted::new("ExternalResourceService", method, body);
            // The service reads the cluster for calls at most every two seconds.
            wanted.late = Some(Duration::from_millis(2500));
            Action::Call(wanted)
        };
        match self.random(12) {
            0 => read("GetQueue", json!({"queue_name": self.queue()})),
            1 => read("ListQueues", json!({"page_size": 4})),
            2 => read("ListApplications", json!({"queue_name": "root.a"})),
            3 => {
                self.put_cluster();
                self.next.pop_front().unwrap()
            }
            _ => {
                self.cluster = self.random(STATES);
                Action::Change("cluster_shows", vec![self.cluster.to_string()])
            }
        }
    }

    fn queue(&mut self) -> &'static str {
        self.pick(&["a.x", "root.a.x", "a.y", "b", "root.b", "c.x", "a", "none"]).unwrap()
    }

    /// Makes a request one in a queue.
    pub(super) fn name_queue(&mut self, body: &mut Value) {
        let (memory, cores) = (1 + self.random(5) as i64, 1 + self.random(4));
        let mut yarn = json!({"queue_memory": memory * GB, "queue_cores": cores, "queue_instances": 1});
        if self.chance(25) {
            body["queue_names"] = json!([self.queue(), self.queue()]);
        } else {
            yarn["queue_name"] = json!(self.queue());
        }
        body["resource"] =
            json!({"driver_and_yarn": {"load_instance": {"memory": GB, "cores": 1, "instances": 1}, "yarn": yarn}});
    }

    /// Returns the use of a ticket in a queue with the id of its application, without which the use would count for a minute.
    pub(super) fn used_in_queue(&mut self, granted: &Value) -> Option<Value> {
        granted.get("driver_and_yarn")?;
        let mut used = granted.clone();
        let yarn = &mut used["driver_and_yarn"]["yarn"];
        if yarn["application_id"].is_null() {
            yarn["application_id"] = json!(application_id(self.random(APPLICATIONS)));
        } else if self.chance(50) {
            yarn["queue_cores"] = json!(1 + self.random(6));
        }
        Some(used)
    }
}
