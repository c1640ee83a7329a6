package io.linkisrm.it;

import io.linkisrm.client.ClientSettings;
import io.linkisrm.client.LinkisRmClient;
import java.io.File;
import java.io.IOException;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import linkis.rm.v1.AdminServiceGrpc;
import linkis.rm.v1.AuditRequest;
import linkis.rm.v1.AuditResponse;

/** A linkis-rm for the tests: the program in LINKIS_RM_SERVER, with a database that survives its kill. */
final class Server implements AutoCloseable {
    private static final int READY_SECONDS = 300;
    private static final Pattern ADDRESS = Pattern.compile("serving address=(\\S+)");

    private static Server shared;

    private final Path directory;
    private final List<String> options;
    private Process process;
    private String address = "127.0.0.1:0";

    private Server(Path directory, List<String> options) {
        this.directory = directory;
        this.options = options;
    }

    /** A server for tests that neither end it nor read other tests' objects: started at the first use, and ended with the tests. */
    static synchronized Server shared() throws Exception {
        if (shared == null) {
            shared = start();
            Runtime.getRuntime().addShutdownHook(new Thread(() -> {
                try {
                    shared.close();
                } catch (Exception e) {
                    System.err.println("linkis-rm stays behind: " + e);
                }
            }));
        }
        return shared;
    }

    static Server start(String... options) throws Exception {
        Path directory = Environment.databaseFolder("linkis-rm-server");
        // As root, PostgreSQL runs under another account, which needs access.
        directory.toFile().setExecutable(true, false);
        directory.toFile().setReadable(true, false);
        Server server = new Server(directory, Arrays.asList(options));
        server.begin();
        return server;
    }

    String address() {
        return address;
    }

    LinkisRmClient client() throws IOException {
        return new LinkisRmClient(ClientSettings.at(address));
    }

    /** The service's own audit. */
    AuditResponse audit() throws IOException {
        try (LinkisRmClient client = client()) {
            return client.call(AdminServiceGrpc.getAuditMethod(), AuditRequest.getDefaultInstance());
        }
    }

    /** Creates a token for a role, and returns it: from then on a credential is required. */
    String token(String role) throws Exception {
        Process made = new ProcessBuilder(Environment.needed("LINKIS_RM_SERVER"), "tokens", "create", "--data-dir",
                directory.resolve("data").toString(), "--name", "a-test", "--role", role, "--owner", "a-test")
                .redirectError(ProcessBuilder.Redirect.DISCARD).start();
        String told = new String(made.getInputStream().readAllBytes(), StandardCharsets.UTF_8);
        if (made.waitFor() != 0) {
            throw new IllegalStateException("no token could be made");
        }
        return told.trim();
    }

    /** Ends it like a power failure. */
    void kill() throws InterruptedException {
        process.destroyForcibly().waitFor();
    }

    /** Starts it again, at the same address. */
    void begin() throws Exception {
        List<String> command = new ArrayList<>(Arrays.asList(Environment.needed("LINKIS_RM_SERVER"), "--listen", address,
                "--http-listen", "", "--log-format", "text", "--data-dir", directory.resolve("data").toString()));
        command.addAll(options);
        File log = directory.resolve("log").toFile();
        log.delete();
        ProcessBuilder builder = new ProcessBuilder(command).redirectErrorStream(true).redirectOutput(log);
        builder.environment().keySet().removeIf(name -> name.startsWith("LINKIS_RM_") || name.equals("DATABASE_URL"));
        process = builder.start();
        long end = System.nanoTime() + READY_SECONDS * 1_000_000_000L;
        while (true) {
            String text = Files.readString(log.toPath());
            Matcher found = ADDRESS.matcher(text);
            if (found.find()) {
                address = found.group(1);
                return;
            }
            if (System.nanoTime() > end || !process.isAlive()) {
                throw new IllegalStateException("linkis-rm does not serve: " + text);
            }
            Thread.sleep(50);
        }
    }

    @Override
    public void close() throws Exception {
        // Ends its PostgreSQL, too.
        process.destroy();
        process.waitFor();
        try (var files = Files.walk(directory)) {
            files.sorted(java.util.Comparator.reverseOrder()).forEach(file -> file.toFile().delete());
        }
    }
}
