package io.linkisrm.linkis;

import java.util.Collections;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.Set;
import linkis.rm.v1.Action;

/**
 * What this manager did itself and has shown: when the feed tells of it, its rows need not be written again. Only of what happens to a
 * ticket once. What is forgotten, because much else came after it, costs a look.
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

    /** This was done to a ticket, and the rows that it changes have been written since. */
    synchronized void shown(String ticket, String action) {
        shown.add(key(ticket, action));
    }

    /** Whether a line tells of something that is shown; of which it is then forgotten. */
    synchronized boolean take(Action line) {
        return shown.remove(key(line.getTicketId(), line.getAction()));
    }

    private static String key(String ticket, String action) {
        return action + " " + ticket;
    }
}
