package io.linkisrm.linkis;

import io.grpc.Status;
import io.linkisrm.client.Messages;
import io.linkisrm.client.ServiceException;
import java.time.Duration;
import java.util.Arrays;
import java.util.Collections;
import java.util.HashSet;
import java.util.List;
import java.util.Set;
import linkis.rm.v1.Action;
import linkis.rm.v1.FollowActionsResponse;
import org.apache.linkis.common.ServiceInstance;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/**
 * Follows all changes in the service: by other managers, by operators, by time. From the stored position on, every change is processed at
 * least once and none is skipped. A position is stored only when all changes before it are in the tables. Without a valid position, all
 * rows are compared once.
 */
final class Feed implements Background.Task {
    private static final Logger LOG = LoggerFactory.getLogger(Feed.class);
    /** Silence after which the connection counts as lost: the service sends a message at least every five seconds. */
    private static final Duration SILENT_MAX = Duration.ofSeconds(30);

    /** Ends of tickets that the engine's manager did not report. */
    private static final Set<String> ENDED =
            Collections.unmodifiableSet(new HashSet<>(Arrays.asList("expired", "lost", "forced", "unregistered")));

    private final Service service;
    private final Tables tables;
    private final Mirror mirror;
    private final Engines engines;
    private final Own own;
    private final Position position;
    /** A position that is stored when the mirror has written all rows up to a mark; null without one. */
    private String next;
    private long mark;

    Feed(Service service, Tables tables, Mirror mirror, Engines engines, Own own, Position position) {
        this.service = service;
        this.tables = tables;
        this.mirror = mirror;
        this.engines = engines;
        this.own = own;
        this.position = position;
    }

    @Override
    public String name() {
        return "feed";
    }

    /** Runs until it fails, and is then started again. */
    @Override
    public void run() throws Exception {
        String from = position.kept();
        next = null;
        try (Messages<FollowActionsResponse> feed = service.follow(from)) {
            FollowActionsResponse told = feed.next(SILENT_MAX);
            if (from.isEmpty()) {
                LOG.info("linkis-rm: no position is stored, so all tickets are checked");
                mirror.changed(tables.mirrored());
            }
            while (true) {
                heard(told.getActionsList());
                keep(told.getPosition());
                told = feed.next(SILENT_MAX);
            }
        } catch (InterruptedException e) {
            // The manager stops.
            Thread.currentThread().interrupt();
        } catch (ServiceException e) {
            if (e.code() != Status.Code.OUT_OF_RANGE) {
                throw e;
            }
            LOG.warn("linkis-rm: the actions after {} are no longer available: {}", from, e.getMessage());
            position.forget();
        }
    }

    private void keep(String told) throws Exception {
        if (next == null) {
            next = told;
            mark = mirror.lastMark();
        }
        if (mirror.hasShown(mark)) {
            position.keep(next);
            next = null;
        }
    }

    private void heard(List<Action> lines) throws Exception {
        Set<Object> rows = new HashSet<>();
        for (Action line : lines) {
            if (own.take(line)) {
                continue;
            }
            if (ENDED.contains(line.getAction())) {
                ended(line);
            }
            if (!line.getEm().getInstance().isEmpty()) {
                ServiceInstance ecm = new ServiceInstance();
                ecm.setApplicationName(line.getEm().getApplicationName());
                ecm.setInstance(line.getEm().getInstance());
                rows.add(ecm);
            }
            if (!line.getTicketId().isEmpty()) {
                rows.addAll(scopesOf(line));
            } else if (line.getScopeMap().keySet().containsAll(Caps.LABELS)) {
                rows.add(new Scope(line.getScopeOrThrow("user"), line.getScopeOrThrow("creator"), line.getScopeOrThrow("engine_type")));
            }
        }
        mirror.changed(rows);
    }

    /** If the change cannot be written now, or is invalid for Linkis, the row stays for Sweep, and later changes are not delayed. */
    private void ended(Action line) throws Exception {
        try {
            engines.ended(line.getTicketId(), line.getAction());
        } catch (InterruptedException e) {
            throw e;
        } catch (Exception e) {
            LOG.warn("linkis-rm: the rows of {} are kept and retried later: {}", line.getTicketId(), e.toString());
        }
    }

    /** Scopes of a ticket. A line without all labels, as of older releases, may concern all scopes of its user. */
    private Set<Scope> scopesOf(Action line) throws Exception {
        return line.getCreator().isEmpty() ? tables.scopes(line.getUser())
                : Collections.singleton(new Scope(line.getUser(), line.getCreator(), line.getEngineType()));
    }
}
