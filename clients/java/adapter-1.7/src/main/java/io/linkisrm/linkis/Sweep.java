package io.linkisrm.linkis;

import io.linkisrm.client.ServiceException;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import linkis.rm.v1.Ticket;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/**
 * Finds and repairs wrong rows of engines that the other parts have missed. An engine without a node has ended, and its ticket was not
 * released, because the service was away or the manager died. An engine whose ticket has ended was missed. An engine that only the service
 * has as used was confirmed by a manager that died before writing it. A row is repaired when it is found twice in a row, because another
 * manager may be about to write it. Every ten minutes, all rows of ECMs and users are compared, which repairs rows that other programs
 * wrote, such as the console's reset.
 */
final class Sweep implements Background.Task {
    private static final Logger LOG = LoggerFactory.getLogger(Sweep.class);
    /** Number of runs between comparisons of all rows: ten minutes. */
    private static final int RUNS_UNTIL_ALL = 40;

    private final Service service;
    private final Tables tables;
    private final Engines engines;
    private final Mirror mirror;
    private Set<String> suspects = new HashSet<>();
    private int runs;

    Sweep(Service service, Tables tables, Engines engines, Mirror mirror) {
        this.service = service;
        this.tables = tables;
        this.engines = engines;
        this.mirror = mirror;
    }

    @Override
    public String name() {
        return "sweep";
    }

    @Override
    public void run() throws Exception {
        if (++runs % RUNS_UNTIL_ALL == 0) {
            mirror.changed(tables.mirrored());
        }
        Map<String, Ticket> found = new HashMap<>();
        long id = 0;
        for (List<Tables.Engine> some = tables.enginesBehind(id); !some.isEmpty(); some = tables.enginesBehind(id)) {
            id = some.get(some.size() - 1).id;
            some.removeIf(engine -> !Service.isTicket(engine.ticket));
            if (some.isEmpty()) {
                continue;
            }
            List<String> tickets = new ArrayList<>();
            for (Tables.Engine engine : some) {
                tickets.add(engine.ticket);
            }
            Map<String, Ticket> live = service.tickets(tickets);
            Set<String> withNode = tables.withNode(tickets);
            for (Tables.Engine engine : some) {
                Ticket ticket = live.get(engine.ticket);
                boolean behind = ticket != null && ticket.hasUsed() && !engine.used;
                if (ticket == null || behind || !withNode.contains(engine.ticket)) {
                    found.put(engine.ticket, behind && withNode.contains(engine.ticket) ? ticket : null);
                }
            }
        }
        for (Map.Entry<String, Ticket> one : found.entrySet()) {
            if (suspects.contains(one.getKey())) {
                try {
                    repair(one.getKey(), one.getValue());
                } catch (ServiceException | InterruptedException e) {
                    throw e;
                } catch (Exception e) {
                    // Catches every exception, so that one engine does not delay the others.
                    LOG.warn("linkis-rm: the rows of {} are kept and retried later: {}", one.getKey(), e.toString());
                }
            }
        }
        suspects = new HashSet<>(found.keySet());
    }

    /** @param used the ticket, if its engine lives and is used; otherwise null */
    private void repair(String ticket, Ticket used) throws Exception {
        if (used != null) {
            engines.used(ticket, Amounts.application(Amounts.read(used.getUsed())));
        } else {
            // An ended ticket needs no release.
            service.released(ticket);
            engines.ended(ticket, "found by the way");
        }
    }
}
