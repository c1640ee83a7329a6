package io.linkisrm.linkis;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;

import com.alibaba.druid.pool.DruidDataSource;
import io.linkisrm.it.MariaDb;
import java.lang.reflect.InvocationTargetException;
import java.lang.reflect.Proxy;
import java.sql.Connection;
import java.sql.ResultSet;
import java.sql.SQLException;
import java.sql.Statement;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.atomic.AtomicBoolean;
import java.util.concurrent.atomic.AtomicReference;
import javax.sql.DataSource;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.condition.EnabledIfEnvironmentVariable;

/** Locks among managers: no manager keeps one forever. */
class TurnsTest {
    @Test
    void a_turn_that_cannot_be_given_back_is_over_all_the_same() throws Exception {
        DruidDataSource pool = database("turns_given");
        AtomicBoolean failing = new AtomicBoolean(true);
        Tables unlucky = new Tables(without(pool, "SELECT RELEASE_LOCK(?)", failing));
        assertThrows(SQLException.class, () -> unlucky.inTurn("a", () -> "done"));
        failing.set(false);
        assertEquals("done", new Tables(MariaDb.get().source("turns_given")).inTurn("a", () -> "done"));
        assertEquals("done", unlucky.inTurn("a", () -> "done"), "the pool goes on");
        long[] silent = new long[2];
        for (int i = 0; i < 2; i++) {
            // The pool has only this one connection.
            silent[i] = silent(pool);
            unlucky.inTurn("a", () -> "done");
        }
        assertEquals(silent[0], silent[1], "what is set for a turn ends with it");
    }

    @Test
    @EnabledIfEnvironmentVariable(named = "LINKIS_IT", matches = "full")
    void who_is_not_heard_of_any_more_loses_his_turn() throws Exception {
        database("turns_silent");
        CountDownLatch here = new CountDownLatch(1);
        CountDownLatch end = new CountDownLatch(1);
        AtomicReference<Exception> told = new AtomicReference<>();
        Tables dead = new Tables(MariaDb.get().source("turns_silent"));
        Thread turn = new Thread(() -> {
            try {
                dead.inTurn("b", () -> {
                    here.countDown();
                    end.await();
                    return null;
                });
            } catch (Exception e) {
                told.set(e);
            }
        });
        turn.start();
        here.await();
        Tables other = new Tables(MariaDb.get().source("turns_silent"));
        assertThrows(SQLException.class, () -> other.inTurn("b", () -> "too early"));
        assertEquals("mine", sometime(other));
        end.countDown();
        turn.join();
        assertEquals(SQLException.class, told.get() instanceof SQLException ? SQLException.class : told.get(), "who comes back is told");
    }

    private static String sometime(Tables tables) throws Exception {
        for (int tries = 1; ; tries++) {
            try {
                return tables.inTurn("b", () -> "mine");
            } catch (SQLException e) {
                if (tries == 12) {
                    throw e;
                }
            }
        }
    }

    private static DruidDataSource database(String name) throws Exception {
        MariaDb.get().create(name);
        DruidDataSource pool = (DruidDataSource) MariaDb.get().source(name);
        pool.setMaxActive(1);
        return pool;
    }

    private static long silent(DataSource source) throws SQLException {
        try (Connection connection = source.getConnection(); Statement statement = connection.createStatement();
                ResultSet row = statement.executeQuery("SELECT @@SESSION.wait_timeout")) {
            row.next();
            return row.getLong(1);
        }
    }

    /** A data source whose given statement fails while the flag is set. */
    private static DataSource without(DataSource source, String statement, AtomicBoolean failing) {
        return (DataSource) Proxy.newProxyInstance(TurnsTest.class.getClassLoader(), new Class<?>[] {DataSource.class}, (proxy, method, values) -> {
            Connection connection = (Connection) method.invoke(source, values);
            return Proxy.newProxyInstance(TurnsTest.class.getClassLoader(), new Class<?>[] {Connection.class}, (self, called, with) -> {
                if (failing.get() && called.getName().equals("prepareStatement") && with[0].equals(statement)) {
                    throw new SQLException("it is not given back");
                }
                try {
                    return called.invoke(connection, with);
                } catch (InvocationTargetException e) {
                    throw e.getCause();
                }
            });
        });
    }
}
