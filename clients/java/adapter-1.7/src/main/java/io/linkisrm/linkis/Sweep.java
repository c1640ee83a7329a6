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
 * The net under all else: finds engines that have a row in Linkis and should not. One whose node is gone has ended, and its ticket was not
 * given back, because the service was away then or the manager died; one whose ticket is over has been missed; of one that is in use by
 * the service alone, the manager died when it should have written that. What is found twice in a row is dealt with: once may be somebody
 * who is about to. And once in a while, rows of hosts and users are compared that nothing has been heard of: what others write into them, as
 * the console does when it resets users, is put right.
 */
final class Sweep implements Background.Task {
    private static final Logger LOG = LoggerFactory.getLogger(Sweep.class);
    /** In how many runs the rows of hosts and users are compared once: ten minutes. */
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
                    // Whatever is wrong with one, the others do not wait for it.
                    LOG.warn("linkis-rm: the rows of {} stay for now: {}", one.getKey(), e.toString());
                }
            }
        }
        suspects = new HashSet<>(found.keySet());
    }

    /** @param used the ticket, if its engine lives and is in use; otherwise null */
    private void repair(String ticket, Ticket used) throws Exception {
        if (used != null) {
            engines.used(ticket, Amounts.application(Amounts.read(used.getUsed())));
        } else {
            // Of one that is over, nothing is given back.
            service.released(ticket);
            engines.ended(ticket, "found by the way");
        }
    }
}
