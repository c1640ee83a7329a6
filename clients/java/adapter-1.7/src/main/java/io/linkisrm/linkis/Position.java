package io.linkisrm.linkis;

import java.sql.Connection;
import java.sql.PreparedStatement;
import java.sql.ResultSet;
import java.sql.SQLException;
import java.sql.Statement;
import javax.sql.DataSource;

/**
 * Position of the feed up to which Linkis's tables are current. It is stored beside them, in the only table that the adapter adds: it
 * survives managers, and is restored from a backup with the tables. All managers of a Linkis share it.
 */
final class Position {
    private static final String MADE = "CREATE TABLE IF NOT EXISTS linkis_rm_position (id INT NOT NULL PRIMARY KEY,"
            + " position VARCHAR(64) NOT NULL, update_time DATETIME NOT NULL)";

    private final DataSource database;
    /** Last position that this manager wrote. */
    private String last = "";

    /** @throws SettingException if the table does not exist and may not be created */
    Position(DataSource database) {
        this.database = database;
        try {
            if (!exists()) {
                change(MADE);
            }
        } catch (SQLException e) {
            throw SettingException.ofDatabase("the table linkis_rm_position cannot be created: " + e.getMessage()
                    + ". Create it with an account that may: " + MADE, e);
        }
    }

    /** The position to resume at; empty without one. */
    String kept() throws SQLException {
        try (Connection connection = database.getConnection(); Statement statement = connection.createStatement();
                ResultSet row = statement.executeQuery("SELECT position FROM linkis_rm_position WHERE id = 1")) {
            return row.next() ? row.getString(1) : "";
        }
    }

    /** Stores a position. All changes before it are in the tables. */
    void keep(String position) throws SQLException {
        if (!position.equals(last)) {
            change("REPLACE INTO linkis_rm_position (id, position, update_time) VALUES (1, ?, NOW())", position);
            last = position;
        }
    }

    /** Deletes the position. */
    void forget() throws SQLException {
        change("DELETE FROM linkis_rm_position");
        last = "";
    }

    private boolean exists() throws SQLException {
        try (Connection connection = database.getConnection();
                ResultSet found = connection.getMetaData().getTables(connection.getCatalog(), null, "linkis_rm_position", null)) {
            return found.next();
        }
    }

    private void change(String sql, String... values) throws SQLException {
        try (Connection connection = database.getConnection(); PreparedStatement statement = connection.prepareStatement(sql)) {
            for (int i = 0; i < values.length; i++) {
                statement.setString(i + 1, values[i]);
            }
            statement.executeUpdate();
        }
    }
}
