package io.linkisrm.it;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.linkisrm.client.LinkisRmClient;
import java.util.HashMap;
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

/** The real manager of Linkis starts with the jar, and what comes over its own RPC is in the service. */
class BootTest {
    private static final String HOST = "host7:9102";

    @Test
    void the_real_manager_registers_a_host_and_its_console_answers() throws Exception {
        MariaDb database = MariaDb.get();
        try (Server server = Server.start(); LinkisRmClient client = server.client()) {
            database.create("boot");
            long begin = System.nanoTime();
            try (LinkisManager manager = new LinkisManager(database.url("boot"), "spring.linkis.rm.enabled=true",
                    "spring.linkis.rm.address=" + server.address()).ready()) {
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
    void a_manager_that_cannot_work_does_not_start_and_says_which_line_to_change() throws Exception {
        MariaDb database = MariaDb.get();
        database.create("boot_not");
        try (LinkisManager manager = new LinkisManager(database.url("boot_not"), "spring.linkis.rm.enabled=true")) {
            String said = manager.failure();
            assertTrue(said.contains("spring.linkis.rm.address=HOST:50051"), said);
        }
    }

    private static String logOf(LinkisManager manager) {
        try {
            return manager.log();
        } catch (java.io.IOException e) {
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
