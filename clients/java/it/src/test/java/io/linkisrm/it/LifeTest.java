package io.linkisrm.it;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.util.ArrayList;
import java.util.List;
import org.apache.linkis.common.ServiceInstance;
import org.apache.linkis.manager.common.entity.resource.DriverAndYarnResource;
import org.apache.linkis.manager.common.entity.resource.LoadInstanceResource;
import org.apache.linkis.manager.common.entity.resource.Resource;
import org.apache.linkis.manager.common.entity.resource.ResourceType;
import org.apache.linkis.manager.common.entity.resource.YarnResource;
import org.apache.linkis.manager.common.protocol.engine.EngineCreateRequest;
import org.apache.linkis.manager.common.utils.ResourceUtils;
import org.apache.linkis.manager.label.builder.factory.LabelBuilderFactoryContext;
import org.apache.linkis.manager.label.entity.Label;
import org.apache.linkis.manager.label.entity.TenantLabel;
import org.apache.linkis.manager.rm.NotEnoughResource;
import org.junit.jupiter.api.Test;

/** One scenario with Linkis's own resource manager and with the adapter: after each step, tables and console are equal. */
class LifeTest {
    private static final long GIB = 1L << 30;
    private static final String HOST = "life1:9102";

    @Test
    void tables_and_console_are_the_same_as_with_the_built_in_manager() throws Exception {
        MariaDb database = MariaDb.get();
        Server server = Server.shared();
        Configuration.set("hadoop", "wds.linkis.rm.client.core.max", "6");
        List<String> ours = scenario(database, "life_ours", server.address());
        List<String> builtIn = scenario(database, "life_built_in", null);
        assertEquals(String.join("\n", builtIn), String.join("\n", ours));
        assertEquals(0, server.audit().getDifferenceCount());
    }

    private List<String> scenario(MariaDb database, String name, String address) throws Exception {
        database.create(name);
        List<String> story = new ArrayList<>();
        try (Manager manager = new Manager(database.source(name), address)) {
            Dump dump = new Dump(database.source(name));
            Step step = (what, result) -> {
                story.add("== " + what);
                story.add(dump.named(result));
                story.addAll(dump.all());
            };
            live(manager, step);
        }
        assertTrue(story.size() > 100, "it says something");
        for (String page : new String[] {"\"resources\":[{", "\"userResources\":[{", "\"engines\":[{", "\"applications\":[{"}) {
            assertTrue(story.stream().anyMatch(line -> line.contains(page)), page + " in " + story);
        }
        return story;
    }

    private interface Step {
        void done(String what, String result) throws Exception;
    }

    private static void live(Manager manager, Step step) throws Exception {
        TenantLabel tenant = LabelBuilderFactoryContext.getLabelBuilderFactory().createLabel(TenantLabel.class);
        tenant.setTenant("a");
        manager.register(HOST, driver(16, 8, 10), driver(0, 0, 0), tenant);
        step.done("registered", "");

        List<Label<?>> hive = Manager.labels(HOST, "hadoop", "hive", "3.1.3");
        EngineCreateRequest nothing = new EngineCreateRequest();
        for (Resource asked : new Resource[] {driver(17, 1, 1), driver(1, 7, 1)}) {
            var can = manager.resources.canRequestResource(hive, Manager.amount(asked, ResourceType.LoadInstance), nothing);
            step.done("may not be", can.isCanCreateEC() + can.getReason() + can.getEcmResource() + can.getLabelResource());
        }

        Resource two = driver(2, 2, 1);
        hive = Manager.labels(HOST, "hadoop", "hive", "3.1.3");
        String first = Manager.ticket(manager.request(hive, two, ResourceType.LoadInstance));
        step.done("granted", first + manager.console("hadoop", "hive"));
        manager.started(first, "life1:41001", "hadoop", hive);
        step.done("started", "");
        manager.used("life1:41001", two, ResourceType.LoadInstance);
        step.done("used", manager.console("hadoop", "hive") + info(manager, "life1:41001"));

        step.done("over what is configured", refusal(manager, "hadoop", driver(1, 5, 1)));
        step.done("over what there is", refusal(manager, "bob", driver(17, 1, 1)));

        List<Label<?>> spark = Manager.labels(HOST, "hadoop", "spark", "3.2.1");
        Resource both = new DriverAndYarnResource(driver(2, 1, 1), new YarnResource(8 * GIB, 4, 0, "etl"));
        String second = Manager.ticket(manager.request(spark, both, ResourceType.DriverAndYarn));
        step.done("granted on a queue", second + manager.console("hadoop", "spark"));
        manager.started(second, "life1:41002", "hadoop", spark);
        Resource known = new DriverAndYarnResource(driver(2, 1, 1), new YarnResource(8 * GIB, 4, 0, "etl", "application_1"));
        manager.used("life1:41002", known, ResourceType.DriverAndYarn);
        step.done("used on a queue", manager.console("hadoop", "spark") + info(manager, "life1:41002"));

        hive = Manager.labels(HOST, "hadoop", "hive", "3.1.3");
        String third = Manager.ticket(manager.request(hive, driver(1, 1, 1), ResourceType.LoadInstance));
        manager.started(third, "life1:41003", "hadoop", hive);
        step.done("granted and never used", third + manager.console("hadoop", "hive"));
        manager.clear("life1:41003");
        step.done("cancelled", manager.console("hadoop", "hive"));

        manager.clear("life1:41001");
        step.done("released", manager.console("hadoop", "hive"));
        manager.clear("life1:41002");
        step.done("released on a queue", manager.console("hadoop", "spark") + info(manager));
        manager.resources.unregister(Manager.ecm(HOST));
        step.done("unregistered", "");
    }

    private static String refusal(Manager manager, String user, Resource resource) {
        List<Label<?>> labels = Manager.labels(HOST, user, "hive", "3.1.3");
        return ((NotEnoughResource) manager.request(labels, resource, ResourceType.LoadInstance)).reason();
    }

    private static String info(Manager manager, String... engines) {
        List<ServiceInstance> instances = new ArrayList<>();
        instances.add(Manager.ecm(HOST));
        for (String engine : engines) {
            instances.add(Manager.instance(Manager.EC, engine));
        }
        StringBuilder text = new StringBuilder();
        manager.resources.getResourceInfo(instances.toArray(new ServiceInstance[0])).resourceInfo().forEach(node -> text.append("\n")
                .append(node.getServiceInstance().getInstance()).append(' ')
                .append(ResourceUtils.toJSONString(ResourceUtils.toPersistenceResource(node.getNodeResource())).replaceAll("\"id\":\\d+", "")));
        return text.toString();
    }

    static LoadInstanceResource driver(long memoryGib, int cores, int instances) {
        return new LoadInstanceResource(memoryGib * GIB, cores, instances);
    }
}
