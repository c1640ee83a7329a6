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

/** What Linkis is told when the service does not do what it was asked: in Linkis's own exceptions, with Linkis's own codes. */
final class Failures {
    private static final List<String> OF_HOSTS =
            Collections.unmodifiableList(Arrays.asList("EM_NOT_REGISTERED", "EM_DRAINING", "EM_RESERVED", "LABEL_REQUIRED"));

    private Failures() {}

    /**
     * What may work in a moment is an error after which Linkis tries again, as another request: what the first may have been granted
     * without an answer, {@link Unanswered} gives back.
     */
    static LinkisRuntimeException of(ServiceException error) {
        LinkisRuntimeException told;
        if (mayPass(error)) {
            told = new RMLockFailedRetryException(RMErrorCode.LOCK_LABEL_FAILED.getErrorCode(),
                    "The resource manager does not answer: please try again. What it may have granted is given back. " + error.getMessage());
        } else {
            told = new RMErrorException(RMErrorCode.LABEL_RESOURCE_NOT_FOUND.getErrorCode(), error.getMessage());
        }
        told.initCause(error);
        return told;
    }

    /** Whether the same call may be answered in a moment. */
    static boolean mayPass(ServiceException error) {
        switch (error.code()) {
            case UNAVAILABLE:
            case DEADLINE_EXCEEDED:
            case ABORTED:
            case RESOURCE_EXHAUSTED:
                return true;
            default:
                return false;
        }
    }

    /** That a host is not what the request needs: not registered, drained, or reserved for others. */
    static boolean isOfHost(ServiceException error) {
        return OF_HOSTS.contains(error.reason());
    }

    /** As Linkis says that it has no resource of a host. */
    static RMWarnException noHost(ServiceException error) {
        return new RMWarnException(ManagerCommonErrorCodeSummary.NO_RESOURCE_AVAILABLE.getErrorCode(), error.getMessage());
    }

    /** That something is not there that Linkis should have. */
    static RMErrorException notFound(String text) {
        return new RMErrorException(RMErrorCode.LABEL_RESOURCE_NOT_FOUND.getErrorCode(), text);
    }

    /** That there is nothing in the books under a ticket. */
    static boolean isOver(ServiceException error) {
        return error.is("TICKET_NOT_FOUND") || error.is("TICKET_ENDED");
    }
}
