package io.linkisrm.it;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertNotNull;
import static org.junit.jupiter.api.Assertions.assertNull;
import static org.junit.jupiter.api.Assertions.assertThrows;

import io.linkisrm.client.LinkisRmClient;
import java.sql.Connection;
import java.sql.SQLException;
import java.sql.Statement;
import java.util.List;
import java.util.Map;
import javax.sql.DataSource;
import linkis.rm.v1.AdminServiceGrpc;
import linkis.rm.v1.ForceReleaseRequest;
import org.apache.linkis.common.exception.LinkisRetryException;
import org.apache.linkis.manager.am.manager.DefaultEngineNodeManager;
import org.apache.linkis.manager.common.entity.resource.ResourceType;
import org.apache.linkis.manager.label.entity.Label;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.condition.EnabledIfEnvironmentVariable;

/** Grants that Linkis cannot store, engines that lost their tickets, and lost releases. */
class EndTest {
    private static final String HOST = "end1:9102";

    @Test
    void a_grant_that_linkis_cannot_write_is_given_back_and_an_engine_without_a_ticket_is_stopped() throws Exception {
        MariaDb database = MariaDb.get();
        database.create("end");
        DataSource source = database.source("end");
        Configuration.use();
        try (LinkisRmClient client = Server.shared().client();
                Manager manager = new Manager(database.source("end"), Server.shared().address())) {
            manager.register(HOST, LifeTest.driver(16, 8, 10), LifeTest.driver(0, 0, 0));
            execute(source, "RENAME TABLE linkis_cg_manager_engine_em TO away");
            List<Label<?>> labels = Manager.labels(HOST, "endalice", "hive", "3.1.3");
            assertThrows(RuntimeException.class, () -> manager.request(labels, LifeTest.driver(1, 1, 1), ResourceType.LoadInstance));
            assertEquals(List.of(), Books.tickets(client, HOST));
            execute(source, "RENAME TABLE away TO linkis_cg_manager_engine_em");

            String ticket = Manager.ticket(manager.request(Manager.labels(HOST, "endbob", "hive", "3.1.3"), LifeTest.driver(1, 1, 1),
                    ResourceType.LoadInstance));
            manager.started(ticket, "end1:41001", "endbob", Manager.labels(HOST, "endbob", "hive", "3.1.3"));
            client.call(AdminServiceGrpc.getForceReleaseMethod(),
                    ForceReleaseRequest.newBuilder().setTicketId(ticket).setReason("a test").build());
            assertNotNull(node(manager));
            manager.used("end1:41001", LifeTest.driver(1, 1, 1), ResourceType.LoadInstance);
            for (int tries = 0; tries < 300 && node(manager) != null; tries++) {
                Thread.sleep(100);
            }
            assertNull(node(manager), "the engine is cleared");
        }
    }

    /** Linkis tries again under another id, and has no record of the first. */
    @Test
    void a_grant_whose_answer_is_lost_is_given_back() throws Exception {
        String host = "endlost1:9102";
        MariaDb database = MariaDb.get();
        database.create("lost");
        Configuration.use();
        try (LinkisRmClient client = Server.shared().client(); DeafProxy proxy = new DeafProxy(Server.shared().address());
                Manager manager = new Manager(
                        database.source("lost"), Map.of("linkis.rm.address", proxy.address(), "linkis.rm.timeout", "2s"))) {
            manager.register(host, LifeTest.driver(16, 8, 10), LifeTest.driver(0, 0, 0));
            List<Label<?>> labels = Manager.labels(host, "endlost", "hive", "3.1.3");
            proxy.deafen();
            assertThrows(LinkisRetryException.class, () -> manager.request(labels, LifeTest.driver(1, 1, 1), ResourceType.LoadInstance));
            assertEquals(1, Books.tickets(client, host).size(), "it was granted, and nobody heard of it");
            proxy.hear();
            for (int tries = 0; tries < 300 && !Books.tickets(client, host).isEmpty(); tries++) {
                Thread.sleep(100);
            }
            assertEquals(List.of(), Books.tickets(client, host));
        }
    }

    @Test
    @EnabledIfEnvironmentVariable(named = "LINKIS_IT", matches = "full")
    void a_release_that_the_service_did_not_hear_is_made_good() throws Exception {
        MariaDb database = MariaDb.get();
        database.create("unheard");
        Configuration.use();
        try (Server server = Server.start(); LinkisRmClient client = server.client(); Manager manager = new Manager(
                database.source("unheard"), Map.of("linkis.rm.address", server.address(), "linkis.rm.timeout", "1s"))) {
            manager.register(HOST, LifeTest.driver(16, 8, 10), LifeTest.driver(0, 0, 0));
            List<Label<?>> labels = Manager.labels(HOST, "endalice", "hive", "3.1.3");
            String ticket = Manager.ticket(manager.request(labels, LifeTest.driver(1, 1, 1), ResourceType.LoadInstance));
            manager.started(ticket, "end1:41001", "endalice", labels);
            manager.used("end1:41001", LifeTest.driver(1, 1, 1), ResourceType.LoadInstance);
            server.kill();
            manager.clear("end1:41001");
            server.begin();
            assertEquals(1, Books.tickets(client, HOST).size());
            for (int tries = 0; tries < 900 && !Books.tickets(client, HOST).isEmpty(); tries++) {
                Thread.sleep(100);
            }
            assertEquals(List.of(), Books.tickets(client, HOST));
        }
    }

    private static Object node(Manager manager) {
        return manager.context.getBean(DefaultEngineNodeManager.class).getEngineNode(Manager.instance(Manager.EC, "end1:41001"));
    }

    private static void execute(DataSource source, String sql) throws SQLException {
        try (Connection connection = source.getConnection(); Statement statement = connection.createStatement()) {
            statement.execute(sql);
        }
    }
}
