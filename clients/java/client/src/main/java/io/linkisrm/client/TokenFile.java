package io.linkisrm.client;

import io.grpc.CallOptions;
import io.grpc.Channel;
import io.grpc.ClientCall;
import io.grpc.ClientInterceptor;
import io.grpc.ForwardingClientCall;
import io.grpc.Metadata;
import io.grpc.MethodDescriptor;
import java.io.File;
import java.io.IOException;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;

/** Sends the first line of a file with each call, and reads it again when it changes. */
final class TokenFile implements ClientInterceptor {
    private static final Metadata.Key<String> AUTHORIZATION = Metadata.Key.of("authorization", Metadata.ASCII_STRING_MARSHALLER);
    /** Lifetime of the cached token, in nanoseconds. */
    private static final long LOOK_AGAIN = 5_000_000_000L;

    private final File file;
    private String token;
    private long read;

    /** @throws IOException if the file has no token */
    TokenFile(File file) throws IOException {
        this.file = file;
        this.token = first(file);
        this.read = System.nanoTime();
    }

    @Override
    public <Q, A> ClientCall<Q, A> interceptCall(MethodDescriptor<Q, A> method, CallOptions options, Channel next) {
        return new ForwardingClientCall.SimpleForwardingClientCall<Q, A>(next.newCall(method, options)) {
            @Override
            public void start(Listener<A> listener, Metadata headers) {
                headers.put(AUTHORIZATION, "Bearer " + current());
                super.start(listener, headers);
            }
        };
    }

    private synchronized String current() {
        if (System.nanoTime() - read > LOOK_AGAIN) {
            read = System.nanoTime();
            try {
                token = first(file);
            } catch (IOException e) {
                // The file may be being replaced: the cached token is used until the service rejects it.
                return token;
            }
        }
        return token;
    }

    private static String first(File file) throws IOException {
        String text = new String(Files.readAllBytes(file.toPath()), StandardCharsets.UTF_8);
        String line = text.split("\\R", 2)[0].trim();
        if (!line.matches("[\\x21-\\x7e]+")) {
            throw new IOException(file + " has no token in its first line");
        }
        return line;
    }
}
