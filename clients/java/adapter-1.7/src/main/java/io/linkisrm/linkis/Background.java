package io.linkisrm.linkis;

import java.util.concurrent.Executors;
import java.util.concurrent.ScheduledExecutorService;
import java.util.concurrent.TimeUnit;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/** Background tasks, each in a thread of its own, repeated until the manager stops. */
final class Background {
    private static final Logger LOG = LoggerFactory.getLogger(Background.class);
    private static final long FEED_MILLIS = 1000;
    private static final long HEARTBEATS_MILLIS = 3000;
    private static final long SWEEP_MILLIS = 15_000;
    private static final long UNANSWERED_MILLIS = 1000;

    /** A task that is repeated after a failure. */
    interface Task {
        String name();

        void run() throws Exception;
    }

    private final Task feed;
    private final Task heartbeats;
    private final Task sweep;
    private final Task unanswered;
    private ScheduledExecutorService threads;

    Background(Task feed, Task heartbeats, Task sweep, Task unanswered) {
        this.feed = feed;
        this.heartbeats = heartbeats;
        this.sweep = sweep;
        this.unanswered = unanswered;
    }

    void start() {
        threads = Executors.newScheduledThreadPool(4, work -> {
            Thread thread = new Thread(work, "linkis-rm-background");
            thread.setDaemon(true);
            return thread;
        });
        every(feed, FEED_MILLIS);
        every(heartbeats, HEARTBEATS_MILLIS);
        every(sweep, SWEEP_MILLIS);
        every(unanswered, UNANSWERED_MILLIS);
    }

    void stop() {
        if (threads != null) {
            threads.shutdownNow();
        }
    }

    private void every(Task task, long millis) {
        threads.scheduleWithFixedDelay(() -> {
            try {
                task.run();
            } catch (Throwable e) {
                // Catches every exception: a thrown one would end the thread.
                LOG.warn("linkis-rm: {} is retried: {}", task.name(), e.toString());
            }
        }, 0, millis, TimeUnit.MILLISECONDS);
    }
}
