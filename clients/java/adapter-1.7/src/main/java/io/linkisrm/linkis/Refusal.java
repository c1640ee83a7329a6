package io.linkisrm.linkis;

import linkis.rm.v1.NotEnoughResource;
import org.apache.linkis.manager.common.exception.RMWarnException;
import org.apache.linkis.manager.rm.exception.RMErrorCode;

/** A refusal in Linkis's words, which its clients parse. */
final class Refusal {
    /** Separator after the description of a code in a reason. */
    private static final String AMOUNTS = " use ";

    private static final String HOST = "ECM Instance:";

    private Refusal() {}

    /** Whether the ECM is short: Linkis then checks no further, and records nothing of the requester. */
    static boolean isByHost(NotEnoughResource refusal) {
        return refusal.getShortfallsList().stream().anyMatch(shortfall -> shortfall.getScopeKind().equals("em"));
    }

    /** Text for a query whether a request fits: as {@link #message}, without the code and the name of the ECM. */
    static String reasonForConsole(NotEnoughResource refusal) {
        String reason = reason(refusal);
        int host = reason.indexOf(HOST);
        return host < 0 ? reason : reason.substring(0, host);
    }

    private static String reason(NotEnoughResource refusal) {
        int amounts = refusal.getReason().indexOf(AMOUNTS);
        for (RMErrorCode code : RMErrorCode.values()) {
            if (code.getErrorCode() == refusal.getCode() && amounts >= 0) {
                // The service has one language, Linkis two.
                return code.getErrorDesc() + refusal.getReason().substring(amounts);
            }
        }
        return refusal.getReason();
    }

    /** Text of Linkis's own resource manager: with the code, as an exception's text. */
    static String message(NotEnoughResource refusal) {
        return new RMWarnException(refusal.getCode(), reason(refusal)).getMessage();
    }
}
