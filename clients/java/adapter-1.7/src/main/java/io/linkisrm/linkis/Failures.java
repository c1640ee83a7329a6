package io.linkisrm.linkis;

import io.linkisrm.client.ServiceException;
import java.util.Arrays;
import java.util.Collections;
import java.util.List;
import org.apache.linkis.common.exception.LinkisRuntimeException;
import org.apache.linkis.manager.common.errorcode.ManagerCommonErrorCodeSummary;
import org.apache.linkis.manager.common.exception.RMErrorException;
import org.apache.linkis.manager.common.exception.RMWarnException;
import org.apache.linkis.manager.rm.exception.RMErrorCode;
import org.apache.linkis.manager.rm.exception.RMLockFailedRetryException;

/** Converts failures of the service to Linkis's exceptions and codes. */
final class Failures {
    private static final List<String> OF_HOSTS =
            Collections.unmodifiableList(Arrays.asList("EM_NOT_REGISTERED", "EM_DRAINING", "EM_RESERVED", "LABEL_REQUIRED"));

    private Failures() {}

    /**
     * A temporary failure becomes an error after which Linkis tries again with another request. {@link Unanswered} releases a grant of the
     * first request whose reply was lost.
     */
    static LinkisRuntimeException of(ServiceException error) {
        LinkisRuntimeException told;
        if (mayPass(error)) {
            told = new RMLockFailedRetryException(RMErrorCode.LOCK_LABEL_FAILED.getErrorCode(),
                    "The resource manager does not reply: please try again. A possible grant is released. " + error.getMessage());
        } else {
            told = new RMErrorException(RMErrorCode.LABEL_RESOURCE_NOT_FOUND.getErrorCode(), error.getMessage());
        }
        told.initCause(error);
        return told;
    }

    /** Whether a repetition of the call may succeed soon. */
    static boolean mayPass(ServiceException error) {
        switch (error.code()) {
            case UNAVAILABLE:
            case DEADLINE_EXCEEDED:
                return true;
            case RESOURCE_EXHAUSTED:
                return !"TOO_MANY_WAITING".equals(error.reason());
            case ABORTED:
                // An operator has removed the waiting request, or a later call waits in its place.
                return !"REMOVED_FROM_QUEUE".equals(error.reason()) && !"POSITION_TAKEN_OVER".equals(error.reason());
            default:
                return false;
        }
    }

    /** Whether the ECM does not match the request: not registered, drained, or reserved for other labels. */
    static boolean isOfHost(ServiceException error) {
        return OF_HOSTS.contains(error.reason());
    }

    /** Linkis's exception for an ECM without a resource. */
    static RMWarnException noHost(ServiceException error) {
        return new RMWarnException(ManagerCommonErrorCodeSummary.NO_RESOURCE_AVAILABLE.getErrorCode(), error.getMessage());
    }

    /** Linkis's exception for a missing object. */
    static RMErrorException notFound(String text) {
        return new RMErrorException(RMErrorCode.LABEL_RESOURCE_NOT_FOUND.getErrorCode(), text);
    }

    /** Whether there is no live ticket with that id. */
    static boolean isOver(ServiceException error) {
        return error.is("TICKET_NOT_FOUND") || error.is("TICKET_ENDED");
    }
}
