package io.linkisrm.linkis;

import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.util.List;
import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.Semaphore;
import java.util.function.BooleanSupplier;
import linkis.rm.v1.Action;
import org.junit.jupiter.api.Test;

/** A position of the feed is stored only when all changes before it are in the tables. */
class MarksTest {
    @Test
    void a_mark_is_shown_when_all_rows_that_were_marked_up_to_it_are() throws Exception {
        Semaphore writes = new Semaphore(0, true);
        Set<Object> written = ConcurrentHashMap.newKeySet();
        Set<Object> failing = ConcurrentHashMap.newKeySet();
        Mirror mirror = new Mirror(row -> {
            writes.acquire();
            if (failing.contains(row)) {
                throw new IllegalStateException("it is tried again");
            }
            written.add(row);
        });
        mirror.start();
        try {
            assertTrue(mirror.hasShown(mirror.lastMark()), "there is none");
            failing.add("one");
            mirror.changed(List.of("one", "other"));
            long both = mirror.lastMark();
            assertFalse(mirror.hasShown(both));
            // One permit each: a failed row is retried immediately.
            eventually(() -> writes.getQueueLength() == 2);
            writes.release(2);
            eventually(() -> written.contains("other"));
            assertFalse(mirror.hasShown(both), "one of them cannot be written");

            mirror.changed(List.of("other"));
            eventually(() -> writes.getQueueLength() == 2);
            failing.clear();
            writes.release(2);
            eventually(() -> mirror.hasShown(mirror.lastMark()));

            // A mark during a write: the earlier mark is written, the later one is not.
            mirror.changed(List.of("one"));
            long before = mirror.lastMark();
            eventually(() -> writes.hasQueuedThreads());
            mirror.changed(List.of("one"));
            writes.release(1);
            eventually(() -> mirror.hasShown(before));
            assertFalse(mirror.hasShown(mirror.lastMark()));
            writes.release(1);
            eventually(() -> mirror.hasShown(mirror.lastMark()));
        } finally {
            mirror.stop();
        }
    }

    @Test
    void whatever_goes_wrong_with_some_rows_the_others_are_written() throws Exception {
        Set<Object> broken = ConcurrentHashMap.newKeySet();
        Set<Object> written = ConcurrentHashMap.newKeySet();
        Mirror mirror = new Mirror(row -> {
            if (broken.remove(row)) {
                throw new NoClassDefFoundError("an error, and no exception");
            }
            written.add(row);
        });
        List<Integer> rows = List.of(1, 2, 3, 4, 5, 6, 7, 8);
        broken.addAll(rows);
        mirror.start();
        try {
            mirror.changed(rows);
            eventually(() -> written.containsAll(rows));
        } finally {
            mirror.stop();
        }
    }

    @Test
    void what_a_manager_did_itself_is_passed_over_once() {
        Own own = new Own();
        Action granted = Action.newBuilder().setTicketId("t").setAction("granted").build();
        assertFalse(own.take(granted));
        own.shown("t", "granted");
        assertFalse(own.take(granted.toBuilder().setAction("expired").build()));
        assertTrue(own.take(granted));
        assertFalse(own.take(granted), "what is told again is looked at");
        own.shown("t", "granted");
        for (int i = 0; i < 10_000; i++) {
            own.shown("t" + i, "granted");
        }
        assertFalse(own.take(granted), "it is kept for a while alone");
    }

    private static void eventually(BooleanSupplier condition) throws InterruptedException {
        for (int tries = 0; !condition.getAsBoolean(); tries++) {
            assertTrue(tries < 3000, "it is so in time");
            Thread.sleep(10);
        }
    }
}
