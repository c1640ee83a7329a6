package io.linkisrm.it;

import static org.junit.jupiter.api.Assertions.assertAll;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.File;
import java.lang.reflect.Field;
import java.lang.reflect.Proxy;
import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import org.apache.linkis.configuration.dao.ConfigKeyLimitForUserMapper;
import org.apache.linkis.configuration.dao.ConfigMapper;
import org.apache.linkis.configuration.dao.LabelMapper;
import org.apache.linkis.configuration.entity.ConfigKeyValue;
import org.apache.linkis.configuration.entity.ConfigLabel;
import org.apache.linkis.configuration.receiver.ConfigurationReceiver;
import org.apache.linkis.configuration.service.ConfigurationService;
import org.apache.linkis.manager.common.entity.resource.DriverAndYarnResource;
import org.apache.linkis.manager.common.entity.resource.LoadInstanceResource;
import org.apache.linkis.manager.common.entity.resource.ResourceType;
import org.apache.linkis.manager.common.entity.resource.YarnResource;
import org.apache.linkis.manager.label.builder.factory.LabelBuilderFactory;
import org.apache.linkis.manager.label.builder.factory.LabelBuilderFactoryContext;
import org.apache.linkis.manager.label.entity.engine.EngineTypeLabel;
import org.apache.linkis.manager.label.entity.engine.UserCreatorLabel;
import org.apache.linkis.manager.rm.utils.UserConfiguration;
import org.apache.linkis.rpc.Sender;
import org.junit.jupiter.api.AfterAll;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.function.Executable;

/**
 * Fallback of a user's configured limits, as Linkis's manager gets them from Linkis's configuration service. The table has the expected
 * results, and tests of the service compare with it (crates/model/src/limit/tests/linkis.rs).
 */
class LimitsTest {
    private static final File TABLE = new File("../../../tests/fixtures/linkis/limits.json");
    private static final LabelBuilderFactory LABELS = LabelBuilderFactoryContext.getLabelBuilderFactory();

    @AfterAll
    static void each_test_configures_its_own_users_again() throws ReflectiveOperationException {
        Configuration.answerAsSet();
    }

    @Test
    void configured_limits_fall_back_as_the_table_says() throws Exception {
        JsonNode table = new ObjectMapper().readTree(TABLE);
        List<Executable> all = new ArrayList<>();
        for (JsonNode row : table.get("cases")) {
            ConfigurationReceiver receiver = new ConfigurationReceiver(new Rows(table.get("keys"), row).service());
            Configuration.answer(message -> receiver.receiveAndReply(message, (Sender) null));
            Map<String, String> answer = limits(row.get("asked").asText().split(","));
            // A missing value of a row is the manager's default.
            Map<String, String> said = texts(table.get("defaults"));
            said.putAll(texts(row.get("linkis")));
            all.add(() -> assertEquals(said, answer, row.get("what").asText()));
        }
        assertFalse(all.isEmpty());
        assertAll(all);
    }

    private static Map<String, String> texts(JsonNode object) {
        Map<String, String> texts = new TreeMap<>();
        object.fields().forEachRemaining(field -> texts.put(field.getKey(), field.getValue().asText()));
        return texts;
    }

    /** The limits of a user, as RequestResourceService finds them. */
    private static Map<String, String> limits(String[] labels) throws Exception {
        UserCreatorLabel userCreator = LABELS.createLabel("userCreator", labels[0]);
        EngineTypeLabel engineType = LABELS.createLabel("engineType", labels[1]);
        DriverAndYarnResource resource = (DriverAndYarnResource) UserConfiguration.getUserConfiguredResource(
                ResourceType.DriverAndYarn, userCreator, engineType);
        LoadInstanceResource driver = resource.getLoadInstanceResource();
        YarnResource queue = resource.getYarnResource();
        return new TreeMap<>(Map.of("cores", String.valueOf(driver.getCores()), "memory", gigabytes(driver.getMemory()),
                "instances", String.valueOf(driver.getInstances()), "queue_cores", String.valueOf(queue.getQueueCores()),
                "queue_memory", gigabytes(queue.getQueueMemory()), "queue_instances", String.valueOf(queue.getQueueInstances())));
    }

    private static String gigabytes(long bytes) {
        assertEquals(0, bytes % (1L << 30));
        return (bytes >> 30) + "g";
    }

    /** A row of the table as rows of Linkis's tables, in place of its mappers. */
    private static final class Rows {
        private final JsonNode keys;
        private final JsonNode configured;
        private final JsonNode defaults;
        private final List<String> labels = new ArrayList<>();

        Rows(JsonNode keys, JsonNode row) {
            this.keys = keys;
            configured = row.get("configured");
            defaults = row.path("key_defaults");
            configured.fieldNames().forEachRemaining(labels::add);
        }

        ConfigurationService service() throws ReflectiveOperationException {
            ConfigurationService service = new ConfigurationService();
            put(service, "labelMapper", LabelMapper.class, "getLabelByKeyValue",
                    asked -> asked[0].equals("combined_userCreator_engineType") ? label((String) asked[1]) : null);
            put(service, "configMapper", ConfigMapper.class, "getConfigKeyValueByLabelId", asked -> values((Integer) asked[0]));
            put(service, "configKeyLimitForUserMapper", ConfigKeyLimitForUserMapper.class, "selectByLabelAndKeyIds",
                    asked -> Collections.emptyList());
            return service;
        }

        private ConfigLabel label(String value) {
            if (!labels.contains(value)) {
                return null;
            }
            ConfigLabel label = new ConfigLabel();
            label.setId(labels.indexOf(value) + 1);
            return label;
        }

        /** New objects each time, because the service modifies them. */
        private List<ConfigKeyValue> values(int labelId) {
            List<ConfigKeyValue> values = new ArrayList<>();
            texts(configured.get(labels.get(labelId - 1))).forEach((dimension, text) -> {
                ConfigKeyValue value = new ConfigKeyValue();
                value.setKey(keys.get(dimension).asText());
                value.setDefaultValue(defaults.path(dimension).textValue());
                value.setConfigValue(text);
                values.add(value);
            });
            return values;
        }

        private interface Query {
            Object answer(Object[] asked);
        }

        /** A mapper with this one query. */
        private static void put(ConfigurationService service, String field, Class<?> mapper, String query, Query rows)
                throws ReflectiveOperationException {
            Field place = ConfigurationService.class.getDeclaredField(field);
            place.setAccessible(true);
            place.set(service, Proxy.newProxyInstance(mapper.getClassLoader(), new Class<?>[] {mapper}, (proxy, method, asked) -> {
                if (!method.getName().equals(query)) {
                    throw new UnsupportedOperationException(method.toString());
                }
                return rows.answer(asked);
            }));
        }
    }
}
