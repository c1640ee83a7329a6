package io.linkisrm.it;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.linkisrm.client.LinkisRmClient;
import java.io.File;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import linkis.rm.v1.EmResource;
import linkis.rm.v1.GetEmRequest;
import linkis.rm.v1.UsageServiceGrpc;
import org.apache.linkis.manager.common.entity.resource.CommonNodeResource;
import org.apache.linkis.manager.common.entity.resource.NodeResource;
import org.apache.linkis.manager.common.entity.resource.Resource;
import org.apache.linkis.manager.common.entity.resource.ResourceType;
import org.apache.linkis.manager.common.protocol.em.RegisterEMRequest;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.condition.EnabledIfEnvironmentVariable;
import org.junit.jupiter.api.io.TempDir;

/** The real manager of Linkis starts with the jar, and calls over its own RPC reach the service. */
class BootTest {
    private static final String HOST = "host7:9102";

    @TempDir
    Path directory;

    @Test
    void the_real_manager_registers_a_host_and_its_console_answers() throws Exception {
        MariaDb database = MariaDb.get();
        Server server = Server.shared();
        try (LinkisRmClient client = server.client()) {
            database.create("boot");
            long begin = System.nanoTime();
            try (LinkisManager manager = new LinkisManager(database.url("boot"), lines(server)).ready()) {
                System.out.printf("boot: Linkis's manager answers after %.1f s%n", (System.nanoTime() - begin) / 1e9);
                String answer = manager.ask(registration());
                assertTrue(answer.contains("RegisterEMResponse"), () -> answer + logOf(manager));

                GetEmRequest which = GetEmRequest.newBuilder().setEm(linkis.rm.v1.EmInstance.newBuilder()
                        .setApplicationName(Manager.ECM).setInstance(HOST)).build();
                EmResource em = client.call(UsageServiceGrpc.getGetEmMethod(), which).getEm();
                assertEquals("a", em.getLabelsOrThrow("tenant"), em.toString());
                assertEquals(8, em.getTotal().getLoadInstance().getCores());

                String hosts = manager.get("/linkisManager/listAllEMs");
                assertTrue(hosts.contains(HOST) && hosts.contains("\"cores\":8"), hosts);
                String users = manager.get("/linkisManager/rm/allUserResource?page=1&size=10");
                assertTrue(users.contains("\"status\":0"), users);
                String reset = manager.get("/linkisManager/reset-resource?serviceInstance=" + HOST + "&username=");
                assertTrue(reset.contains("\"status\":0"), reset);
            }
        }
    }

    @Test
    @EnabledIfEnvironmentVariable(named = "LINKIS_IT", matches = "full")
    void its_console_says_the_same_as_with_the_built_in_resource_manager() throws Exception {
        assertEquals(pages("boot_built_in", "spring.linkis.rm.enabled=false"), pages("boot_ours", lines(Server.shared())));
    }

    /** Replies to the console for a registered ECM, without ids and times. */
    private static String pages(String name, String... lines) throws Exception {
        MariaDb.get().create(name);
        StringBuilder pages = new StringBuilder();
        try (LinkisManager manager = new LinkisManager(MariaDb.get().url(name), lines).ready()) {
            manager.ask(registration());
            for (String page : new String[] {"listAllEMs", "rm/engineType", "rm/allUserResource?page=1&size=10",
                "rm/get-user-resource?username=hadoop&creator=IDE&engineType=hive", "listAllECMHealthyStatus?onlyEditable=false",
                "reset-resource?serviceInstance=" + HOST + "&username="}) {
                pages.append(page).append(' ').append(manager.get("/linkisManager/" + page)).append('\n');
            }
        }
        assertTrue(pages.toString().contains("\"cores\":8"), pages.toString());
        return pages.toString().replaceAll("\"(id|[a-zA-Z]*[tT]ime)\":(\"[^\"]*\"|\\d+|null)", "\"$1\":0");
    }

    private static String[] lines(Server server) {
        return new String[] {"spring.linkis.rm.enabled=true", "spring.linkis.rm.address=" + server.address()};
    }

    @Test
    @EnabledIfEnvironmentVariable(named = "LINKIS_IT", matches = "full")
    void a_manager_that_cannot_work_does_not_start_and_says_which_line_to_change() throws Exception {
        MariaDb database = MariaDb.get();
        database.create("boot_not");
        try (LinkisManager manager = new LinkisManager(database.url("boot_not"), "spring.linkis.rm.enabled=true")) {
            String said = manager.failure();
            assertTrue(said.contains("spring.linkis.rm.address=HOST:50051"), said);
        }
        try (LinkisManager manager = new LinkisManager(database.url("boot_not"), this::older, lines(Server.shared()))) {
            String said = manager.failure();
            assertTrue(said.contains("this is Linkis 1.6") && said.contains("spring.linkis.rm.enabled=false"), said);
        }
    }

    /** Returns the class path with jars that have the name of another release. */
    private String older(String classes) {
        List<String> entries = new ArrayList<>();
        for (String entry : classes.split(File.pathSeparator)) {
            Path jar = Path.of(entry);
            if (jar.getFileName().toString().equals("linkis-common-1.7.0.jar")) {
                try {
                    entry = Files.copy(jar, directory.resolve("linkis-common-1.6.0.jar")).toString();
                } catch (IOException e) {
                    throw new UncheckedIOException(e);
                }
            }
            entries.add(entry);
        }
        return String.join(File.pathSeparator, entries);
    }

    private static String logOf(LinkisManager manager) {
        try {
            return manager.log();
        } catch (IOException e) {
            return e.toString();
        }
    }

    private static RegisterEMRequest registration() {
        NodeResource resource = new CommonNodeResource();
        resource.setResourceType(ResourceType.LoadInstance);
        resource.setMaxResource(LifeTest.driver(16, 8, 10));
        resource.setMinResource(LifeTest.driver(0, 0, 0));
        resource.setLeftResource(LifeTest.driver(16, 8, 10));
        resource.setUsedResource(Resource.initResource(ResourceType.LoadInstance));
        resource.setLockedResource(Resource.initResource(ResourceType.LoadInstance));
        Map<String, Object> labels = new HashMap<>();
        labels.put("tenant", "a");
        labels.put("serverAlias", Manager.ECM);
        RegisterEMRequest request = new RegisterEMRequest();
        request.setServiceInstance(Manager.ecm(HOST));
        request.setUser("hadoop");
        request.setAlias(Manager.ECM);
        request.setLabels(labels);
        request.setNodeResource(resource);
        return request;
    }
}
