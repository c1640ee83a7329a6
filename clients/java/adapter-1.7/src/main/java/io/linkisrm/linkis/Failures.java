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

    /** What may work in a moment is an error after which Linkis tries again; nothing was granted in any case. */
    static LinkisRuntimeException of(ServiceException error) {
        LinkisRuntimeException told;
        switch (error.code()) {
            case UNAVAILABLE:
            case DEADLINE_EXCEEDED:
            case ABORTED:
            case RESOURCE_EXHAUSTED:
                told = new RMLockFailedRetryException(RMErrorCode.LOCK_LABEL_FAILED.getErrorCode(),
                        "The resource manager does not answer, so nothing is granted: please try again. " + error.getMessage());
                break;
            default:
                told = new RMErrorException(RMErrorCode.LABEL_RESOURCE_NOT_FOUND.getErrorCode(), error.getMessage());
        }
        told.initCause(error);
        return told;
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
