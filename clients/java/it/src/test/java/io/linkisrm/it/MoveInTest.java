package io.linkisrm.it;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.linkisrm.client.LinkisRmClient;
import io.linkisrm.linkis.MoveIn;
import java.io.ByteArrayOutputStream;
import java.io.PrintStream;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Arrays;
import java.util.List;
import org.apache.linkis.manager.common.entity.resource.ResourceType;
import org.apache.linkis.manager.label.entity.Label;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;

/** A Linkis with its own resource manager, and engines that run, comes to use the service. */
class MoveInTest {
    private static final String HOST = "host1:9102";

    @TempDir
    Path conf;

    @Test
    void engines_that_run_are_moved_in_and_end_as_ever() throws Exception {
        MariaDb database = MariaDb.get();
        try (Server server = Server.start(); LinkisRmClient client = server.client()) {
            Configuration.set();
            database.create("movein");
            try (Manager builtIn = new Manager(database.source("movein"), (String) null)) {
                builtIn.register(HOST, LifeTest.driver(16, 8, 10), LifeTest.driver(0, 0, 0));
                engine(builtIn, "alice", "host1:41001", true);
                engine(builtIn, "bob", "host1:41002", true);
                engine(builtIn, "bob", "host1:41003", false);
            }
            Files.write(conf.resolve("linkis.properties"), Arrays.asList("wds.linkis.server.mybatis.datasource.url=" + database.url("movein"),
                    "wds.linkis.server.mybatis.datasource.username=root", "wds.linkis.server.mybatis.datasource.password="));
            Files.write(conf.resolve("linkis-cg-linkismanager.properties"), List.of("spring.linkis.rm.address=" + server.address()));

            ByteArrayOutputStream told = new ByteArrayOutputStream();
            assertEquals(1, MoveIn.run(new String[] {conf.toString()}, new PrintStream(told), System.err));
            assertTrue(told.toString().contains("LEFT OUT: engine host1:41003"), told.toString());
            assertTrue(told.toString().contains("of alice-IDE,hive-3.1.3 on host1:9102"), told.toString());
            assertEquals(0, Books.tickets(client).size(), "it only told what it would do");

            for (int twice = 0; twice < 2; twice++) {
                told.reset();
                assertEquals(1, MoveIn.run(new String[] {conf.toString(), "--apply"}, new PrintStream(told), System.err));
                assertTrue(told.toString().contains("Audit: 1 hosts, 2 tickets, 0 differences"), told.toString());
            }

            try (Manager manager = new Manager(database.source("movein"), server.address())) {
                manager.clear("host1:41001");
                manager.clear("host1:41002");
                manager.clear("host1:41003");
                assertEquals(Books.byTickets(client).toString(), Books.byTables(database.source("movein")).toString());
                assertEquals(0, Books.tickets(client).size());
            }
        }
    }

    @Test
    void what_is_wrong_in_the_files_is_named() throws Exception {
        Files.write(conf.resolve("linkis.properties"), List.of());
        Files.write(conf.resolve("linkis-cg-linkismanager.properties"), List.of("spring.linkis.rm.address=nowhere"));
        ByteArrayOutputStream told = new ByteArrayOutputStream();
        assertEquals(64, MoveIn.run(new String[] {conf.toString()}, System.out, new PrintStream(told)));
        assertTrue(told.toString().contains("spring.linkis.rm.address=HOST:50051"), told.toString());
    }

    private static void engine(Manager manager, String user, String name, boolean used) {
        List<Label<?>> labels = Manager.labels(HOST, user, "hive", "3.1.3");
        String ticket = Manager.ticket(manager.request(labels, LifeTest.driver(1, 1, 1), ResourceType.LoadInstance));
        manager.started(ticket, name, user, labels);
        if (used) {
            manager.used(name, LifeTest.driver(1, 1, 1), ResourceType.LoadInstance);
        }
    }
}
