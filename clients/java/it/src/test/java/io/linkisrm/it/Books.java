package io.linkisrm.it;

import io.linkisrm.client.LinkisRmClient;
import java.sql.Connection;
import java.sql.ResultSet;
import java.sql.SQLException;
import java.sql.Statement;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.TreeSet;
import javax.sql.DataSource;
import linkis.rm.v1.EmResource;
import linkis.rm.v1.ListEmsRequest;
import linkis.rm.v1.ListTicketsRequest;
import linkis.rm.v1.ListTicketsResponse;
import linkis.rm.v1.LoadInstanceResource;
import linkis.rm.v1.Resource;
import linkis.rm.v1.Ticket;
import linkis.rm.v1.UsageServiceGrpc;

/** Use by the service's tickets and by Linkis's tables, in the same text form, to be compared. */
final class Books {
    private Books() {}

    /** Memory, cores and instances of a driver, and memory and cores on a queue: used, then locked. */
    private static String text(long[] amounts) {
        return java.util.Arrays.toString(amounts);
    }

    /** Computed from the tickets alone, without counters, for ECMs whose names have this prefix. */
    static Map<String, String> byTickets(LinkisRmClient client, String hosts) {
        Map<String, long[]> sums = new TreeMap<>();
        TreeSet<String> tickets = new TreeSet<>();
        for (EmResource em : client.call(UsageServiceGrpc.getListEmsMethod(), ListEmsRequest.newBuilder().setPageSize(1000).build()).getEmsList()) {
            if (em.getEm().getInstance().startsWith(hosts)) {
                sums.put("host " + em.getEm().getInstance(), new long[10]);
            }
        }
        for (Ticket ticket : tickets(client, hosts)) {
            boolean used = ticket.getState().equals("used");
            Resource held = used ? ticket.getUsed() : ticket.getLocked();
            LoadInstanceResource driver = held.hasDriverAndYarn() ? held.getDriverAndYarn().getLoadInstance() : held.getLoadInstance();
            int from = used ? 0 : 5;
            long[] host = sums.computeIfAbsent("host " + ticket.getEm().getInstance(), key -> new long[10]);
            long[] user = sums.computeIfAbsent(
                    "user " + ticket.getUser() + "-" + ticket.getCreator() + "," + ticket.getEngineType(), key -> new long[10]);
            for (long[] sum : new long[][] {host, user}) {
                sum[from] += driver.getMemory();
                sum[from + 1] += driver.getCores();
                sum[from + 2] += driver.getInstances();
            }
            user[from + 3] += held.getDriverAndYarn().getYarn().getQueueMemory();
            user[from + 4] += held.getDriverAndYarn().getYarn().getQueueCores();
            tickets.add(ticket.getTicketId() + " " + ticket.getState());
        }
        return told(sums, tickets);
    }

    /** Read from the rows of Linkis's console. */
    static Map<String, String> byTables(DataSource source) throws SQLException {
        Map<String, long[]> sums = new TreeMap<>();
        TreeSet<String> tickets = new TreeSet<>();
        try (Connection connection = source.getConnection(); Statement statement = connection.createStatement();
                ResultSet rows = statement.executeQuery("SELECT l.label_key, l.label_value, r.ticketId, r.used_resource, r.locked_resource,"
                        + " r.creator FROM linkis_cg_manager_linkis_resources r JOIN linkis_cg_manager_label_resource lr"
                        + " ON lr.resource_id = r.id JOIN linkis_cg_manager_label l ON l.id = lr.label_id")) {
            while (rows.next()) {
                if (rows.getString(1).equals("engineInstance")) {
                    tickets.add(rows.getString(3) + " " + (rows.getString(4) == null ? "locked" : "used"));
                    continue;
                }
                boolean host = rows.getString(1).equals("emInstance");
                String name = host ? "host " + rows.getString(2).replaceAll(".*\"instance\":\"([^\"]*)\".*", "$1") : "user " + rows.getString(6);
                long[] amounts = new long[10];
                read(rows.getString(4), amounts, 0);
                read(rows.getString(5), amounts, 5);
                sums.put(name, amounts);
            }
        }
        return told(sums, tickets);
    }

    /** The live tickets on ECMs whose names have this prefix. */
    static List<Ticket> tickets(LinkisRmClient client, String hosts) {
        List<Ticket> all = new ArrayList<>();
        ListTicketsRequest.Builder request = ListTicketsRequest.newBuilder().setPageSize(1000);
        do {
            ListTicketsResponse page = client.call(UsageServiceGrpc.getListTicketsMethod(), request.build());
            all.addAll(page.getTicketsList());
            request.setPageToken(page.getNextPageToken());
        } while (!request.getPageToken().isEmpty());
        all.removeIf(ticket -> !ticket.getEm().getInstance().startsWith(hosts));
        return all;
    }

    private static Map<String, String> told(Map<String, long[]> sums, TreeSet<String> tickets) {
        Map<String, String> told = new HashMap<>();
        sums.forEach((name, amounts) -> {
            // A user without use may have a row or none.
            if (name.startsWith("host") || java.util.Arrays.stream(amounts).anyMatch(amount -> amount != 0)) {
                told.put(name, text(amounts));
            }
        });
        told.put("tickets", tickets.toString());
        return new TreeMap<>(told);
    }

    private static void read(String json, long[] amounts, int from) {
        String[] names = {"memory", "cores", "instances", "queueMemory", "queueCores"};
        for (int i = 0; i < names.length; i++) {
            java.util.regex.Matcher found = java.util.regex.Pattern.compile("\"" + names[i] + "\":(-?\\d+)").matcher(json);
            amounts[from + i] = found.find() ? Long.parseLong(found.group(1)) : 0;
        }
    }
}
