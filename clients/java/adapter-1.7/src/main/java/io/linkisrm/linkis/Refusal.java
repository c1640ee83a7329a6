package io.linkisrm.linkis;

import linkis.rm.v1.NotEnoughResource;
import org.apache.linkis.manager.common.exception.RMWarnException;
import org.apache.linkis.manager.rm.exception.RMErrorCode;

/** A refusal in the words of Linkis, by which its clients know it. */
final class Refusal {
    /** What follows the description of a code in a reason. */
    private static final String AMOUNTS = " use ";

    private static final String HOST = "ECM Instance:";

    private Refusal() {}

    /** Whether it is the host that has not enough: Linkis then looks no further, and keeps nothing of who asked. */
    static boolean isByHost(NotEnoughResource refusal) {
        return refusal.getShortfallsList().stream().anyMatch(shortfall -> shortfall.getScopeKind().equals("em"));
    }

    /** What is told to who only asks whether it would fit: as {@link #message}, without the code and the name of the host. */
    static String reasonForConsole(NotEnoughResource refusal) {
        String reason = reason(refusal);
        int host = reason.indexOf(HOST);
        return host < 0 ? reason : reason.substring(0, host);
    }

    private static String reason(NotEnoughResource refusal) {
        int amounts = refusal.getReason().indexOf(AMOUNTS);
        for (RMErrorCode code : RMErrorCode.values()) {
            if (code.getErrorCode() == refusal.getCode() && amounts >= 0) {
                // The service says it in one language, Linkis in two.
                return code.getErrorDesc() + refusal.getReason().substring(amounts);
            }
        }
        return refusal.getReason();
    }

    /** As Linkis's own resource manager tells it: with the code, as an exception's text. */
    static String message(NotEnoughResource refusal) {
        return new RMWarnException(refusal.getCode(), reason(refusal)).getMessage();
    }
}
