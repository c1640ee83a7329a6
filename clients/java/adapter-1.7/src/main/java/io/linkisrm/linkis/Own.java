package io.linkisrm.linkis;

import java.util.Collections;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.Set;
import linkis.rm.v1.Action;

/**
 * Changes of this manager whose rows are written: the feed need not write them again. Only changes that happen to a ticket once. An evicted
 * entry, after many later ones, costs one more write.
 */
final class Own {
    private static final int KEPT = 10_000;

    private final Set<String> shown = Collections.newSetFromMap(new LinkedHashMap<String, Boolean>() {
        private static final long serialVersionUID = 1L;

        @Override
        protected boolean removeEldestEntry(Map.Entry<String, Boolean> eldest) {
            return size() > KEPT;
        }
    });

    /** Records that the rows of a ticket's change were written. */
    synchronized void shown(String ticket, String action) {
        shown.add(key(ticket, action));
    }

    /** Returns whether the rows of a history line are written, and removes the record. */
    synchronized boolean take(Action line) {
        return shown.remove(key(line.getTicketId(), line.getAction()));
    }

    private static String key(String ticket, String action) {
        return action + " " + ticket;
    }
}
