package io.linkisrm.it;

import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.linkisrm.client.LinkisRmClient;
import io.linkisrm.client.ServiceException;
import java.nio.file.Files;
import java.nio.file.Path;
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
import org.apache.linkis.manager.rm.NotEnoughResource;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;
import org.springframework.jdbc.datasource.DriverManagerDataSource;

/** What an administrator may write wrongly, and what Linkis may send that the service does not take. */
class SettingsTest {
    @TempDir
    Path directory;

    @Test
    void a_wrong_line_is_named_with_what_to_write() throws Exception {
        Path token = Files.writeString(directory.resolve("token"), "not-a-token\n");
        String nobody = "127.0.0.1:1";
        for (String[] wrong : new String[][] {
            {"spring.linkis.rm.address: \"nowhere\"", "linkis.rm.address", "nowhere"},
            {"spring.linkis.rm.address: 127.0.0.1:1 does not answer", "linkis.rm.address", nobody, "linkis.rm.timeout", "1s"},
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
    void a_token_that_is_not_taken_is_named() throws Exception {
        Path token = Files.writeString(directory.resolve("token"), "not-a-token\n");
        try (Server server = Server.start()) {
            server.token("admin");
            Map<String, String> lines = Map.of("linkis.rm.address", server.address(), "linkis.rm.token-file", token.toString());
            waitUntilAsked(server);
            String said = said(lines);
            assertTrue(said.contains("does not take the token (TOKEN_UNKNOWN)"), said);
            assertTrue(said.contains("spring.linkis.rm.token-file=FILE"), said);
        }
    }

    /** A server knows of a token that was just made after a few seconds. */
    private static void waitUntilAsked(Server server) throws Exception {
        try (LinkisRmClient anonymous = server.client()) {
            for (int tries = 0; tries < 300; tries++) {
                anonymous.call(UsageServiceGrpc.getGetServerInfoMethod(), GetServerInfoRequest.getDefaultInstance());
                Thread.sleep(100);
            }
        } catch (ServiceException e) {
            assertTrue(e.is("TOKEN_MISSING"), e.toString());
        }
    }

    /** What a manager says that does not start; it never comes to use its database. */
    private static String said(Map<String, String> lines) {
        DataSource source = new DriverManagerDataSource("jdbc:mariadb://127.0.0.1:1/none");
        StringBuilder said = new StringBuilder();
        for (Throwable error = assertThrows(RuntimeException.class, () -> new Manager(source, lines).close()); error != null;
                error = error.getCause()) {
            said.append(error.getMessage());
        }
        return said.toString();
    }

    @Test
    void a_label_and_a_host_that_the_service_does_not_take_are_named() throws Exception {
        MariaDb database = MariaDb.get();
        try (Server server = Server.start()) {
            Configuration.set();
            database.create("settings");
            try (Manager manager = new Manager(database.source("settings"), server.address())) {
                manager.register("host1:9102", LifeTest.driver(16, 8, 10), LifeTest.driver(0, 0, 0));
                List<Label<?>> labels = Manager.labels("host1:9102", "alice", "hive", "3.1.3");
                TenantLabel tenant = LabelBuilderFactoryContext.getLabelBuilderFactory().createLabel(TenantLabel.class);
                tenant.setTenant("a\tb");
                labels.add(tenant);
                RMErrorException error = assertThrows(RMErrorException.class,
                        () -> manager.request(labels, LifeTest.driver(1, 1, 1), ResourceType.LoadInstance));
                assertTrue(error.getMessage().contains("The label tenant is refused"), error.getMessage());

                var nowhere = manager.request(Manager.labels("gone:9102", "alice", "hive", "3.1.3"), LifeTest.driver(1, 1, 1),
                        ResourceType.LoadInstance);
                assertTrue(((NotEnoughResource) nowhere).reason().contains("EM_NOT_REGISTERED"), nowhere.toString());
            }
        }
    }
}
