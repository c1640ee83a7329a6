package io.linkisrm.linkis;

import java.sql.Connection;
import java.sql.PreparedStatement;
import java.sql.ResultSet;
import java.sql.SQLException;
import java.sql.Statement;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collection;
import java.util.Collections;
import java.util.HashSet;
import java.util.List;
import java.util.Set;
import java.util.concurrent.Callable;
import javax.sql.DataSource;
import org.apache.linkis.manager.common.entity.enumeration.NodeStatus;

/** Reads of Linkis's tables for which Linkis has no call, and locks among managers. */
final class Tables {
    /** Maximum number of rows in one query. */
    static final int CHUNK = 500;
    private static final int TURN_SECONDS = 10;
    /** Longer than any work under a lock. */
    private static final int SILENT_SECONDS = 60;

    private final DataSource database;

    Tables(DataSource database) {
        this.database = database;
    }

    /** An ECM with its last heartbeat in Linkis. */
    static final class Ecm {
        final String instance;
        /** Time of its last heartbeat, in seconds; 0 without one. */
        final long heartbeat;
        /** Its health, as Linkis stores it; may be null. */
        final String health;
        /** Its load, as Linkis stores it; may be null. */
        final String load;

        Ecm(String instance, long heartbeat, String health, String load) {
            this.instance = instance;
            this.heartbeat = heartbeat;
            this.health = health;
            this.load = load;
        }
    }

    /** An engine with a row. */
    static final class Engine {
        final long id;
        final String ticket;
        /** Whether it is confirmed. */
        final boolean used;

        Engine(long id, String ticket, boolean used) {
            this.id = id;
            this.ticket = ticket;
            this.used = used;
        }
    }

    /** An engine that Linkis has as a node on an ECM. */
    static final class EngineNode {
        final String ticket;
        /** Whether it runs no task and no user has locked it, by its last heartbeat in Linkis. */
        final boolean idle;

        EngineNode(String ticket, boolean idle) {
            this.ticket = ticket;
            this.idle = idle;
        }
    }

    /**
     * Runs work under a lock of this name among all managers. The lock is the database's and ends with the connection, also after a crash,
     * and after a minute of silence of the machine.
     *
     * @throws SQLException if the lock is not acquired, or ended before the work
     */
    <T> T inTurn(String name, Callable<T> work) throws Exception {
        // A lock name has at most 64 characters.
        String lock = "linkis-rm:" + Integer.toHexString(name.hashCode()) + ":" + (name.length() > 40 ? name.substring(name.length() - 40) : name);
        boolean interrupted = false;
        try (Connection connection = database.getConnection()) {
            long silent = number(connection, "SELECT @@SESSION.wait_timeout");
            try {
                // A database does not detect a machine without power, and would keep the lock for the hours of its read timeout.
                silentFor(connection, Math.min(SILENT_SECONDS, silent));
                if (number(connection, "SELECT GET_LOCK(?, " + TURN_SECONDS + ")", lock) != 1) {
                    throw new SQLException("another manager is busy with " + name + " for more than " + TURN_SECONDS + " s");
                }
                return work.call();
            } finally {
                // Also if the reply of an acquired lock was lost. An interrupted thread releases the lock like any other.
                interrupted = Thread.interrupted();
                giveBack(connection, lock, silent);
            }
        } finally {
            if (interrupted) {
                Thread.currentThread().interrupt();
            }
        }
    }

    private static void giveBack(Connection connection, String lock, long silent) throws SQLException {
        boolean given = false;
        try {
            number(connection, "SELECT RELEASE_LOCK(?)", lock);
            silentFor(connection, silent);
            given = true;
        } finally {
            if (!given) {
                // The pool would keep the connection, and with it the lock.
                connection.abort(Runnable::run);
            }
        }
    }

    /** Sets the number of seconds of silence after which the database ends a connection. */
    private static void silentFor(Connection connection, long seconds) throws SQLException {
        try (Statement statement = connection.createStatement()) {
            statement.execute("SET SESSION wait_timeout = " + seconds);
        }
    }

    /** All ECMs of Linkis with this application that have a name. */
    List<Ecm> ecms(String application) throws SQLException {
        return rows("SELECT s.instance, COALESCE(UNIX_TIMESTAMP(m.update_time), 0), m.healthy_status, m.overload"
                        + " FROM linkis_cg_manager_service_instance s"
                        + " LEFT JOIN linkis_cg_manager_service_instance_metrics m ON m.instance = s.instance WHERE s.name = ? AND s.instance <> ''",
                row -> new Ecm(row.getString(1), row.getLong(2), row.getString(3), row.getString(4)), application);
    }

    /** Linkis's engines on an ECM that have tickets. */
    List<EngineNode> enginesOn(String ecmInstance) throws SQLException {
        return rows("SELECT s.ticketId, COALESCE(m.instance_status = " + NodeStatus.Unlock.ordinal() + ", FALSE)"
                + " FROM linkis_cg_manager_engine_em e"
                + " JOIN linkis_cg_manager_service_instance s ON s.instance = e.engine_instance"
                + " LEFT JOIN linkis_cg_manager_service_instance_metrics m ON m.instance = s.instance"
                + " WHERE e.em_instance = ? AND s.ticketId IS NOT NULL",
                row -> new EngineNode(row.getString(1), row.getBoolean(2)), ecmInstance);
    }

    /** The next engines with a row, after this id. */
    List<Engine> enginesBehind(long id) throws SQLException {
        return rows("SELECT id, ticketId, used_resource IS NOT NULL FROM linkis_cg_manager_linkis_resources"
                + " WHERE ticketId IS NOT NULL AND id > ? ORDER BY id LIMIT " + CHUNK,
                row -> new Engine(row.getLong(1), row.getString(2), row.getBoolean(3)), id);
    }

    /** The tickets whose engine Linkis has as a node. */
    Set<String> withNode(Collection<String> tickets) throws SQLException {
        return tickets.isEmpty() ? Collections.<String>emptySet()
                : new HashSet<>(rows("SELECT ticketId FROM linkis_cg_manager_service_instance WHERE ticketId IN " + marks(tickets),
                        row -> row.getString(1), tickets.toArray()));
    }

    /** Linkis's instance for a ticket; null without one. */
    String instanceOf(String ticket) throws SQLException {
        List<String> found = rows("SELECT instance FROM linkis_cg_manager_service_instance WHERE ticketId = ?", row -> row.getString(1), ticket);
        return found.isEmpty() ? null : found.get(0);
    }

    /** Whether Linkis has an ECM or an engine with this name. */
    boolean isNode(String instance) throws SQLException {
        return !rows("SELECT 1 FROM linkis_cg_manager_service_instance WHERE instance = ?", row -> row.getInt(1), instance).isEmpty();
    }

    /** All rows that the mirror writes. */
    Set<Object> mirrored() throws SQLException {
        Set<Object> rows = new HashSet<>(scopes(null));
        for (Ecm ecm : ecms(Heartbeats.application())) {
            rows.add(Heartbeats.instance(ecm));
        }
        return rows;
    }

    /** All scopes with a row of their own; of one user, or of all if it is null. */
    Set<Scope> scopes(String user) throws SQLException {
        List<Scope> found = rows("SELECT r.creator FROM linkis_cg_manager_label l JOIN linkis_cg_manager_label_resource lr ON lr.label_id = l.id"
                        + " JOIN linkis_cg_manager_linkis_resources r ON r.id = lr.resource_id"
                        + " WHERE l.label_key = 'combined_userCreator_engineType'",
                row -> Scope.parse(row.getString(1)));
        Set<Scope> scopes = new HashSet<>();
        for (Scope scope : found) {
            if (scope != null && (user == null || scope.user.equals(user))) {
                scopes.add(scope);
            }
        }
        return scopes;
    }

    private interface Reader<T> {
        T read(ResultSet row) throws SQLException;
    }

    private <T> List<T> rows(String sql, Reader<T> reader, Object... values) throws SQLException {
        try (Connection connection = database.getConnection(); PreparedStatement statement = connection.prepareStatement(sql)) {
            for (int i = 0; i < values.length; i++) {
                statement.setObject(i + 1, values[i]);
            }
            List<T> found = new ArrayList<>();
            try (ResultSet rows = statement.executeQuery()) {
                while (rows.next()) {
                    found.add(reader.read(rows));
                }
            }
            return found;
        }
    }

    private static long number(Connection connection, String sql, String... values) throws SQLException {
        try (PreparedStatement statement = connection.prepareStatement(sql)) {
            for (int i = 0; i < values.length; i++) {
                statement.setString(i + 1, values[i]);
            }
            try (ResultSet row = statement.executeQuery()) {
                return row.next() ? row.getLong(1) : 0;
            }
        }
    }

    private static String marks(Collection<?> values) {
        String[] marks = new String[values.size()];
        Arrays.fill(marks, "?");
        return "(" + String.join(",", marks) + ")";
    }
}
