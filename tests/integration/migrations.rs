//! Upgrades: a database that an earlier release has used is brought up to date with everything that is in it.

use std::borrow::Cow;

use linkis_rm::domain::{operation::Released, resource::Dimension};
use sqlx::migrate::Migrator;
use uuid::Uuid;

use crate::harness::*;

/// The last migration of each earlier release.
const RELEASES: [i64; 1] = [2];

static MIGRATIONS: Migrator = sqlx::migrate!();

/// What the release before waiting, heartbeats and policies left: an EM with a locked and a used ticket, a limit with its counter,
/// a request id, and the history.
const LEFT_BY_FIRST: &str = r#"
    INSERT INTO linkis_em_meta_data (em_name, resource_request_policy) VALUES ('linkis-cg-engineconnmanager', 'LoadInstance');
    INSERT INTO linkis_em_resource_meta_data (em_application_name, em_instance, resource_type, total_resource, protected_resource,
        used_resource, locked_resource, left_resource, over_committed, labels, epoch, register_time, version)
    VALUES ('linkis-cg-engineconnmanager', 'host1:9102', 'LoadInstance',
        '{"memory":10,"cores":10,"instances":10,"instance":10}', '{"memory":0,"cores":0,"instances":0,"instance":0}',
        '{"memory":1,"cores":1,"instances":1,"instance":1}', '{"memory":2,"cores":2,"instances":2,"instance":2}',
        '{"memory":7,"cores":7,"instances":7,"instance":7}', false, '{}', 1, now(), 3);
    INSERT INTO linkis_user_resource_meta_data (ticket_id, "user", creator, engine_type, em_application_name, em_instance,
        resource_type, user_locked_resource, labels, locked_time, expires_at)
    VALUES ('00000000-0000-7000-8000-000000000001', 'hadoop', 'IDE', '', 'linkis-cg-engineconnmanager', 'host1:9102',
        'LoadInstance', '{"memory":2,"cores":2,"instances":2,"instance":2}', '{}', now(), now() + interval '1 hour');
    INSERT INTO linkis_user_resource_meta_data (ticket_id, "user", creator, engine_type, em_application_name, em_instance,
        engine_application_name, engine_instance, resource_type, user_used_resource, labels, locked_time, used_time)
    VALUES ('00000000-0000-7000-8000-000000000002', 'hadoop', 'IDE', '', 'linkis-cg-engineconnmanager', 'host1:9102',
        'linkis-cg-engineconn', 'host1:34567', 'LoadInstance', '{"memory":1,"cores":1,"instances":1,"instance":1}', '{}', now(), now());
    INSERT INTO linkis_request_id (request_id, body_hash, ticket_id, em_application_name, em_instance, expires_at, create_time)
    VALUES ('r1', sha256('x'), '00000000-0000-7000-8000-000000000001', 'linkis-cg-engineconnmanager', 'host1:9102', now(), now());
    INSERT INTO linkis_resource_action_record (action, ticket_id, "user", em_application_name, em_instance, resource_type, resource,
        action_time)
    VALUES ('granted', '00000000-0000-7000-8000-000000000003', 'hadoop', 'linkis-cg-engineconnmanager', 'host1:9102',
            'LoadInstance', '{"memory":1,"cores":1,"instances":1,"instance":1}', now()),
        ('released', '00000000-0000-7000-8000-000000000003', 'hadoop', 'linkis-cg-engineconnmanager', 'host1:9102',
            'LoadInstance', '{"memory":1,"cores":1,"instances":1,"instance":1}', now());
    INSERT INTO linkis_resource_limit (pattern, max_resource, update_time, pattern_hash)
    VALUES ('{"user":null}', '{"instances":4}', now(), sha256('{"user":null}'));
    INSERT INTO linkis_label_resource (scope, label_set, used_resource, locked_resource, scope_hash)
    VALUES ('{"user":"hadoop"}', '["user"]', '{"memory":1,"cores":1,"instances":1}', '{"memory":2,"cores":2,"instances":2}',
        sha256('{"user":"hadoop"}'));
    UPDATE linkis_resource_limit_version SET version = version + 1;
"#;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_an_earlier_release_left_is_there_and_works() {
    for release in RELEASES {
        let database = Database::fresh().await;
        let until: Vec<_> = MIGRATIONS.iter().filter(|migration| migration.version <= release).cloned().collect();
        let mut connection = database.connect().await;
        Migrator { migrations: Cow::Owned(until), ..Migrator::DEFAULT }.run(&mut connection).await.unwrap();
        sqlx::raw_sql(LEFT_BY_FIRST).execute(&mut connection).await.unwrap();

        let rm = Instance::start(&database).await;
        assert_eq!(assert_invariants(&database, &rm.client).await, 2);
        let (host, user) = (em("host1"), name("hadoop"));
        let ticket = |number| Released { ticket_id: Uuid::from_u128(number), user: user.clone(), em: host.clone() };
        let [locked, used, ended] = [1, 2, 3].map(|n| ticket(0x0000_0000_0000_7000_8000_0000_0000_0000 + n));
        // The limit counts on: three of four are held.
        let grant = rm.client.request_resource(&request(&host, "hadoop", load(0, 1, 1))).await.granted();
        rm.client.request_resource(&request(&host, "hadoop", load(0, 1, 1))).await.refused();
        for ticket in [&locked, &used, &ended] {
            rm.client.resource_released(ticket).await.unwrap();
        }
        assert_eq!(assert_invariants(&database, &rm.client).await, 1);
        assert_eq!(rm.client.ticket(grant.ticket_id).await.unwrap().resource().get(&Dimension::Cores), 1);
        rm.client.unregister(&host).await.unwrap();
        assert_eq!(assert_invariants(&database, &rm.client).await, 0);
    }
}
