package io.linkisrm.client;

import io.grpc.CallOptions;
import io.grpc.ChannelCredentials;
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;
import io.grpc.MethodDescriptor;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.TlsChannelCredentials;
import io.grpc.stub.ClientCalls;
import java.io.IOException;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;

/**
 * A connection to the service. Calls are the methods of the generated stubs. Each has a deadline, and is repeated within it where that is
 * safe:
 *
 * <pre>client.call(UsageServiceGrpc.getGetEmMethod(), GetEmRequest.newBuilder().setEm(em).build())</pre>
 *
 * <p>With several addresses, the next is used when one does not answer. Any number of threads may call concurrently.
 */
public final class LinkisRmClient implements AutoCloseable {
    private static final int KEEP_ALIVE_SECONDS = 10;
    private static final int ALIVE_WITHIN_SECONDS = 5;
    /** Maximum size of a reply. */
    private static final int MESSAGE_BYTES_MAX = 64 << 20;

    private final Duration timeout;
    private final List<ManagedChannel> channels = new ArrayList<>();
    private final CountDownLatch closed = new CountDownLatch(1);
    private volatile int current;

    /**
     * Connects at the first call.
     *
     * @throws IOException if a file of the settings cannot be read
     */
    public LinkisRmClient(ClientSettings settings) throws IOException {
        timeout = settings.timeout();
        ChannelCredentials credentials = credentials(settings);
        TokenFile token = settings.token() == null ? null : new TokenFile(settings.token());
        for (String address : settings.addresses()) {
            ManagedChannelBuilder<?> builder = Grpc.newChannelBuilder(address, credentials)
                    .keepAliveTime(KEEP_ALIVE_SECONDS, TimeUnit.SECONDS)
                    .keepAliveTimeout(ALIVE_WITHIN_SECONDS, TimeUnit.SECONDS)
                    .maxInboundMessageSize(MESSAGE_BYTES_MAX)
                    // This class repeats calls, because it knows which calls are safe.
                    .disableRetry();
            if (token != null) {
                builder.intercept(token);
            }
            channels.add(builder.build());
        }
    }

    /**
     * Calls within the timeout of the settings.
     *
     * @throws ServiceException if there is no reply
     */
    public <Q, A> A call(MethodDescriptor<Q, A> method, Q request) {
        return call(method, request, timeout);
    }

    /**
     * Calls within this time, all attempts included.
     *
     * @throws ServiceException if there is no reply
     */
    public <Q, A> A call(MethodDescriptor<Q, A> method, Q request, Duration within) {
        long end = System.nanoTime() + within.toNanos();
        boolean inDoubt = false;
        for (int tries = 0; ; tries++) {
            failIfClosed(method, null, inDoubt);
            int used = current;
            try {
                long left = Math.max(end - System.nanoTime(), 0);
                CallOptions options = CallOptions.DEFAULT.withDeadlineAfter(left, TimeUnit.NANOSECONDS);
                return ClientCalls.blockingUnaryCall(channels.get(used), method, options, request);
            } catch (StatusRuntimeException e) {
                failIfClosed(method, e, inDoubt);
                ServiceException error = ServiceException.of(method.getFullMethodName(), e, inDoubt);
                inDoubt = error.isInDoubt();
                Duration pause = Repetition.pause(method, error, tries);
                if (pause == null || System.nanoTime() + pause.toNanos() >= end) {
                    throw error;
                }
                current = (used + 1) % channels.size();
                sleep(pause, error);
                // Otherwise the channel would fail calls for the rest of its own pauses, also when the service is back.
                channels.get(current).resetConnectBackoff();
            }
        }
    }

    /**
     * Opens a stream. It begins immediately, has no time limit, and is not repeated: a follower calls again from its position, and the next
     * address is used.
     *
     * @throws ServiceException if this client is closed
     */
    public <Q, A> Messages<A> follow(MethodDescriptor<Q, A> method, Q request) {
        failIfClosed(method, null, false);
        int used = current;
        channels.get(used).resetConnectBackoff();
        return Messages.open(channels.get(used), method, request, () -> current = (used + 1) % channels.size());
    }

    /** Closes the connections. Calls in progress and later calls fail immediately, and are not repeated. */
    @Override
    public void close() {
        closed.countDown();
        for (ManagedChannel channel : channels) {
            channel.shutdownNow();
        }
    }

    private static ChannelCredentials credentials(ClientSettings settings) throws IOException {
        if (!settings.tls()) {
            return InsecureChannelCredentials.create();
        }
        TlsChannelCredentials.Builder tls = TlsChannelCredentials.newBuilder();
        if (settings.authorities() != null) {
            tls.trustManager(settings.authorities());
        }
        if (settings.certificate() != null) {
            tls.keyManager(settings.certificate(), settings.key());
        }
        return tls.build();
    }

    /**
     * @param cause end of the call, if it had begun
     * @param before whether an earlier attempt of the call is in doubt
     */
    private void failIfClosed(MethodDescriptor<?, ?> method, StatusRuntimeException cause, boolean before) {
        if (closed.getCount() == 0) {
            // Another client may get a reply, so the code is that of an unavailable service.
            Status status = Status.UNAVAILABLE.withDescription("this client is closed").withCause(cause);
            throw ServiceException.of(method.getFullMethodName(), status.asRuntimeException(), before);
        }
    }

    /** Sleeps, until this client is closed at most. */
    private void sleep(Duration pause, ServiceException error) {
        try {
            closed.await(pause.toMillis(), TimeUnit.MILLISECONDS);
        } catch (InterruptedException e) {
            Thread.currentThread().interrupt();
            throw error;
        }
    }
}
