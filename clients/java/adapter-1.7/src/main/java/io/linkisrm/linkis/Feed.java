package io.linkisrm.linkis;

import com.google.protobuf.Timestamp;
import io.linkisrm.client.ServiceException;
import io.grpc.Status;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.HashSet;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import linkis.rm.v1.Action;
import linkis.rm.v1.ListActionsRequest;
import linkis.rm.v1.ListActionsResponse;
import linkis.rm.v1.UsageServiceGrpc;
import org.apache.linkis.common.ServiceInstance;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/**
 * Follows what happens in the service, whoever did it: other managers, operators, time. The place is kept in memory alone: who begins
 * takes the place first and then looks at everything once, so nothing is missed; and hearing of something twice does no harm.
 */
final class Feed implements Background.Task {
    private static final Logger LOG = LoggerFactory.getLogger(Feed.class);
    private static final int PAGE = 1000;
    /** How far before the last line it begins: clocks are not asked. */
    private static final int OVERLAP_SECONDS = 10;

    /** How tickets end without their engine's manager having said so. */
    private static final Set<String> ENDED =
            Collections.unmodifiableSet(new HashSet<>(Arrays.asList("expired", "lost", "forced", "unregistered")));

    private final Service service;
    private final Tables tables;
    private final Mirror mirror;
    private final Engines engines;
    /** From where, and the token to go on with; null before the first look. */
    private ListActionsRequest next;

    Feed(Service service, Tables tables, Mirror mirror, Engines engines) {
        this.service = service;
        this.tables = tables;
        this.mirror = mirror;
        this.engines = engines;
    }

    @Override
    public String name() {
        return "feed";
    }

    @Override
    public void run() throws Exception {
        if (next == null) {
            ListActionsRequest first = beginning();
            everything();
            next = first;
        }
        ListActionsResponse page;
        do {
            try {
                page = service.client().call(UsageServiceGrpc.getListActionsMethod(), next);
            } catch (ServiceException e) {
                if (e.code() == Status.Code.INVALID_ARGUMENT || e.code() == Status.Code.OUT_OF_RANGE) {
                    LOG.warn("linkis-rm: the place in the history is lost, so everything is looked at again: {}", e.getMessage());
                    next = null;
                    return;
                }
                throw e;
            }
            heard(page.getActionsList());
            // Only now: what fails is heard again.
            next = next.toBuilder().setPageToken(page.getFollowToken()).build();
        } while (!page.getNextPageToken().isEmpty());
    }

    private ListActionsRequest beginning() {
        ListActionsRequest newest = ListActionsRequest.newBuilder().setNewestFirst(true).setPageSize(1).build();
        ListActionsRequest.Builder first = ListActionsRequest.newBuilder().setPageSize(PAGE);
        List<Action> last = service.client().call(UsageServiceGrpc.getListActionsMethod(), newest).getActionsList();
        if (!last.isEmpty()) {
            first.setFromTime(Timestamp.newBuilder().setSeconds(last.get(0).getActionTime().getSeconds() - OVERLAP_SECONDS));
        }
        return first.build();
    }

    private void everything() throws Exception {
        Set<Object> rows = new HashSet<>(tables.scopes(null));
        for (Tables.Ecm ecm : tables.ecms(Heartbeats.application())) {
            rows.add(Heartbeats.instance(ecm));
        }
        mirror.changed(rows);
    }

    private void heard(List<Action> actions) throws Exception {
        Set<Object> rows = new HashSet<>();
        Map<String, Action> tickets = new LinkedHashMap<>();
        for (Action action : actions) {
            if (action.hasEm() && !action.getEm().getInstance().isEmpty()) {
                ServiceInstance ecm = new ServiceInstance();
                ecm.setApplicationName(action.getEm().getApplicationName());
                ecm.setInstance(action.getEm().getInstance());
                rows.add(ecm);
            }
            if (!action.getTicketId().isEmpty()) {
                tickets.put(action.getTicketId(), action);
            }
            if (action.getScopeMap().keySet().containsAll(Caps.LABELS)) {
                rows.add(new Scope(action.getScopeOrThrow("user"), action.getScopeOrThrow("creator"), action.getScopeOrThrow("engine_type")));
            }
        }
        rows.addAll(scopesOf(tickets));
        for (Action action : tickets.values()) {
            if (ENDED.contains(action.getAction())) {
                engines.ended(action.getTicketId(), action.getAction());
            }
        }
        mirror.changed(rows);
    }

    /** What tickets are counted by: Linkis's record says it, also after their end; of what has none, all of its user's may be meant. */
    private Set<Scope> scopesOf(Map<String, Action> tickets) throws Exception {
        Set<Scope> scopes = new HashSet<>();
        List<String> ids = new ArrayList<>(tickets.keySet());
        Set<String> users = new HashSet<>();
        for (int from = 0; from < ids.size(); from += Tables.CHUNK) {
            List<String> some = ids.subList(from, Math.min(from + Tables.CHUNK, ids.size()));
            Map<String, Scope> found = tables.scopesOf(some);
            scopes.addAll(found.values());
            for (String id : some) {
                if (!found.containsKey(id)) {
                    users.add(tickets.get(id).getUser());
                }
            }
        }
        for (String user : users) {
            scopes.addAll(tables.scopes(user));
        }
        return scopes;
    }
}
