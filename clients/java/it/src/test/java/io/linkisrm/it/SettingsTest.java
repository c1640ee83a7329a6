package io.linkisrm.it;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.linkisrm.client.ClientSettings;
import io.linkisrm.client.LinkisRmClient;
import io.linkisrm.client.ServiceException;
import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.security.KeyStore;
import java.util.ArrayList;
import java.util.Base64;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import javax.sql.DataSource;
import linkis.rm.v1.GetServerInfoRequest;
import linkis.rm.v1.UsageServiceGrpc;
import org.apache.linkis.manager.common.entity.resource.ResourceType;
import org.apache.linkis.manager.common.exception.RMErrorException;
import org.apache.linkis.manager.label.builder.factory.LabelBuilderFactoryContext;
import org.apache.linkis.manager.label.entity.Label;
import org.apache.linkis.manager.label.entity.TenantLabel;
import org.apache.linkis.manager.rm.AvailableResource;
import org.apache.linkis.manager.rm.NotEnoughResource;
import org.apache.linkis.manager.rm.ResultResource;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.function.Executable;
import org.junit.jupiter.api.io.TempDir;
import org.springframework.jdbc.datasource.DriverManagerDataSource;

/** Wrong settings of an administrator, and requests of Linkis that the service does not accept. */
class SettingsTest {
    private static final String HOST = "settings1:9102";

    @TempDir
    Path directory;

    @Test
    void a_wrong_line_is_named_with_what_to_write() throws Exception {
        Path token = Files.writeString(directory.resolve("token"), "not-a-token\n");
        String nobody = "127.0.0.1:1";
        for (String[] wrong : new String[][] {
            {"spring.linkis.rm.address: it is missing. Add the line spring.linkis.rm.address=HOST:50051", "linkis.rm.enabled", "true"},
            {"spring.linkis.rm.address: \"nowhere\"", "linkis.rm.address", "nowhere"},
            {"spring.linkis.rm.address: 127.0.0.1:1 does not reply", "linkis.rm.address", nobody, "linkis.rm.timeout", "1s"},
            {"spring.linkis.rm.token-file: ", "linkis.rm.address", nobody, "linkis.rm.token-file", directory.resolve("none").toString()},
            {"spring.linkis.rm.key-file: ", "linkis.rm.address", nobody, "linkis.rm.cert-file", token.toString()},
            {"spring.linkis.rm.timeout: \"soon\"", "linkis.rm.address", nobody, "linkis.rm.timeout", "soon"},
        }) {
            Map<String, String> lines = new HashMap<>();
            for (int i = 1; i < wrong.length; i += 2) {
                lines.put(wrong[i], wrong[i + 1]);
            }
            assertTrue(said(lines).contains(wrong[0]), said(lines));
        }
    }

    @Test
    void a_service_with_a_certificate_and_tokens_is_used_or_says_what_is_wrong() throws Exception {
        Path[] pem = certificate();
        try (Server server = Server.start("--tls-cert", pem[0].toString(), "--tls-key", pem[1].toString())) {
            String good = server.token("admin");
            Path token = Files.writeString(directory.resolve("token"), "not-a-token\n");
            String address = "https://" + server.address();
            waitUntilAsked(ClientSettings.at(address).authorities(pem[0].toFile()));

            Map<String, String> lines = new HashMap<>(Map.of("linkis.rm.address", address, "linkis.rm.token-file", token.toString(),
                    "linkis.rm.timeout", "2s"));
            assertTrue(said(lines).contains("spring.linkis.rm.ca-file=FILE"), said(lines));
            lines.put("linkis.rm.ca-file", pem[0].toString());
            lines.remove("linkis.rm.timeout");
            assertTrue(said(lines).contains("does not accept the token (TOKEN_UNKNOWN)"), said(lines));
            assertTrue(said(lines).contains("spring.linkis.rm.token-file=FILE"), said(lines));

            Files.writeString(token, good + "\n");
            Configuration.use();
            MariaDb.get().create("secured");
            try (Manager manager = new Manager(MariaDb.get().source("secured"), lines)) {
                manager.register(HOST, LifeTest.driver(16, 8, 10), LifeTest.driver(0, 0, 0));
                Manager.ticket(manager.request(
                        Manager.labels(HOST, "setalice", "hive", "3.1.3"), LifeTest.driver(1, 1, 1), ResourceType.LoadInstance));
            }
        }
    }

    /** A certificate for this machine, and its key, as PEM. */
    private Path[] certificate() throws Exception {
        Path store = directory.resolve("store");
        String secret = "changeit";
        int made = new ProcessBuilder(Path.of(System.getProperty("java.home"), "bin", "keytool").toString(), "-genkeypair", "-alias", "one",
                "-keyalg", "RSA", "-keysize", "2048", "-dname", "CN=localhost", "-ext", "san=ip:127.0.0.1", "-validity", "2",
                "-storetype", "PKCS12", "-keystore", store.toString(), "-storepass", secret)
                .redirectErrorStream(true).redirectOutput(ProcessBuilder.Redirect.DISCARD).start().waitFor();
        assertEquals(0, made);
        KeyStore keys = KeyStore.getInstance(store.toFile(), secret.toCharArray());
        return new Path[] {pem("CERTIFICATE", keys.getCertificate("one").getEncoded()),
            pem("PRIVATE KEY", keys.getKey("one", secret.toCharArray()).getEncoded())};
    }

    private Path pem(String what, byte[] bytes) throws IOException {
        String text = Base64.getMimeEncoder(64, new byte[] {'\n'}).encodeToString(bytes);
        return Files.writeString(directory.resolve(what.replace(' ', '-')),
                "-----BEGIN " + what + "-----\n" + text + "\n-----END " + what + "-----\n");
    }

    /** A server applies a new token after a few seconds. */
    private static void waitUntilAsked(ClientSettings without) throws Exception {
        try (LinkisRmClient anonymous = new LinkisRmClient(without)) {
            for (int tries = 0; tries < 300; tries++) {
                anonymous.call(UsageServiceGrpc.getGetServerInfoMethod(), GetServerInfoRequest.getDefaultInstance());
                Thread.sleep(100);
            }
        } catch (ServiceException e) {
            assertTrue(e.is("TOKEN_MISSING"), e.toString());
        }
    }

    /** The output of a manager that does not start; it never uses its database. */
    private static String said(Map<String, String> lines) {
        DataSource source = new DriverManagerDataSource("jdbc:mariadb://127.0.0.1:1/none");
        StringBuilder said = new StringBuilder();
        for (Throwable error = assertThrows(RuntimeException.class, () -> new Manager(source, lines).close()); error != null;
                error = error.getCause()) {
            said.append(error.getMessage());
        }
        return said.toString();
    }

    private static ResultResource request(Manager manager, List<Label<?>> more) {
        List<Label<?>> labels = Manager.labels(HOST, "setalice", "hive", "3.1.3");
        labels.addAll(more);
        return manager.request(labels, LifeTest.driver(1, 1, 1), ResourceType.LoadInstance);
    }

    @Test
    void a_label_and_a_host_that_the_service_does_not_take_are_named() throws Exception {
        MariaDb database = MariaDb.get();
        Configuration.use();
        database.create("settings");
        try (Manager manager = new Manager(database.source("settings"), Server.shared().address())) {
            manager.register(HOST, LifeTest.driver(16, 8, 10), LifeTest.driver(0, 0, 0));
            TenantLabel tenant = LabelBuilderFactoryContext.getLabelBuilderFactory().createLabel(TenantLabel.class);
            tenant.setTenant("a\tb");
            for (Executable asked : new Executable[] {() -> request(manager, List.of(tenant)),
                () -> manager.register("settings2:9102", LifeTest.driver(16, 8, 10), LifeTest.driver(0, 0, 0), tenant)}) {
                RMErrorException error = assertThrows(RMErrorException.class, asked);
                assertTrue(error.getMessage().contains("The label tenant is refused"), error.getMessage());
            }
            // The maximum number and length.
            for (Object[] most : new Object[][] {{32, "a"}, {8, "用".repeat(255)}}) {
                List<Label<?>> labels = new ArrayList<>();
                for (int i = 0; i < (int) most[0]; i++) {
                    labels.add(new NamedLabel(String.format("k%02d", i), (String) most[1]));
                }
                assertTrue(request(manager, labels) instanceof AvailableResource);
            }

            var nowhere = manager.request(Manager.labels("gone:9102", "setalice", "hive", "3.1.3"), LifeTest.driver(1, 1, 1),
                    ResourceType.LoadInstance);
            assertTrue(((NotEnoughResource) nowhere).reason().contains("EM_NOT_REGISTERED"), nowhere.toString());
        }
    }
}
