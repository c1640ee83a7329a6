package io.linkisrm.it;

import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.File;
import java.io.IOException;
import java.net.CookieManager;
import java.net.CookiePolicy;
import java.net.ServerSocket;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.function.UnaryOperator;
import org.apache.linkis.rpc.serializer.ProtostuffSerializeUtil;

/**
 * The real LinkisManagerApplication, as its start script starts it: a process of its own, configured by files. It does not register with
 * Eureka, has no engine plugins, and accepts each caller as its administrator.
 */
final class LinkisManager implements AutoCloseable {
    private static final int READY_SECONDS = 300;
    private static final String ADMINISTRATOR = "hadoop";
    private static final HttpClient HTTP = HttpClient.newBuilder().version(HttpClient.Version.HTTP_1_1)
            .cookieHandler(new CookieManager(null, CookiePolicy.ACCEPT_ALL)).build();

    private final Path directory;
    private final int port;
    private final Process process;

    /** @param lines the adapter's lines in linkis-cg-linkismanager.properties */
    LinkisManager(String databaseUrl, String... lines) throws Exception {
        this(databaseUrl, classes -> classes, lines);
    }

    /** Starts with other classes than those of the tests. */
    LinkisManager(String databaseUrl, UnaryOperator<String> otherClasses, String... lines) throws Exception {
        directory = Files.createTempDirectory("linkis-rm-manager");
        try (ServerSocket socket = new ServerSocket(0)) {
            port = socket.getLocalPort();
        }
        Path conf = Files.createDirectory(directory.resolve("conf"));
        Files.createDirectory(directory.resolve("plugins"));
        Files.write(conf.resolve("linkis.properties"), Arrays.asList("wds.linkis.server.version=v1",
                "wds.linkis.server.mybatis.datasource.url=" + databaseUrl, "wds.linkis.server.mybatis.datasource.username=root",
                "wds.linkis.server.mybatis.datasource.password=", "wds.linkis.server.mybatis.datasource.driver-class-name=org.mariadb.jdbc.Driver",
                "wds.linkis.server.mybatis.mapperLocations=classpath*:mapper/common/*.xml,classpath*:mapper/mysql/*.xml",
                "wds.linkis.governance.station.admin=" + ADMINISTRATOR, "wds.linkis.test.mode=true", "wds.linkis.test.user=" + ADMINISTRATOR,
                "wds.linkis.engineconn.home=" + directory.resolve("plugins"), "wds.linkis.filesystem.root.path=file://" + directory + "/",
                "spring.spring.main.allow-circular-references=true", "spring.spring.mvc.pathmatch.matching-strategy=ant_path_matcher",
                "spring.spring.cloud.config.enabled=false", "spring.eureka.client.register-with-eureka=false",
                "spring.eureka.client.fetch-registry=false"));
        List<String> own = new ArrayList<>(Arrays.asList("wds.linkis.server.mybatis.typeAliasesPackage=",
                "wds.linkis.server.mybatis.BasePackage=org.apache.linkis.manager.dao,org.apache.linkis.manager.rm.external.dao,"
                        + "org.apache.linkis.publicservice.common.lock.dao,org.apache.linkis.engineplugin.server.dao",
                "spring.server.port=" + port));
        own.addAll(Arrays.asList(lines));
        Files.write(conf.resolve("linkis-cg-linkismanager.properties"), own);
        String classes = otherClasses.apply(classes());
        process = new ProcessBuilder(new File(System.getProperty("java.home"), "bin/java").getPath(), "-Xmx512m", "-XX:TieredStopAtLevel=1",
                "-XX:+UseSerialGC", "-XX:+UnlockDiagnosticVMOptions", "-XX:-BytecodeVerificationRemote", "-DserviceName=linkis-cg-linkismanager", "-cp", conf + File.pathSeparator + classes,
                "org.apache.linkis.manager.LinkisManagerApplication")
                .redirectErrorStream(true).redirectOutput(directory.resolve("log").toFile()).start();
    }

    /** The classes of the tests, without those that Linkis runs in another process: Spring would start their beans. */
    private static String classes() {
        String all = System.getProperty("surefire.test.class.path", System.getProperty("java.class.path"));
        List<String> own = new ArrayList<>(Arrays.asList(all.split(File.pathSeparator)));
        own.removeIf(path -> new File(path).getName().startsWith("linkis-configuration-"));
        return String.join(File.pathSeparator, own);
    }

    /** Waits until it replies. */
    LinkisManager ready() throws Exception {
        long end = System.nanoTime() + READY_SECONDS * 1_000_000_000L;
        while (true) {
            try {
                get("/linkisManager/rm/engineType");
                return this;
            } catch (IOException e) {
                if (System.nanoTime() > end || !process.isAlive()) {
                    IllegalStateException failure = new IllegalStateException("Linkis's manager does not start: " + log(), e);
                    close();
                    throw failure;
                }
                Thread.sleep(100);
            }
        }
    }

    /** Waits until its start has failed, and returns its output. */
    String failure() throws Exception {
        if (!process.waitFor(READY_SECONDS, java.util.concurrent.TimeUnit.SECONDS)) {
            throw new IllegalStateException("Linkis's manager runs: " + log());
        }
        return log();
    }

    String log() throws IOException {
        return Files.readString(directory.resolve("log"));
    }

    /** Sends a request of the console. */
    String get(String path) throws Exception {
        return HTTP.send(HttpRequest.newBuilder(url(path)).build(), HttpResponse.BodyHandlers.ofString()).body();
    }

    /** Sends a request of another Linkis service. */
    String ask(Object message) throws Exception {
        Map<String, Object> data = new HashMap<>();
        data.put("rpc_is_request_protocol", "true");
        data.put("rpc_object_class", message.getClass().getName());
        data.put("rpc_object_value", ProtostuffSerializeUtil.serialize(message));
        data.put("name", Manager.ECM);
        data.put("instance", "host7:9102");
        Map<String, Object> body = new HashMap<>();
        body.put("method", "/rpc/message");
        body.put("status", 0);
        body.put("message", "RPC Message.");
        body.put("data", data);
        HttpRequest request = HttpRequest.newBuilder(url("/rpc/receiveAndReply")).header("Content-Type", "application/json")
                .POST(HttpRequest.BodyPublishers.ofString(new ObjectMapper().writeValueAsString(body))).build();
        return HTTP.send(request, HttpResponse.BodyHandlers.ofString()).body();
    }

    @Override
    public void close() throws Exception {
        process.destroyForcibly().waitFor();
        try (var files = Files.walk(directory)) {
            files.sorted(java.util.Comparator.reverseOrder()).forEach(file -> file.toFile().delete());
        }
    }

    private URI url(String path) {
        return URI.create("http://127.0.0.1:" + port + "/api/rest_j/v1" + path);
    }
}
