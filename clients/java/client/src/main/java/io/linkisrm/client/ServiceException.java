package io.linkisrm.client;

import com.google.protobuf.Any;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.rpc.ErrorInfo;
import com.google.rpc.RetryInfo;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.protobuf.StatusProto;
import java.net.ConnectException;
import java.net.NoRouteToHostException;
import java.net.UnknownHostException;
import java.time.Duration;
import java.util.Collections;
import java.util.Map;

/** Why a call was not answered as was hoped: what the service says, or what became of the connection with it. */
public final class ServiceException extends RuntimeException {
    private static final long serialVersionUID = 1L;

    private final Status.Code code;
    private final String reason;
    private final transient Map<String, String> facts;
    private final Duration retryAfter;
    private final boolean inDoubt;

    private ServiceException(String call, StatusRuntimeException cause, ErrorInfo info, Duration retryAfter, boolean before) {
        super(call + ": " + text(cause, info), cause);
        this.code = cause.getStatus().getCode();
        this.reason = info.getReason();
        this.facts = info.getMetadataMap();
        this.retryAfter = retryAfter;
        boolean unsent = isUnsent(cause);
        boolean unknown = reason.isEmpty() || reason.equals("COMMIT_UNKNOWN");
        this.inDoubt = unknown && !unsent || before && (unknown || retryAfter != null);
    }

    /** @param before whether an earlier try of the same call is in doubt */
    static ServiceException of(String call, StatusRuntimeException cause, boolean before) {
        ErrorInfo info = ErrorInfo.getDefaultInstance();
        Duration retryAfter = null;
        try {
            for (Any detail : StatusProto.fromThrowable(cause).getDetailsList()) {
                if (detail.is(ErrorInfo.class)) {
                    info = detail.unpack(ErrorInfo.class);
                } else if (detail.is(RetryInfo.class)) {
                    com.google.protobuf.Duration delay = detail.unpack(RetryInfo.class).getRetryDelay();
                    retryAfter = Duration.ofSeconds(delay.getSeconds(), delay.getNanos());
                }
            }
        } catch (InvalidProtocolBufferException e) {
            // It comes from something in between that has details of its own: the code and the text say what there is to say.
            info = ErrorInfo.getDefaultInstance();
        }
        return new ServiceException(call, cause, info, retryAfter, before);
    }

    /** The gRPC code. */
    public Status.Code code() {
        return code;
    }

    /** The reason in capitals, as the proto lists them; empty if it comes from something in between. */
    public String reason() {
        return reason;
    }

    /** Whether this is the reason. */
    public boolean is(String expected) {
        return reason.equals(expected);
    }

    /** The facts that go with the reason. */
    public Map<String, String> facts() {
        return facts == null ? Collections.<String, String>emptyMap() : facts;
    }

    /** Whether nobody was there who could have answered. */
    public boolean isUnavailable() {
        return code == Status.Code.UNAVAILABLE || code == Status.Code.DEADLINE_EXCEEDED;
    }

    /** Whether the call may have been carried out all the same: it was sent, and nobody has said what became of it. */
    public boolean isInDoubt() {
        return inDoubt;
    }

    /** When it may help to ask again, if the service said so; otherwise null. */
    Duration retryAfter() {
        return retryAfter;
    }

    /** Whether there was no connection to send it over. */
    private static boolean isUnsent(Throwable error) {
        for (Throwable cause = error; cause != null; cause = cause.getCause()) {
            if (cause instanceof ConnectException || cause instanceof NoRouteToHostException || cause instanceof UnknownHostException) {
                return true;
            }
        }
        return false;
    }

    private static String text(StatusRuntimeException cause, ErrorInfo info) {
        String name = info.getReason().isEmpty() ? cause.getStatus().getCode().name() : info.getReason();
        String description = cause.getStatus().getDescription();
        return description == null ? name : name + ": " + description;
    }
}
