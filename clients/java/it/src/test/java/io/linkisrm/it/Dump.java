package io.linkisrm.it;

import java.sql.Connection;
import java.sql.ResultSet;
import java.sql.ResultSetMetaData;
import java.sql.SQLException;
import java.sql.Statement;
import java.util.ArrayList;
import java.util.Collections;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import javax.sql.DataSource;

/** Linkis's tables as text, without ids and times, and with tickets numbered in order of appearance. */
final class Dump {
    private static final Pattern TICKET = Pattern.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}");
    private static final String[] QUERIES = {
        "SELECT 'node', instance, name, owner, mark, identifier, ticketId, updator, creator FROM linkis_cg_manager_service_instance",
        "SELECT 'host', engine_instance, em_instance FROM linkis_cg_manager_engine_em",
        "SELECT 'label', label_key, label_value, label_feature, label_value_size FROM linkis_cg_manager_label",
        "SELECT 'label of', s.service_instance, l.label_key, l.label_value FROM linkis_cg_manager_label_service_instance s"
                + " JOIN linkis_cg_manager_label l ON l.id = s.label_id",
        "SELECT 'resource', l.label_key, l.label_value, r.resourceType, r.ticketId, r.max_resource, r.min_resource, r.used_resource,"
                + " r.left_resource, r.expected_resource, r.locked_resource, r.updator, r.creator FROM linkis_cg_manager_linkis_resources r"
                + " LEFT JOIN linkis_cg_manager_label_resource lr ON lr.resource_id = r.id"
                + " LEFT JOIN linkis_cg_manager_label l ON l.id = lr.label_id",
        "SELECT 'record', label_value, create_user, service_instance, ecm_instance, ticket_id, status, log_dir_suffix, request_times,"
                + " request_resource, used_times, used_resource, metrics, release_times, released_resource, used_time IS NULL,"
                + " release_time IS NULL FROM linkis_cg_ec_resource_info_record",
        "SELECT 'lock', lock_object FROM linkis_cg_manager_lock",
    };

    private final DataSource source;
    private final Map<String, String> tickets = new LinkedHashMap<>();

    Dump(DataSource source) {
        this.source = source;
    }

    List<String> all() throws SQLException {
        List<String> lines = new ArrayList<>();
        try (Connection connection = source.getConnection(); Statement statement = connection.createStatement()) {
            for (String query : QUERIES) {
                List<String> some = new ArrayList<>();
                try (ResultSet rows = statement.executeQuery(query)) {
                    ResultSetMetaData columns = rows.getMetaData();
                    while (rows.next()) {
                        StringBuilder line = new StringBuilder(rows.getString(1));
                        for (int i = 2; i <= columns.getColumnCount(); i++) {
                            line.append(" | ").append(columns.getColumnLabel(i)).append('=').append(rows.getString(i));
                        }
                        some.add(named(line.toString()));
                    }
                }
                Collections.sort(some);
                lines.addAll(some);
            }
        }
        return lines;
    }

    /** The text with tickets as T1, T2… and without dates. */
    String named(String text) {
        Matcher found = TICKET.matcher(text);
        StringBuilder named = new StringBuilder();
        while (found.find()) {
            found.appendReplacement(named, tickets.computeIfAbsent(found.group(), id -> "T" + (tickets.size() + 1)));
        }
        return found.appendTail(named).toString().replaceAll("\\b20\\d{6}\\b", "DAY")
                .replaceAll("\"(id|createTime|updateTime)\":(\\d+|null)", "\"$1\":0").replaceAll("\"startTime\":\"[^\"]*\"", "\"startTime\":0");
    }
}
