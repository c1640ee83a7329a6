package io.linkisrm.linkis;

import io.linkisrm.client.ServiceException;
import java.time.Duration;
import java.util.ArrayDeque;
import linkis.rm.v1.RequestResourceRequest;
import linkis.rm.v1.RequestResourceResponse;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/**
 * Requests that were sent, and of which nobody said whether they were granted: Linkis has given them up, and asks anew under another id. Each
 * is asked again under its own, and what it is granted is given back. Until somebody answers, and no longer than a grant that nobody uses
 * stays locked: after that there is none. So it is, too, with those of a manager that ends.
 */
final class Unanswered implements Background.Task {
    private static final Logger LOG = LoggerFactory.getLogger(Unanswered.class);
    /** How many there may be: more than Linkis asks for while a service is exchanged. Of more, the oldest expire by themselves. */
    private static final int KEPT = 1000;
    private static final Duration WITHIN = Duration.ofSeconds(5);
    /** How long those are kept that do not say how long a grant may stay unused. */
    private static final long KEPT_SECONDS = 600;

    private static final class One {
        private final RequestResourceRequest request;
        private final long end;

        private One(RequestResourceRequest request) {
            // It waits in no line, and still is the same request.
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
        return "what was granted without an answer";
    }

    /** It has an id. */
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
                // It was refused, or it is over already.
            }
        }
    }

    private void giveBack(RequestResourceRequest request) {
        RequestResourceResponse answer = service.request(request, WITHIN);
        if (answer.hasAvailable()) {
            service.released(answer.getAvailable().getTicketId());
            LOG.info("linkis-rm: {} is given back: nobody was told of it", answer.getAvailable().getTicketId());
        }
    }
}
