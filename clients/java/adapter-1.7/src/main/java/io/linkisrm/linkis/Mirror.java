package io.linkisrm.linkis;

import java.util.ArrayDeque;
import java.util.Arrays;
import java.util.HashMap;
import java.util.Map;
import java.util.concurrent.TimeUnit;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/**
 * Keeps the rows of ECMs and users in Linkis's console equal to the service. It does not count: a changed row is marked, and then written
 * anew from the current state of the service, under a lock among managers. So the order, number and origin of notifications do not matter,
 * and a row that changes often is written rarely.
 */
final class Mirror {
    private static final Logger LOG = LoggerFactory.getLogger(Mirror.class);
    private static final int WORKERS = 4;
    /** Maximum wait of a caller until the console shows its change. */
    private static final long WAIT_MILLIS = 5000;
    private static final long PAUSE_MILLIS = 500;

    /** Writes rows. */
    interface Writer {
        void write(Object row) throws Exception;
    }

    private static final class State {
        /** The last mark. */
        private long marked;
        /** The rows of all marks up to this one are written, except those of pending rows. */
        private long shown;
        private boolean queued;
        private int waiting;

        private State(long shown) {
            this.marked = shown;
            this.shown = shown;
        }
    }

    private final Writer writer;
    /** Rows that are marked and not yet written, or waited for. Guarded by this. */
    private final Map<Object, State> states = new HashMap<>();
    private final ArrayDeque<Object> queue = new ArrayDeque<>();
    private final Thread[] workers = new Thread[WORKERS];
    private long marks;
    private boolean stopped;

    Mirror(Writer writer) {
        this.writer = writer;
    }

    void start() {
        for (int i = 0; i < WORKERS; i++) {
            workers[i] = new Thread(this::work, "linkis-rm-mirror-" + i);
            workers[i].setDaemon(true);
            workers[i].start();
        }
    }

    synchronized void stop() {
        stopped = true;
        notifyAll();
        for (Thread worker : workers) {
            worker.interrupt();
        }
    }

    /** Marks rows as changed. A row is an ECM's {@code ServiceInstance}, or a {@link Scope}. */
    synchronized void changed(Iterable<?> rows) {
        for (Object row : rows) {
            mark(row);
        }
    }

    /** The last mark: {@link #hasShown} returns when all rows up to it are written. */
    synchronized long lastMark() {
        return marks;
    }

    /** Whether the rows of every mark up to this one are written. */
    synchronized boolean hasShown(long mark) {
        return states.values().stream().allMatch(state -> state.shown >= mark || state.shown >= state.marked);
    }

    /**
     * Marks rows as changed, and waits a few seconds at most until they are written. They are written in any case.
     *
     * @return whether they are written by now
     */
    synchronized boolean show(Object... rows) {
        long[] own = new long[rows.length];
        for (int i = 0; i < rows.length; i++) {
            own[i] = mark(rows[i]);
            states.get(rows[i]).waiting++;
        }
        long end = System.nanoTime() + TimeUnit.MILLISECONDS.toNanos(WAIT_MILLIS);
        try {
            for (long left = end - System.nanoTime(); left > 0 && !stopped && !shown(own, rows); left = end - System.nanoTime()) {
                wait(Math.max(1, TimeUnit.NANOSECONDS.toMillis(left)));
            }
        } catch (InterruptedException e) {
            Thread.currentThread().interrupt();
        }
        boolean shown = shown(own, rows);
        if (!shown) {
            LOG.warn("linkis-rm: the console will show the state of {} later", Arrays.toString(rows));
        }
        for (Object row : rows) {
            states.get(row).waiting--;
            forget(row);
        }
        return shown;
    }

    private boolean shown(long[] own, Object... rows) {
        for (int i = 0; i < rows.length; i++) {
            if (states.get(rows[i]).shown < own[i]) {
                return false;
            }
        }
        return true;
    }

    private long mark(Object row) {
        State state = states.computeIfAbsent(row, key -> new State(marks));
        if (state.shown >= state.marked) {
            // Until now there was no row to write.
            state.shown = marks;
        }
        state.marked = ++marks;
        if (!state.queued) {
            state.queued = true;
            queue.add(row);
            notifyAll();
        }
        return state.marked;
    }

    private void forget(Object row) {
        State state = states.get(row);
        if (state != null && state.waiting == 0 && !state.queued && state.shown >= state.marked) {
            states.remove(row);
        }
    }

    private void work() {
        while (true) {
            Object row;
            long mark;
            synchronized (this) {
                try {
                    while (queue.isEmpty() && !stopped) {
                        wait();
                    }
                } catch (InterruptedException e) {
                    return;
                }
                if (stopped) {
                    return;
                }
                row = queue.remove();
                mark = states.get(row).marked;
            }
            boolean written = write(row);
            synchronized (this) {
                State state = states.get(row);
                if (written) {
                    state.shown = mark;
                }
                state.queued = state.marked > state.shown;
                if (state.queued) {
                    queue.add(row);
                }
                forget(row);
                notifyAll();
            }
            if (!written && !pause()) {
                return;
            }
        }
    }

    private boolean write(Object row) {
        try {
            writer.write(row);
            return true;
        } catch (Throwable e) {
            // Catches every exception: the worker has other rows to write.
            LOG.warn("linkis-rm: the row of {} cannot be written now, and is retried: {}", row, e.toString());
            return false;
        }
    }

    private static boolean pause() {
        try {
            Thread.sleep(PAUSE_MILLIS);
            return true;
        } catch (InterruptedException e) {
            return false;
        }
    }
}
