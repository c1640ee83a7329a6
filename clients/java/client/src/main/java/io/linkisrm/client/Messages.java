package io.linkisrm.client;

import io.grpc.CallOptions;
import io.grpc.Channel;
import io.grpc.ClientCall;
import io.grpc.Metadata;
import io.grpc.MethodDescriptor;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import java.time.Duration;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;

/** A stream of messages, until it breaks or is closed. For one thread at a time. */
public final class Messages<A> implements AutoCloseable {
    private final String name;
    private final ClientCall<?, A> call;
    private final Runnable lost;
    /** A message, or the end of the stream: at most one of each, because the next message is requested after the previous one was taken. */
    private final BlockingQueue<Heard<A>> heard = new LinkedBlockingQueue<>();

    private static final class Heard<A> {
        private final A message;
        private final StatusRuntimeException end;

        private Heard(A message, StatusRuntimeException end) {
            this.message = message;
            this.end = end;
        }
    }

    private Messages(String name, ClientCall<?, A> call, Runnable lost) {
        this.name = name;
        this.call = call;
        this.lost = lost;
    }

    /** @param lost action when the stream breaks */
    static <Q, A> Messages<A> open(Channel channel, MethodDescriptor<Q, A> method, Q request, Runnable lost) {
        ClientCall<Q, A> call = channel.newCall(method, CallOptions.DEFAULT);
        Messages<A> messages = new Messages<>(method.getFullMethodName(), call, lost);
        call.start(messages.new Listener(), new Metadata());
        call.sendMessage(request);
        call.halfClose();
        return messages;
    }

    /**
     * Returns the next message. After an exception the stream has ended, and the caller opens another one.
     *
     * @param within maximum silence of the service
     * @throws ServiceException if the stream ended, or was silent for so long
     */
    public A next(Duration within) throws InterruptedException {
        call.request(1);
        Heard<A> next = heard.poll(within.toMillis(), TimeUnit.MILLISECONDS);
        if (next != null && next.message != null) {
            return next.message;
        }
        close();
        lost.run();
        StatusRuntimeException end = next == null ? unavailable("no message for " + within.getSeconds() + " s") : next.end;
        throw ServiceException.of(name, end, false);
    }

    @Override
    public void close() {
        call.cancel("cancelled", null);
    }

    private static StatusRuntimeException unavailable(String why) {
        return Status.UNAVAILABLE.withDescription(why).asRuntimeException();
    }

    private final class Listener extends ClientCall.Listener<A> {
        @Override
        public void onMessage(A message) {
            heard.add(new Heard<>(message, null));
        }

        @Override
        public void onClose(Status status, Metadata trailers) {
            heard.add(new Heard<>(null, status.isOk() ? unavailable("the stream ended without a status") : status.asRuntimeException(trailers)));
        }
    }
}
