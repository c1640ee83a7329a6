package io.linkisrm.it;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.linkisrm.client.LinkisRmClient;
import io.linkisrm.client.ServiceException;
import java.sql.Connection;
import java.sql.SQLException;
import java.sql.Statement;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.Random;
import java.util.concurrent.ConcurrentLinkedQueue;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.AtomicReference;
import javax.sql.DataSource;
import linkis.rm.v1.AdminServiceGrpc;
import linkis.rm.v1.EmInstance;
import linkis.rm.v1.ForceReleaseRequest;
import linkis.rm.v1.RequestResourceRequest;
import linkis.rm.v1.ResourceManagerServiceGrpc;
import org.apache.linkis.manager.common.entity.resource.DriverAndYarnResource;
import org.apache.linkis.manager.common.entity.resource.Resource;
import org.apache.linkis.manager.common.entity.resource.ResourceType;
import org.apache.linkis.manager.common.entity.resource.YarnResource;
import org.apache.linkis.manager.label.entity.Label;
import org.apache.linkis.manager.rm.AvailableResource;
import org.apache.linkis.manager.rm.ResultResource;
import org.junit.jupiter.api.Test;

/** Two managers call at random, one of them is killed, engines vanish and tickets expire: the tables end equal to the service. */
class MirrorTest {
    private static final int OPERATIONS = Integer.parseInt(System.getenv().getOrDefault("MIRROR_OPERATIONS", "200"));
    private static final int THREADS = 8;
    private static final int HOSTS = 4;
    private static final int USERS = 6;
    private static final long LOCK_MILLIS = 4000;

    private record Engine(String ticket, String name, List<Label<?>> labels, Resource resource, ResourceType type) {}

    private final ConcurrentLinkedQueue<Engine> granted = new ConcurrentLinkedQueue<>();
    private final ConcurrentLinkedQueue<Engine> running = new ConcurrentLinkedQueue<>();
    private final AtomicInteger done = new AtomicInteger();
    private final AtomicInteger names = new AtomicInteger();
    private final AtomicReference<Throwable> failed = new AtomicReference<>();
    private final int[] kinds = new int[8];
    /** The manager that is being killed: from that moment on its exceptions are expected. */
    private volatile Manager killed;
    private DataSource source;
    private LinkisRmClient client;

    @Test
    void the_tables_end_as_the_service_says() throws Exception {
        MariaDb database = MariaDb.get();
        Server server = Server.shared();
        try (LinkisRmClient asking = server.client()) {
            Configuration.set("mirror", "wds.linkis.rm.instance", "40", "wds.linkis.rm.client.core.max", "60", "wds.linkis.rm.client.memory.max", "60g");
            database.create("mirror");
            source = database.source("mirror");
            client = asking;
            Manager[] managers = {manager(server), manager(server)};
            for (int host = 0; host < HOSTS; host++) {
                managers[0].register(host(host), LifeTest.driver(64, 64, 30), LifeTest.driver(2, 2, 1));
            }
            Thread heart = heartbeats();
            long begin = System.nanoTime();
            List<Thread> threads = new ArrayList<>();
            for (int i = 0; i < THREADS; i++) {
                int seed = i;
                threads.add(new Thread(() -> work(managers, seed), "work-" + i));
                threads.get(i).start();
            }
            while (done.get() < OPERATIONS / 2 && failed.get() == null) {
                Thread.sleep(10);
            }
            Manager old = managers[1];
            managers[1] = manager(server);
            killed = old;
            killed.close();
            for (Thread thread : threads) {
                thread.join();
            }
            double seconds = (System.nanoTime() - begin) / 1e9;
            if (failed.get() != null) {
                throw new AssertionError(failed.get());
            }
            long settled = System.nanoTime();
            Map<String, String> tickets = null;
            Map<String, String> tables = null;
            for (int tries = 0; tries < 500 && (tables == null || !tables.equals(tickets)); tries++) {
                Thread.sleep(200);
                tickets = Books.byTickets(client, "em");
                tables = Books.byTables(source);
            }
            assertEquals(String.join("\n", lines(tickets)), String.join("\n", lines(tables)));
            assertEquals(0, server.audit().getDifferenceCount());
            System.out.printf("mirror: %d operations by two managers in %.1f s (%s), equal %.1f s later%n", done.get(), seconds, counts(),
                    (System.nanoTime() - settled) / 1e9);
            heart.interrupt();
            for (Manager manager : managers) {
                manager.close();
            }
        }
    }

    private static Manager manager(Server server) throws Exception {
        Manager manager = new Manager(MariaDb.get().source("mirror"), server.address());
        manager.expireAfter(LOCK_MILLIS);
        return manager;
    }

    private static List<String> lines(Map<String, String> books) {
        List<String> lines = new ArrayList<>();
        books.forEach((name, amounts) -> lines.add(name + " " + amounts));
        return lines;
    }

    private String counts() {
        String[] told = {"granted", "refused", "used", "released", "left to expire", "vanished", "forced", "granted to a dying manager"};
        StringBuilder text = new StringBuilder();
        for (int i = 0; i < told.length; i++) {
            text.append(i == 0 ? "" : ", ").append(kinds[i]).append(' ').append(told[i]);
        }
        return text.toString();
    }

    private synchronized void count(int kind) {
        kinds[kind]++;
    }

    private void work(Manager[] managers, int seed) {
        Random random = new Random(seed);
        try {
            while (done.incrementAndGet() <= OPERATIONS && failed.get() == null) {
                one(managers[random.nextInt(managers.length)], random);
            }
        } catch (Throwable e) {
            failed.compareAndSet(null, e);
        }
    }

    private void one(Manager manager, Random random) throws Exception {
        int what = random.nextInt(100);
        try {
            if (what < 40) {
                request(manager, random);
            } else if (what < 62) {
                start(manager);
            } else if (what < 86) {
                release(manager);
            } else if (what < 90) {
                // A grant without any later call.
                if (granted.poll() != null) {
                    count(4);
                }
            } else if (what < 93) {
                vanish();
            } else if (what < 95) {
                force();
            } else if (what < 97) {
                die(random);
            } else {
                int host = random.nextInt(HOSTS);
                manager.register(host(host), LifeTest.driver(60 + random.nextInt(8), 64, 30), LifeTest.driver(2, 2, 1));
            }
        } catch (Throwable e) {
            // Linkis's own statements can deadlock.
            if (manager != killed && !causes(e).contains("Deadlock")) {
                throw e;
            }
        }
    }

    private static String causes(Throwable error) {
        StringBuilder causes = new StringBuilder();
        for (Throwable cause = error; cause != null; cause = cause.getCause()) {
            causes.append(cause).append('\n');
        }
        return causes.toString();
    }

    private void request(Manager manager, Random random) {
        String user = "mirror" + random.nextInt(USERS);
        boolean spark = random.nextInt(3) == 0;
        List<Label<?>> labels = Manager.labels(host(random.nextInt(HOSTS)), user, spark ? "spark" : "hive", spark ? "3.2.1" : "3.1.3");
        Resource driver = LifeTest.driver(1 + random.nextInt(3), 1 + random.nextInt(2), 1);
        Resource resource = spark ? new DriverAndYarnResource(LifeTest.driver(1, 1, 1), new YarnResource(1L << 30, 2, 0, "etl")) : driver;
        ResourceType type = spark ? ResourceType.DriverAndYarn : ResourceType.LoadInstance;
        ResultResource result = manager.request(labels, resource, type);
        if (result instanceof AvailableResource) {
            granted.add(new Engine(Manager.ticket(result), "host:" + names.incrementAndGet(), labels, resource, type));
            count(0);
        } else {
            count(1);
        }
    }

    private void start(Manager manager) {
        Engine engine = granted.poll();
        if (engine != null) {
            manager.started(engine.ticket, engine.name, "hadoop", engine.labels);
            manager.used(engine.name, engine.resource, engine.type);
            running.add(engine);
            count(2);
        }
    }

    private void release(Manager manager) {
        Engine engine = running.poll();
        if (engine != null) {
            manager.clear(engine.name);
            count(3);
        }
    }

    /** Linkis loses an engine: its ticket is not released. */
    private void vanish() throws SQLException {
        Engine engine = running.poll();
        if (engine != null) {
            execute("DELETE FROM linkis_cg_manager_engine_em WHERE engine_instance = '" + engine.name + "'");
            execute("DELETE FROM linkis_cg_manager_service_instance WHERE instance = '" + engine.name + "'");
            count(5);
        }
    }

    private void force() {
        Engine engine = running.poll();
        if (engine != null) {
            try {
                client.call(AdminServiceGrpc.getForceReleaseMethod(),
                        ForceReleaseRequest.newBuilder().setTicketId(engine.ticket).setReason("a test").build());
            } catch (ServiceException e) {
                assertTrue(e.is("TICKET_NOT_FOUND"), e.toString());
            }
            count(6);
        }
    }

    /** A manager gets a grant and dies before writing it. */
    private void die(Random random) {
        RequestResourceRequest request = RequestResourceRequest.newBuilder()
                .setEm(EmInstance.newBuilder().setApplicationName(Manager.ECM).setInstance(host(random.nextInt(HOSTS))))
                .setUser("mirror" + random.nextInt(USERS)).setCreator("IDE").setEngineType("hive-3.1.3")
                .setLockTtl(io.linkisrm.shaded.google.protobuf.Duration.newBuilder().setSeconds(3))
                .setResource(linkis.rm.v1.Resource.newBuilder().setLoadInstance(
                        linkis.rm.v1.LoadInstanceResource.newBuilder().setMemory(1 << 20).setCores(1).setInstances(1))).build();
        client.call(ResourceManagerServiceGrpc.getRequestResourceMethod(), request, Duration.ofSeconds(20));
        count(7);
    }

    private Thread heartbeats() throws SQLException {
        for (int host = 0; host < HOSTS; host++) {
            execute("INSERT INTO linkis_cg_manager_service_instance_metrics (instance, instance_status, healthy_status, overload)"
                    + " VALUES ('" + host(host) + "', 5, '{\"nodeHealthy\":\"Healthy\"}', '{\"maxMemory\":100,\"usedMemory\":10}')");
        }
        Thread thread = new Thread(() -> {
            try {
                while (true) {
                    Thread.sleep(1000);
                    execute("UPDATE linkis_cg_manager_service_instance_metrics SET update_time = NOW() WHERE instance LIKE 'em%'");
                }
            } catch (InterruptedException | SQLException e) {
                // The test has ended.
            }
        }, "heartbeats");
        thread.setDaemon(true);
        thread.start();
        return thread;
    }

    private void execute(String sql) throws SQLException {
        try (Connection connection = source.getConnection(); Statement statement = connection.createStatement()) {
            statement.executeUpdate(sql);
        }
    }

    private static String host(int number) {
        return "em" + number + ":9102";
    }
}
