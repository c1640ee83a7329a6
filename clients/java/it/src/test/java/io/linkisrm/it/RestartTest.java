package io.linkisrm.it;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.linkisrm.client.LinkisRmClient;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.AtomicLong;
import java.util.concurrent.atomic.AtomicReference;
import javax.sql.DataSource;
import org.apache.linkis.common.exception.LinkisRetryException;
import org.apache.linkis.manager.common.entity.resource.ResourceType;
import org.apache.linkis.manager.label.entity.Label;
import org.apache.linkis.manager.rm.AvailableResource;
import org.apache.linkis.manager.rm.ResultResource;
import org.apache.linkis.manager.rm.exception.RMErrorCode;
import org.junit.jupiter.api.Test;

/** The service is killed under load, is away for a while, and returns: no change is lost, and no ticket remains without an owner. */
class RestartTest {
    private static final String HOST = "host1:9102";
    private static final int THREADS = 6;
    private static final int LIVES = 10;

    private final AtomicInteger lives = new AtomicInteger();
    private final AtomicInteger again = new AtomicInteger();
    private final AtomicLong worst = new AtomicLong();
    private final AtomicReference<Throwable> failed = new AtomicReference<>();

    @Test
    void a_service_that_is_killed_under_load_loses_nothing() throws Exception {
        MariaDb database = MariaDb.get();
        try (Server server = Server.start(); LinkisRmClient client = server.client()) {
            Configuration.set("user", "wds.linkis.rm.instance", "100");
            database.create("restart");
            DataSource source = database.source("restart");
            try (Manager manager = new Manager(database.source("restart"), server.address());
                    Manager impatient = new Manager(
                            database.source("restart"), Map.of("linkis.rm.address", server.address(), "linkis.rm.timeout", "1s"))) {
                manager.register(HOST, LifeTest.driver(1000, 1000, 1000), LifeTest.driver(0, 0, 0));
                List<Thread> threads = new ArrayList<>();
                for (int i = 0; i < THREADS; i++) {
                    String user = "user" + i;
                    threads.add(new Thread(() -> live(manager, user), user));
                    threads.get(i).start();
                }
                while (lives.get() < THREADS * LIVES / 4 && failed.get() == null) {
                    Thread.sleep(10);
                }
                long killed = System.nanoTime();
                server.kill();
                LinkisRetryException nobody = assertThrows(LinkisRetryException.class, () -> impatient.request(
                        Manager.labels(HOST, "nobody", "hive", "3.1.3"), LifeTest.driver(1, 1, 1), ResourceType.LoadInstance));
                assertEquals(RMErrorCode.LOCK_LABEL_FAILED.getErrorCode(), nobody.getErrCode(), "nothing is granted without the service");
                server.begin();
                double away = (System.nanoTime() - killed) / 1e9;
                for (Thread thread : threads) {
                    thread.join();
                }
                if (failed.get() != null) {
                    throw new AssertionError(failed.get());
                }
                // One engine of each user continues.
                for (int tries = 0; tries < 300 && !Books.byTickets(client, HOST).equals(Books.byTables(source)); tries++) {
                    Thread.sleep(100);
                }
                assertEquals(String.join("\n", Books.byTickets(client, HOST).toString()), Books.byTables(source).toString());
                assertEquals(THREADS, Books.tickets(client, HOST).size());
                assertEquals(0, server.audit().getDifferenceCount());
                System.out.printf("restart: %d engines lived while the service was away for %.1f s; %d requests were told to try again,"
                        + " the longest took %.1f s%n", lives.get(), away, again.get(), worst.get() / 1e9);
            }
        }
    }

    private void live(Manager manager, String user) {
        try {
            for (int i = 0; i < LIVES && failed.get() == null; i++) {
                List<Label<?>> labels = Manager.labels(HOST, user, "hive", "3.1.3");
                String ticket = granted(manager, labels);
                String name = user + ":" + i;
                manager.started(ticket, name, user, labels);
                manager.used(name, LifeTest.driver(1, 1, 1), ResourceType.LoadInstance);
                if (i > 0) {
                    manager.clear(name);
                }
                lives.incrementAndGet();
            }
        } catch (Throwable e) {
            failed.compareAndSet(null, e);
        }
    }

    /** Repeats like Linkis's clients after an error that asks for it. */
    private String granted(Manager manager, List<Label<?>> labels) {
        while (true) {
            long begin = System.nanoTime();
            try {
                ResultResource result = manager.request(labels, LifeTest.driver(1, 1, 1), ResourceType.LoadInstance);
                assertTrue(result instanceof AvailableResource, result.toString());
                return Manager.ticket(result);
            } catch (LinkisRetryException e) {
                again.incrementAndGet();
            } finally {
                worst.accumulateAndGet(System.nanoTime() - begin, Math::max);
            }
        }
    }
}
