package io.linkisrm.it;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.linkisrm.client.LinkisRmClient;
import io.linkisrm.linkis.MoveIn;
import java.io.ByteArrayOutputStream;
import java.io.File;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import linkis.rm.v1.Ticket;
import org.apache.linkis.manager.common.entity.resource.ResourceType;
import org.apache.linkis.manager.label.entity.Label;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.condition.EnabledIfEnvironmentVariable;
import org.junit.jupiter.api.io.TempDir;

/** A Linkis with its own resource manager and running engines moves to the service, and back. */
class MoveInTest {
    private static final String HOST = "move1:9102";

    @TempDir
    Path conf;

    @Test
    void engines_that_run_are_moved_in_and_end_as_ever_and_linkis_goes_on_without_the_service() throws Exception {
        MariaDb database = MariaDb.get();
        Server server = Server.shared();
        try (LinkisRmClient client = server.client()) {
            Configuration.use();
            database.create("movein");
            try (Manager builtIn = new Manager(database.source("movein"), (String) null)) {
                builtIn.register(HOST, LifeTest.driver(16, 8, 10), LifeTest.driver(0, 0, 0));
                engine(builtIn, "movealice", "move1:41001", true);
                engine(builtIn, "movebob", "move1:41002", true);
                engine(builtIn, "movebob", "move1:41003", false);
            }
            write(conf, "movein", server);

            ByteArrayOutputStream told = new ByteArrayOutputStream();
            assertEquals(1, MoveIn.run(new String[] {conf.toString()}, new PrintStream(told), System.err));
            assertTrue(told.toString().contains("LEFT OUT: engine move1:41003"), told.toString());
            assertTrue(told.toString().contains("of movealice-IDE,hive-3.1.3 on move1:9102"), told.toString());
            assertEquals(0, Books.tickets(client, HOST).size(), "it only told what it would do");

            for (int twice = 0; twice < 2; twice++) {
                told.reset();
                assertEquals(1, MoveIn.run(new String[] {conf.toString(), "--apply"}, new PrintStream(told), System.err));
                assertTrue(told.toString().contains(", 0 differences"), told.toString());
            }

            assertEquals(2, Books.tickets(client, HOST).size());
            for (Ticket adopted : Books.tickets(client, HOST)) {
                assertTrue(List.of("movealice move1:41001", "movebob move1:41002").contains(
                        adopted.getUser() + " " + adopted.getEngine().getInstance()), adopted.toString());
            }

            try (Manager manager = new Manager(database.source("movein"), server.address())) {
                engine(manager, "movebob", "move1:41004", true);
                manager.clear("move1:41001");
                manager.clear("move1:41002");
                manager.clear("move1:41003");
                assertEquals(Books.byTickets(client, HOST).toString(), Books.byTables(database.source("movein")).toString());
                assertEquals(1, Books.tickets(client, HOST).size());
            }

            // Back again: Linkis's own resource manager continues with the tables.
            try (Manager builtIn = new Manager(database.source("movein"), (String) null)) {
                engine(builtIn, "movealice", "move1:41005", true);
                builtIn.clear("move1:41004");
                builtIn.clear("move1:41005");
            }
            assertEquals(Map.of("host " + HOST, Arrays.toString(new long[10]), "tickets", "[]"), Books.byTables(database.source("movein")));
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

    /** The documented command in an installation: jars in folders, and the adapter in one of its own. */
    @Test
    @EnabledIfEnvironmentVariable(named = "LINKIS_IT", matches = "full")
    void the_command_that_is_documented_runs() throws Exception {
        MariaDb.get().create("command");
        try (Manager builtIn = new Manager(MariaDb.get().source("command"), (String) null)) {
            builtIn.register(HOST, LifeTest.driver(16, 8, 10), LifeTest.driver(0, 0, 0));
        }
        Path home = conf.resolve("home");
        Path own = Files.createDirectories(home.resolve("extended"));
        Path libraries = Files.createDirectories(home.resolve("lib/linkis-computation-governance/linkis-cg-linkismanager"));
        for (String entry : System.getProperty("surefire.test.class.path", System.getProperty("java.class.path")).split(File.pathSeparator)) {
            Path jar = Path.of(entry);
            if (entry.endsWith(".jar")) {
                boolean isOurs = jar.getFileName().toString().startsWith("linkis-rm-adapter");
                Files.createSymbolicLink((isOurs ? own : libraries).resolve(jar.getFileName()), jar);
            }
        }
        Files.createDirectory(home.resolve("conf"));
        write(home.resolve("conf"), "command", Server.shared());
        Matcher documented = Pattern.compile("    (cd \\$LINKIS_HOME; java .*?) \\[--apply]", Pattern.DOTALL)
                .matcher(Files.readString(Path.of("../../../docs/LINKIS.md")));
        assertTrue(documented.find());
        ProcessBuilder command = new ProcessBuilder("bash", "-c", documented.group(1) + " --apply").redirectErrorStream(true);
        command.environment().put("LINKIS_HOME", home.toString());
        command.environment().put("LINKIS_EXTENDED_LIB", own.toString());
        Process process = command.start();
        String said = new String(process.getInputStream().readAllBytes(), StandardCharsets.UTF_8);
        assertEquals(0, process.waitFor(), said);
        assertTrue(said.contains("register " + HOST) && said.contains(", 0 differences"), said);
    }

    private static void write(Path conf, String database, Server server) throws Exception {
        Files.write(conf.resolve("linkis.properties"), Arrays.asList("wds.linkis.server.mybatis.datasource.url="
                + MariaDb.get().url(database), "wds.linkis.server.mybatis.datasource.username=root", "wds.linkis.server.mybatis.datasource.password="));
        Files.write(conf.resolve("linkis-cg-linkismanager.properties"), List.of("spring.linkis.rm.address=" + server.address()));
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
