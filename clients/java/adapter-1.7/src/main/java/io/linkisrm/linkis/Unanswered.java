package io.linkisrm.linkis;

import io.linkisrm.client.ServiceException;
import java.time.Duration;
import java.util.ArrayDeque;
import linkis.rm.v1.RequestResourceRequest;
import linkis.rm.v1.RequestResourceResponse;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/**
 * Requests whose reply was lost: Linkis requests anew under another id. Each request is repeated under its own id, and a grant is released.
 * The repetition ends with a reply, or after the lifetime of an unused grant, when there is no grant any more. Such grants of a manager
 * that ends expire, too.
 */
final class Unanswered implements Background.Task {
    private static final Logger LOG = LoggerFactory.getLogger(Unanswered.class);
    /** Maximum number of requests: more than Linkis sends while a service is replaced. Older ones expire automatically. */
    private static final int KEPT = 1000;
    private static final Duration WITHIN = Duration.ofSeconds(5);
    /** Lifetime of requests without a lifetime of their grant. */
    private static final long KEPT_SECONDS = 600;

    private static final class One {
        private final RequestResourceRequest request;
        private final long end;

        private One(RequestResourceRequest request) {
            // The repetition does not wait, and still is the same request.
            this.request = request.toBuilder().clearWaitTimeout().build();
            long seconds = request.hasLockTtl() ? request.getLockTtl().getSeconds() + 1 : KEPT_SECONDS;
            this.end = System.nanoTime() + Duration.ofSeconds(seconds).toNanos();
        }
    }

    private final Service service;
    /** Guarded by this. */
    private final ArrayDeque<One> requests = new ArrayDeque<>();

    Unanswered(Service service) {
        this.service = service;
    }

    @Override
    public String name() {
        return "the release of grants without a received reply";
    }

    /** Adds a request with an id. */
    synchronized void add(RequestResourceRequest request) {
        if (requests.size() == KEPT) {
            requests.removeFirst();
        }
        requests.addLast(new One(request));
    }

    private synchronized One take() {
        return requests.pollFirst();
    }

    private synchronized void keep(One one) {
        requests.addLast(one);
    }

    @Override
    public void run() {
        for (One one = take(); one != null; one = take()) {
            if (one.end - System.nanoTime() < 0) {
                continue;
            }
            try {
                giveBack(one.request);
            } catch (ServiceException e) {
                if (Failures.mayPass(e)) {
                    keep(one);
                    throw e;
                }
                // The request was refused, or its ticket has ended already.
            }
        }
    }

    private void giveBack(RequestResourceRequest request) {
        RequestResourceResponse answer = service.request(request, WITHIN);
        if (answer.hasAvailable()) {
            service.released(answer.getAvailable().getTicketId());
            LOG.info("linkis-rm: {} is released: its grant reply was not received", answer.getAvailable().getTicketId());
        }
    }
}
