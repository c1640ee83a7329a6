package io.linkisrm.client;

import io.grpc.MethodDescriptor;
import io.grpc.Status;
import java.time.Duration;
import java.util.Arrays;
import java.util.Collections;
import java.util.HashSet;
import java.util.Set;
import java.util.concurrent.ThreadLocalRandom;

/** Rules for repeating calls after errors. */
final class Repetition {
    private static final long PAUSE_MILLIS_MIN = 100;
    private static final long PAUSE_MILLIS_MAX = 2000;

    /** Calls whose repetition has another effect or another reply. */
    private static final Set<String> ONCE = Collections.unmodifiableSet(new HashSet<>(Arrays.asList(
            "linkis.rm.v1.ResourceManagerService/Unregister",
            "linkis.rm.v1.LimitService/DeleteLimit",
            "linkis.rm.v1.LimitService/DeletePriority",
            "linkis.rm.v1.LimitService/DeleteReclaimPolicy",
            "linkis.rm.v1.LimitService/ReplaceLimits",
            "linkis.rm.v1.AdminService/Repair",
            "linkis.rm.v1.AdminService/Resume",
            "linkis.rm.v1.AdminService/ReleaseHold",
            "linkis.rm.v1.ExternalResourceService/PutProvider",
            "linkis.rm.v1.ExternalResourceService/DeleteProvider")));

    private Repetition() {}

    /** The pause before the next attempt; null for no further attempt. */
    static Duration pause(MethodDescriptor<?, ?> method, ServiceException error, int tries) {
        if (error.retryAfter() != null && !(error.is("COMMIT_UNKNOWN") && isOnce(method))) {
            Duration own = backoff(tries);
            return own.compareTo(error.retryAfter()) > 0 ? own : error.retryAfter();
        }
        if (error.code() == Status.Code.UNAVAILABLE && !isOnce(method)) {
            return backoff(tries);
        }
        return null;
    }

    private static boolean isOnce(MethodDescriptor<?, ?> method) {
        return ONCE.contains(method.getFullMethodName());
    }

    /** Doubles, with a random part, so that interrupted clients do not return at the same time. */
    private static Duration backoff(int tries) {
        long ceiling = Math.min(PAUSE_MILLIS_MAX, PAUSE_MILLIS_MIN << Math.min(tries, 10));
        return Duration.ofMillis(ThreadLocalRandom.current().nextLong(ceiling / 2, ceiling + 1));
    }
}
