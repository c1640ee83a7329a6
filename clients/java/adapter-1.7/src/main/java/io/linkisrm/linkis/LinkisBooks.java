package io.linkisrm.linkis;

import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.IOException;
import java.sql.Connection;
import java.sql.PreparedStatement;
import java.sql.ResultSet;
import java.sql.SQLException;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import org.apache.linkis.manager.label.builder.factory.LabelBuilderFactoryContext;
import org.apache.linkis.manager.label.entity.Label;

/** The state in Linkis's tables: its ECMs with their capacity, and their engines. */
final class LinkisBooks {
    private static final ObjectMapper JSON = new ObjectMapper();

    private final Connection database;

    LinkisBooks(Connection database) {
        this.database = database;
    }

    /** An ECM with its capacity, as the JSON that Linkis stores. */
    static final class Host {
        final String application;
        final String instance;
        final String type;
        final String total;
        final String kept;
        final List<Label<?>> labels;

        private Host(String application, String instance, String type, String total, String kept, List<Label<?>> labels) {
            this.application = application;
            this.instance = instance;
            this.type = type;
            this.total = total;
            this.kept = kept;
            this.labels = labels;
        }
    }

    /** An engine with its use, as the JSON that Linkis stores. */
    static final class Engine {
        final String ticket;
        final String application;
        final String instance;
        final String hostApplication;
        /** Null if Linkis has no ECM for it. */
        final String host;
        /** Null if its user is not recorded. */
        final Scope scope;
        final String type;
        /** Null while it starts. */
        final String used;

        private Engine(ResultSet row) throws SQLException {
            ticket = row.getString("ticketId");
            application = row.getString("application");
            instance = row.getString("instance");
            hostApplication = row.getString("host_application");
            host = row.getString("host");
            scope = Scope.parse(row.getString("creator"));
            type = row.getString("resourceType");
            used = row.getString("used_resource");
        }
    }

    /** All ECMs with a resource, with their labels. */
    List<Host> hosts() throws SQLException {
        List<Host> hosts = new ArrayList<>();
        String sql = "SELECT s.name, s.instance, r.resourceType, r.max_resource, r.min_resource FROM linkis_cg_manager_linkis_resources r"
                + " JOIN linkis_cg_manager_label_resource lr ON lr.resource_id = r.id"
                + " JOIN linkis_cg_manager_label l ON l.id = lr.label_id AND l.label_key = 'emInstance'"
                + " JOIN linkis_cg_manager_label_service_instance ls ON ls.label_id = l.id"
                + " JOIN linkis_cg_manager_service_instance s ON s.instance = ls.service_instance"
                + " WHERE r.ticketId IS NULL AND s.ticketId IS NULL ORDER BY s.instance";
        try (PreparedStatement statement = database.prepareStatement(sql); ResultSet rows = statement.executeQuery()) {
            while (rows.next()) {
                hosts.add(new Host(rows.getString(1), rows.getString(2), rows.getString(3), rows.getString(4), rows.getString(5),
                        labels(rows.getString(2))));
            }
        }
        return hosts;
    }

    /** All engines that Linkis has as nodes with a resource. */
    List<Engine> engines() throws SQLException {
        List<Engine> engines = new ArrayList<>();
        String sql = "SELECT r.ticketId, s.name AS application, s.instance, h.name AS host_application, h.instance AS host, r.creator,"
                + " r.resourceType, r.used_resource FROM linkis_cg_manager_linkis_resources r"
                + " JOIN linkis_cg_manager_service_instance s ON s.ticketId = r.ticketId"
                + " LEFT JOIN linkis_cg_manager_engine_em e ON e.engine_instance = s.instance"
                + " LEFT JOIN linkis_cg_manager_service_instance h ON h.instance = e.em_instance"
                + " WHERE r.ticketId IS NOT NULL ORDER BY s.instance";
        try (PreparedStatement statement = database.prepareStatement(sql); ResultSet rows = statement.executeQuery()) {
            while (rows.next()) {
                engines.add(new Engine(rows));
            }
        }
        return engines;
    }

    private List<Label<?>> labels(String instance) throws SQLException {
        List<Label<?>> labels = new ArrayList<>();
        String sql = "SELECT l.label_key, l.label_value FROM linkis_cg_manager_label l"
                + " JOIN linkis_cg_manager_label_service_instance s ON s.label_id = l.id WHERE s.service_instance = ?";
        try (PreparedStatement statement = database.prepareStatement(sql)) {
            statement.setString(1, instance);
            try (ResultSet rows = statement.executeQuery()) {
                while (rows.next()) {
                    labels.add(label(rows.getString(1), rows.getString(2)));
                }
            }
        }
        return labels;
    }

    private static Label<?> label(String key, String value) {
        try {
            Object parts = value.startsWith("{") ? JSON.readValue(value, Map.class) : value;
            return LabelBuilderFactoryContext.getLabelBuilderFactory().createLabel(key, parts);
        } catch (IOException e) {
            throw new IllegalStateException("the label " + key + " has a value that is no JSON: " + value, e);
        }
    }
}
