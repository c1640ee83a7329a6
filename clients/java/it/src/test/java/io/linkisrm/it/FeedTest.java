package io.linkisrm.it;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertNotEquals;

import io.linkisrm.client.LinkisRmClient;
import io.linkisrm.client.Messages;
import java.sql.Connection;
import java.sql.ResultSet;
import java.sql.Statement;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.concurrent.Callable;
import javax.sql.DataSource;
import linkis.rm.v1.AdminServiceGrpc;
import linkis.rm.v1.FollowActionsRequest;
import linkis.rm.v1.FollowActionsResponse;
import linkis.rm.v1.ForceReleaseRequest;
import linkis.rm.v1.UsageServiceGrpc;
import org.apache.linkis.manager.common.entity.resource.ResourceType;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.condition.EnabledIfEnvironmentVariable;

/** The tables have the changes of the time without a manager. */
class FeedTest {
    private static final String QUIET = "feed1:9102";
    private static final String BUSY = "feed2:9102";
    private static final Duration SOON = Duration.ofSeconds(30);

    private DataSource source;
    private LinkisRmClient client;

    @Test
    void a_manager_goes_on_from_where_the_last_one_was_and_looks_at_everything_where_that_is_not_known() throws Exception {
        MariaDb database = MariaDb.get();
        database.create("feed");
        source = database.source("feed");
        Configuration.use();
        String address = Server.shared().address();
        try (LinkisRmClient asking = Server.shared().client(); Messages<FollowActionsResponse> feed = follow(asking, "")) {
            client = asking;
            feed.next(SOON);
            String forced;
            try (Manager manager = new Manager(database.source("feed"), address)) {
                manager.register(QUIET, LifeTest.driver(16, 8, 10), LifeTest.driver(0, 0, 0));
                manager.register(BUSY, LifeTest.driver(16, 8, 10), LifeTest.driver(0, 0, 0));
                engine(manager, QUIET, "feedalice", "feed1:41001");
                forced = engine(manager, BUSY, "feedbob", "feed2:41001");
                shownUpTo(feed, forced, "inited");
            }
            // Without a follower, one engine loses its ticket, and another program writes nonsense into the row of the other ECM.
            force(forced);
            assertEquals(1, execute("UPDATE linkis_cg_manager_linkis_resources r JOIN linkis_cg_manager_label_resource lr ON lr.resource_id = r.id"
                    + " JOIN linkis_cg_manager_label l ON l.id = lr.label_id SET r.used_resource ="
                    + " REPLACE(r.used_resource, '\"cores\":1', '\"cores\":7') WHERE l.label_key = 'emInstance' AND l.label_value LIKE '%" + QUIET
                    + "%'"));
            String nonsense = Books.byTables(source).get("host " + QUIET);
            assertNotEquals(Books.byTickets(client, "feed").get("host " + QUIET), nonsense);

            try (Manager manager = new Manager(database.source("feed"), address)) {
                eventually("what happened meanwhile is heard of", () -> without(Books.byTables(source), QUIET)
                        .equals(without(Books.byTickets(client, "feed"), QUIET)));
                shownUpTo(feed, forced, "forced");
                assertEquals(nonsense, Books.byTables(source).get("host " + QUIET), "it went on, and looked at nothing else");
            }

            // A position of another database: a history that no longer has the changes after a position returns the same code.
            execute("UPDATE linkis_rm_position SET position = '00000000-1'");
            try (Manager manager = new Manager(database.source("feed"), address)) {
                eventually("everything is looked at", () -> Books.byTables(source).equals(Books.byTickets(client, "feed")));
                eventually("a position is kept again", () -> number(kept()) > 1);
            }
        }
    }

    @Test
    void an_engine_whose_row_makes_no_sense_keeps_nobody_from_hearing_of_the_others() throws Exception {
        MariaDb database = MariaDb.get();
        database.create("nonsense");
        source = database.source("nonsense");
        Configuration.use();
        try (LinkisRmClient asking = Server.shared().client(); Messages<FollowActionsResponse> feed = follow(asking, "");
                Manager manager = new Manager(database.source("nonsense"), Server.shared().address())) {
            client = asking;
            feed.next(SOON);
            manager.register("nonsense1:9102", LifeTest.driver(16, 8, 10), LifeTest.driver(0, 0, 0));
            String broken = engine(manager, "nonsense1:9102", "feedalice", "nonsense1:41001");
            String other = engine(manager, "nonsense1:9102", "feedbob", "nonsense1:41002");
            assertEquals(1, execute("UPDATE linkis_cg_manager_linkis_resources SET resourceType = 'Nonsense' WHERE ticketId = '" + broken + "'"));
            force(broken);
            force(other);
            shownUpTo(feed, other, "forced");
            assertEquals(List.of(broken), engines());
        }
    }

    @Test
    @EnabledIfEnvironmentVariable(named = "LINKIS_IT", matches = "full")
    void an_engine_whose_row_makes_no_sense_keeps_others_that_were_missed_from_nothing() throws Exception {
        MariaDb database = MariaDb.get();
        database.create("missed");
        source = database.source("missed");
        Configuration.use();
        List<String> tickets = new ArrayList<>();
        try (LinkisRmClient asking = Server.shared().client()) {
            client = asking;
            try (Manager manager = new Manager(database.source("missed"), Server.shared().address())) {
                manager.register("missed1:9102", LifeTest.driver(16, 8, 10), LifeTest.driver(0, 0, 0));
                for (int i = 0; i < 6; i++) {
                    tickets.add(engine(manager, "missed1:9102", "feedalice", "missed1:4100" + i));
                }
            }
            String broken = tickets.get(2);
            assertEquals(1, execute("UPDATE linkis_cg_manager_linkis_resources SET resourceType = 'Nonsense' WHERE ticketId = '" + broken + "'"));
            tickets.forEach(this::force);
            // No manager gets these changes any more.
            execute("DELETE FROM linkis_rm_position");
            try (Manager manager = new Manager(database.source("missed"), Server.shared().address())) {
                for (int tries = 0; tries < 900 && engines().size() > 1; tries++) {
                    Thread.sleep(100);
                }
                assertEquals(List.of(broken), engines());
            }
        }
    }

    /** Waits until the feed has this change, and a position after it is stored. */
    private void shownUpTo(Messages<FollowActionsResponse> feed, String ticket, String action) throws Exception {
        FollowActionsResponse[] told = new FollowActionsResponse[1];
        eventually(action + " is told", () -> {
            told[0] = feed.next(SOON);
            return told[0].getActionsList().stream().anyMatch(line -> line.getTicketId().equals(ticket) && line.getAction().equals(action));
        });
        eventually("all that was told is in the tables", () -> number(kept()) >= number(told[0].getPosition()));
    }

    /** The stored position; empty without one. */
    private String kept() throws Exception {
        try (Connection connection = source.getConnection(); Statement statement = connection.createStatement();
                ResultSet row = statement.executeQuery("SELECT position FROM linkis_rm_position")) {
            return row.next() ? row.getString(1) : "";
        }
    }

    /** The tickets with the row of an engine. */
    private List<String> engines() throws Exception {
        try (Connection connection = source.getConnection(); Statement statement = connection.createStatement();
                ResultSet rows = statement.executeQuery("SELECT ticketId FROM linkis_cg_manager_linkis_resources WHERE ticketId IS NOT NULL")) {
            List<String> tickets = new ArrayList<>();
            while (rows.next()) {
                tickets.add(rows.getString(1));
            }
            return tickets;
        }
    }

    /** Number of a position in its history. */
    private static long number(String position) {
        return position.isEmpty() ? -1 : Long.parseLong(position.substring(position.lastIndexOf('-') + 1));
    }

    private void force(String ticket) {
        client.call(AdminServiceGrpc.getForceReleaseMethod(), ForceReleaseRequest.newBuilder().setTicketId(ticket).setReason("a test").build());
    }

    private static Messages<FollowActionsResponse> follow(LinkisRmClient client, String position) {
        return client.follow(UsageServiceGrpc.getFollowActionsMethod(), FollowActionsRequest.newBuilder().setPosition(position).build());
    }

    private static Map<String, String> without(Map<String, String> books, String host) {
        books.remove("host " + host);
        return books;
    }

    private static String engine(Manager manager, String host, String user, String name) {
        var labels = Manager.labels(host, user, "hive", "3.1.3");
        String ticket = Manager.ticket(manager.request(labels, LifeTest.driver(1, 1, 1), ResourceType.LoadInstance));
        manager.started(ticket, name, user, labels);
        manager.used(name, LifeTest.driver(1, 1, 1), ResourceType.LoadInstance);
        return ticket;
    }

    private static void eventually(String what, Callable<Boolean> condition) throws Exception {
        long end = System.nanoTime() + SOON.toNanos();
        while (!condition.call()) {
            if (System.nanoTime() > end) {
                throw new AssertionError("not so after " + SOON + ": " + what);
            }
            Thread.sleep(50);
        }
    }

    private int execute(String sql) throws Exception {
        try (Connection connection = source.getConnection(); Statement statement = connection.createStatement()) {
            return statement.executeUpdate(sql);
        }
    }
}
