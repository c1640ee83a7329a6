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

/** A failed call: the error of the service, or of the connection to it. */
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

    /** @param before whether an earlier attempt of the call is in doubt */
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
            // A proxy with details of its own sent it: code and text have the information.
            info = ErrorInfo.getDefaultInstance();
        }
        return new ServiceException(call, cause, info, retryAfter, before);
    }

    /** The gRPC code. */
    public Status.Code code() {
        return code;
    }

    /** The reason in capitals, as in the proto; empty if it is not from the service. */
    public String reason() {
        return reason;
    }

    /** Whether this is the reason. */
    public boolean is(String expected) {
        return reason.equals(expected);
    }

    /** The metadata of the reason. */
    public Map<String, String> facts() {
        return facts == null ? Collections.<String, String>emptyMap() : facts;
    }

    /** Whether no instance was available. */
    public boolean isUnavailable() {
        return code == Status.Code.UNAVAILABLE || code == Status.Code.DEADLINE_EXCEEDED;
    }

    /** Whether the call may have taken effect: it was sent, and its result is unknown. */
    public boolean isInDoubt() {
        return inDoubt;
    }

    /** Time until a repetition may help, if the service sent it; otherwise null. */
    Duration retryAfter() {
        return retryAfter;
    }

    /** Whether the call was not sent for lack of a connection. */
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
