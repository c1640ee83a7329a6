package io.linkisrm.it;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.linkisrm.client.LinkisRmClient;
import java.sql.Connection;
import java.sql.SQLException;
import java.sql.Statement;
import java.time.Duration;
import java.util.Arrays;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.stream.Collectors;
import javax.sql.DataSource;
import linkis.rm.v1.Action;
import linkis.rm.v1.AdminServiceGrpc;
import linkis.rm.v1.EmInstance;
import linkis.rm.v1.EmResource;
import linkis.rm.v1.GetEmRequest;
import linkis.rm.v1.Health;
import linkis.rm.v1.LimitServiceGrpc;
import linkis.rm.v1.ListActionsRequest;
import linkis.rm.v1.ListHoldsRequest;
import linkis.rm.v1.ReclaimMode;
import linkis.rm.v1.ReclaimPolicy;
import linkis.rm.v1.RequestResourceRequest;
import linkis.rm.v1.RequestResourceResponse;
import linkis.rm.v1.Resource;
import linkis.rm.v1.ResourceManagerServiceGrpc;
import linkis.rm.v1.SetReclaimPolicyRequest;
import linkis.rm.v1.Ticket;
import linkis.rm.v1.UnregisterRequest;
import linkis.rm.v1.UsageServiceGrpc;
import org.apache.linkis.manager.common.entity.enumeration.NodeStatus;
import org.apache.linkis.manager.common.entity.persistence.PersistenceLock;
import org.apache.linkis.manager.common.entity.resource.NodeResource;
import org.apache.linkis.manager.common.entity.resource.ResourceType;
import org.apache.linkis.manager.label.LabelManagerUtils;
import org.apache.linkis.manager.label.entity.Label;
import org.apache.linkis.manager.label.service.NodeLabelService;
import org.apache.linkis.manager.rm.domain.RMLabelContainer;
import org.apache.linkis.manager.rm.service.LabelResourceService;
import org.junit.jupiter.api.Test;

/** Calls that Linkis's own resource manager ignores, or processes only in its tables: the effect of each in the service. */
class CallsTest {
    private static final String HOST = "calls1:9102";
    private static final String ENGINE = "calls1:41001";

    private DataSource source;
    private LinkisRmClient client;

    @Test
    void reports_heartbeats_locks_resets_and_releases_reach_the_service() throws Exception {
        MariaDb database = MariaDb.get();
        database.create("calls");
        source = database.source("calls");
        Configuration.use();
        try (LinkisRmClient asking = Server.shared().client();
                Manager manager = new Manager(database.source("calls"), Server.shared().address())) {
            client = asking;
            manager.register(HOST, LifeTest.driver(16, 8, 10), LifeTest.driver(0, 0, 0));
            List<Label<?>> labels = Manager.labels(HOST, "callsalice", "hive", "3.1.3");
            String ticket = Manager.ticket(manager.request(labels, LifeTest.driver(2, 2, 1), ResourceType.LoadInstance));
            manager.started(ticket, ENGINE, "callsalice", labels);
            manager.used(ENGINE, LifeTest.driver(2, 2, 1), ResourceType.LoadInstance);

            report(manager);
            heartbeat(HOST);
            idle();
            lock(manager);
            reset(manager);
            releaseWithoutRelation(manager);
        }
    }

    /** An engine that is unlocked in Linkis ends because another user waits for the whole ECM. A locked one does not. */
    @Test
    void an_idle_engine_ends_for_a_request_of_another_user() throws Exception {
        String host = "callsrecall1:9102";
        String engine = "callsrecall1:41001";
        MariaDb.get().create("calls_recall");
        source = MariaDb.get().source("calls_recall");
        Configuration.use();
        try (LinkisRmClient asking = Server.shared().client(); Manager manager = new Manager(source, Server.shared().address())) {
            client = asking;
            manager.register(host, LifeTest.driver(4, 4, 4), LifeTest.driver(0, 0, 0));
            List<Label<?>> labels = Manager.labels(host, "callsrecall", "hive", "3.1.3");
            String ticket = Manager.ticket(manager.request(labels, LifeTest.driver(2, 2, 1), ResourceType.LoadInstance));
            manager.started(ticket, engine, "callsrecall", labels);
            manager.used(engine, LifeTest.driver(2, 2, 1), ResourceType.LoadInstance);
            io.linkisrm.shaded.google.protobuf.Duration second = io.linkisrm.shaded.google.protobuf.Duration.newBuilder().setSeconds(1).build();
            ReclaimPolicy policy = ReclaimPolicy.newBuilder().putLabels("user", "callsrecall").setMode(ReclaimMode.RECLAIM_MODE_STOP)
                    .setIdleAfter(second).setGrace(second).build();
            client.call(LimitServiceGrpc.getSetReclaimPolicyMethod(), SetReclaimPolicyRequest.newBuilder().setPolicy(policy).build());
            execute("INSERT INTO linkis_cg_manager_service_instance_metrics (instance, instance_status) VALUES ('" + engine + "', "
                    + NodeStatus.Locked.ordinal() + ")");
            heartbeat(host);
            RequestResourceRequest whole = RequestResourceRequest.newBuilder()
                    .setEm(EmInstance.newBuilder().setApplicationName(Manager.ECM).setInstance(host)).setUser("callsother").setCreator("IDE")
                    .setResource(Resource.newBuilder().setLoadInstance(
                            linkis.rm.v1.LoadInstanceResource.newBuilder().setMemory(4L << 30).setCores(4).setInstances(1)))
                    .setWaitTimeout(io.linkisrm.shaded.google.protobuf.Duration.newBuilder().setSeconds(60)).build();
            CompletableFuture<RequestResourceResponse> waiting = CompletableFuture.supplyAsync(() ->
                    client.call(ResourceManagerServiceGrpc.getRequestResourceMethod(), whole, Duration.ofSeconds(90)));
            for (int beats = 0; beats < 40; beats++) {
                beat(host);
            }
            assertFalse(waiting.isDone(), "a locked engine does not end");
            execute("UPDATE linkis_cg_manager_service_instance_metrics SET instance_status = " + NodeStatus.Unlock.ordinal()
                    + " WHERE instance = '" + engine + "'");
            for (int tries = 0; !waiting.isDone(); tries++) {
                assertTrue(tries < 300, "the request is served");
                beat(host);
            }
            assertTrue(waiting.get().hasAvailable(), waiting.get().toString());
            ListActionsRequest ofTicket = ListActionsRequest.newBuilder().setTicketId(ticket).build();
            List<String> actions = client.call(UsageServiceGrpc.getListActionsMethod(), ofTicket).getActionsList().stream()
                    .map(Action::getAction).collect(Collectors.toList());
            assertEquals(Arrays.asList("granted", "inited", "recalled", "released"), actions);
        }
    }

    /** A heartbeat of an ECM, and a moment for its report. */
    private void beat(String host) throws Exception {
        execute("UPDATE linkis_cg_manager_service_instance_metrics SET update_time = NOW() WHERE instance = '" + host + "'");
        Thread.sleep(100);
    }

    /** Unknown tickets on this ECM, and ECMs that cannot be registered again, do not make this one silent. */
    @Test
    void what_is_wrong_with_a_row_keeps_no_heartbeat_back() throws Exception {
        String host = "callsbeat1:9102";
        MariaDb.get().create("calls_wrong");
        source = MariaDb.get().source("calls_wrong");
        Configuration.use();
        try (LinkisRmClient asking = Server.shared().client(); Manager manager = new Manager(source, Server.shared().address())) {
            client = asking;
            manager.register(host, LifeTest.driver(16, 8, 10), LifeTest.driver(0, 0, 0));
            execute("INSERT INTO linkis_cg_manager_service_instance (instance, name, ticketId)"
                    + " VALUES ('callsbeat1:1', '" + Manager.EC + "', 'no-ticket-at-all-but-as-long-as-one-')");
            execute("INSERT INTO linkis_cg_manager_engine_em (engine_instance, em_instance) VALUES ('callsbeat1:1', '" + host + "')");
            for (int wrong = 0; wrong < 8; wrong++) {
                String other = "callswrong" + wrong + ":9102";
                manager.register(other, LifeTest.driver(16, 8, 10), LifeTest.driver(0, 0, 0));
                EmInstance em = EmInstance.newBuilder().setApplicationName(Manager.ECM).setInstance(other).build();
                client.call(ResourceManagerServiceGrpc.getUnregisterMethod(), UnregisterRequest.newBuilder().setEm(em).build());
                execute("INSERT INTO linkis_cg_manager_service_instance_metrics (instance, instance_status, update_time)"
                        + " VALUES ('" + other + "', 5, NOW() - INTERVAL 1 MINUTE)");
            }
            execute("UPDATE linkis_cg_manager_linkis_resources r JOIN linkis_cg_manager_label_resource lr ON lr.resource_id = r.id"
                    + " JOIN linkis_cg_manager_label l ON l.id = lr.label_id SET r.max_resource = NULL"
                    + " WHERE l.label_value LIKE '%callswrong%'");
            heartbeat(host);
        }
    }

    /** Engines that start concurrently with a label that is new to Linkis. */
    @Test
    void an_engine_of_which_linkis_lost_labels_reports_in_all_the_same() throws Exception {
        String host = "callslost1:9102";
        MariaDb.get().create("calls_lost");
        source = MariaDb.get().source("calls_lost");
        Configuration.use();
        try (LinkisRmClient asking = Server.shared().client(); Manager manager = new Manager(source, Server.shared().address())) {
            manager.register(host, LifeTest.driver(16, 8, 10), LifeTest.driver(0, 0, 0));
            for (String lost : new String[] {"engineType", "userCreator", "emInstance"}) {
                String engine = "callslost1:" + lost;
                List<Label<?>> labels = Manager.labels(host, "callslost", "hive", "3.1.3");
                String ticket = Manager.ticket(manager.request(labels, LifeTest.driver(2, 2, 1), ResourceType.LoadInstance));
                manager.started(ticket, engine, "callslost", labels);
                execute("DELETE r FROM linkis_cg_manager_label_service_instance r JOIN linkis_cg_manager_label l ON l.id = r.label_id"
                        + " WHERE r.service_instance = '" + engine + "' AND l.label_key = '" + lost + "'");
                manager.used(engine, LifeTest.driver(2, 2, 1), ResourceType.LoadInstance);
                assertEquals(Books.byTickets(asking, host), Books.byTables(source), lost);
            }
        }
    }

    /** A use below the grant is the new amount, in Linkis and in the service. */
    private void report(Manager manager) throws Exception {
        NodeResource less = Manager.amount(LifeTest.driver(1, 1, 1), ResourceType.LoadInstance);
        less.setUsedResource(LifeTest.driver(1, 1, 1));
        manager.resources.resourceReport(manager.context.getBean(NodeLabelService.class)
                .getNodeLabels(Manager.instance(Manager.EC, ENGINE)), less);
        Ticket ticket = Books.tickets(client, HOST).get(0);
        assertEquals(1, ticket.getUsed().getLoadInstance().getCores(), ticket.toString());
        assertEquals(Books.byTickets(client, HOST), Books.byTables(source));
    }

    /** Health and load of an ECM's heartbeat are in the service, under the second of the heartbeat. */
    private void heartbeat(String host) throws Exception {
        execute("INSERT INTO linkis_cg_manager_service_instance_metrics (instance, instance_status, healthy_status, overload, update_time)"
                + " VALUES ('" + host + "', 5, '{\"nodeHealthy\":\"Healthy\"}', '{}', NOW() - INTERVAL 1 MINUTE)");
        for (int tries = 0; host(host).getHealth() != Health.HEALTH_WARN; tries++) {
            assertTrue(tries < 300, () -> host(host).toString());
            // A heartbeat from before the start of its manager is no sign of life: another one must follow.
            execute("UPDATE linkis_cg_manager_service_instance_metrics SET update_time = NOW(), healthy_status = '{\"nodeHealthy\":\"WARN\"}',"
                    + " overload = '{\"maxMemory\":100,\"usedMemory\":25,\"systemCPUUsed\":0.5}'");
            Thread.sleep(100);
        }
        assertEquals(25, host(host).getLoad().getMemoryUsed(), host(host).toString());
        assertEquals(500, host(host).getLoad().getCpuPermille(), host(host).toString());
    }

    /** An engine is idle in the service from the ECM's heartbeat in which it is unlocked in Linkis to one in which it is not. */
    private void idle() throws Exception {
        execute("INSERT INTO linkis_cg_manager_service_instance_metrics (instance, instance_status) VALUES ('" + ENGINE + "', 0)");
        for (NodeStatus status : new NodeStatus[] {NodeStatus.Unlock, NodeStatus.Locked, NodeStatus.Unlock, NodeStatus.Busy}) {
            execute("UPDATE linkis_cg_manager_service_instance_metrics SET instance_status = " + status.ordinal()
                    + " WHERE instance = '" + ENGINE + "'");
            for (int tries = 0; Books.tickets(client, HOST).get(0).hasIdleSince() != (status == NodeStatus.Unlock); tries++) {
                assertTrue(tries < 300, status::toString);
                execute("UPDATE linkis_cg_manager_service_instance_metrics SET update_time = NOW() WHERE instance = '" + HOST + "'");
                Thread.sleep(100);
            }
        }
    }

    /** Linkis's lock is a hold in the service, until it is unlocked. */
    private void lock(Manager manager) {
        PersistenceLock lock = manager.resources.tryLockOneLabel(Manager.label(HOST), 1000, "hadoop");
        assertTrue(holds().contains(HOST), holds());
        manager.resources.unLock(lock);
        assertFalse(holds().contains(HOST), holds());
    }

    /** The reset button makes the rows equal to the service, and ends no live ticket. */
    private void reset(Manager manager) throws Exception {
        execute("UPDATE linkis_cg_manager_linkis_resources SET used_resource = REPLACE(used_resource, '\"cores\":1', '\"cores\":5')"
                + " WHERE ticketId IS NULL");
        assertFalse(Books.byTickets(client, HOST).equals(Books.byTables(source)));
        RMLabelContainer of = manager.context.getBean(LabelResourceService.class)
                .enrichLabels(Manager.labels(HOST, "callsalice", "hive", "3.1.3"));
        for (Label<?> label : new Label<?>[] {of.getEMInstanceLabel(), of.getCombinedResourceLabel()}) {
            manager.resources.resetResource(LabelManagerUtils.convertPersistenceLabel(label), null);
        }
        for (int tries = 0; !Books.byTickets(client, HOST).equals(Books.byTables(source)); tries++) {
            assertTrue(tries < 300, "the rows are written");
            Thread.sleep(100);
        }
        assertEquals(1, Books.tickets(client, HOST).size());
    }

    /** Linkis has lost the ECM and the user of an engine: the ticket alone releases it. */
    private void releaseWithoutRelation(Manager manager) throws Exception {
        execute("DELETE FROM linkis_cg_manager_engine_em WHERE engine_instance = '" + ENGINE + "'");
        execute("DELETE FROM linkis_cg_manager_label_service_instance WHERE service_instance = '" + ENGINE + "'");
        manager.clear(ENGINE);
        assertEquals(List.of(), Books.tickets(client, HOST));
    }

    private EmResource host(String host) {
        EmInstance em = EmInstance.newBuilder().setApplicationName(Manager.ECM).setInstance(host).build();
        return client.call(UsageServiceGrpc.getGetEmMethod(), GetEmRequest.newBuilder().setEm(em).build()).getEm();
    }

    private String holds() {
        return client.call(AdminServiceGrpc.getListHoldsMethod(), ListHoldsRequest.getDefaultInstance()).toString();
    }

    private void execute(String sql) throws SQLException {
        try (Connection connection = source.getConnection(); Statement statement = connection.createStatement()) {
            statement.execute(sql);
        }
    }
}
