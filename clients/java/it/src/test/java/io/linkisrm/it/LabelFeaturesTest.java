package io.linkisrm.it;

import static org.junit.jupiter.api.Assertions.assertAll;
import static org.junit.jupiter.api.Assertions.assertEquals;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.File;
import java.io.IOException;
import java.util.ArrayList;
import java.util.Collections;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.TreeSet;
import org.apache.linkis.common.ServiceInstance;
import org.apache.linkis.manager.am.label.AMLabelFilter;
import org.apache.linkis.manager.common.entity.node.ScoreServiceInstance;
import org.apache.linkis.manager.common.entity.persistence.PersistenceLabel;
import org.apache.linkis.manager.label.builder.factory.LabelBuilderFactoryContext;
import org.apache.linkis.manager.label.entity.Feature;
import org.apache.linkis.manager.label.entity.Label;
import org.apache.linkis.manager.label.entity.node.AliasServiceInstanceLabel;
import org.apache.linkis.manager.label.score.DefaultNodeLabelScorer;
import org.apache.linkis.manager.label.service.NodeLabelService;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.function.Executable;

/**
 * Selection of ECMs by labels in Linkis's own manager, and the ranking of its scorer. The table has the expected results, and tests of the
 * service compare with it (tests/integration/label_features.rs).
 */
class LabelFeaturesTest {
    private static final File TABLE = new File("../../../tests/fixtures/linkis/labels.json");

    @Test
    void the_manager_selects_as_the_table_says() throws Exception {
        MariaDb.get().create("labels");
        Configuration.use();
        List<Executable> all = new ArrayList<>();
        try (Manager manager = new Manager(MariaDb.get().source("labels"), (String) null)) {
            for (JsonNode row : table("selection")) {
                List<String> selected = selected(manager, row, "labels" + all.size() + "-");
                all.add(() -> says(row, selected));
            }
        }
        assertAll(all);
    }

    @Test
    void the_scorer_ranks_as_the_table_says() throws IOException {
        List<Executable> all = new ArrayList<>();
        for (JsonNode row : table("scores")) {
            all.add(() -> says(row, ranked(row, table("features"))));
        }
        assertAll(all);
    }

    private static JsonNode table(String part) throws IOException {
        return new ObjectMapper().readTree(TABLE).get(part);
    }

    private static void says(JsonNode row, Object answer) {
        assertEquals(row.get("linkis").toString(), new ObjectMapper().valueToTree(answer).toString(), row.get("what").asText());
    }

    private static Map<String, JsonNode> hosts(JsonNode row) {
        Map<String, JsonNode> hosts = new LinkedHashMap<>();
        row.get("hosts").fields().forEachRemaining(host -> hosts.put(host.getKey(), host.getValue()));
        return hosts;
    }

    /** The ECMs of a request, as DefaultEngineCreateService.selectECM and EMEngineService.getEMNodes find them. */
    private static List<String> selected(Manager manager, JsonNode row, String prefix) throws IOException {
        for (Map.Entry<String, JsonNode> host : hosts(row).entrySet()) {
            manager.register(prefix + host.getKey(), LifeTest.driver(16, 8, 10), LifeTest.driver(0, 0, 0),
                    labels(host.getValue()).toArray(new Label<?>[0]));
        }
        List<Label<?>> asked = labels(row.get("request"));
        AliasServiceInstanceLabel alias = new AliasServiceInstanceLabel();
        alias.setAlias(Manager.ECM);
        asked.add(alias);
        TreeSet<String> selected = new TreeSet<>();
        for (ScoreServiceInstance one : manager.context.getBean(NodeLabelService.class)
                .getScoredNodeMapsByLabels(new AMLabelFilter().choseEMLabel(asked)).keySet()) {
            assertEquals(0, one.getScore(), "the manager scores none of them");
            if (one.getServiceInstance().getInstance().startsWith(prefix)) {
                selected.add(one.getServiceInstance().getInstance().substring(prefix.length()));
            }
        }
        return new ArrayList<>(selected);
    }

    /** Labels of Linkis, with their features. */
    private static List<Label<?>> labels(JsonNode pairs) throws IOException {
        List<Label<?>> labels = new ArrayList<>();
        for (JsonNode pair : pairs) {
            String key = pair.get(0).asText();
            Label<?> label = LabelBuilderFactoryContext.getLabelBuilderFactory().createLabel(key, pair.get(1).asText());
            // The scorer takes a label without a feature as optional.
            Feature feature = label.getFeature() == null ? Feature.OPTIONAL : label.getFeature();
            assertEquals(table("features").get(key).asText(), feature.name(), key);
            labels.add(label);
        }
        return labels;
    }

    /** The best first; equal ones in one list. */
    private static List<List<String>> ranked(JsonNode row, JsonNode features) {
        Map<String, PersistenceLabel> known = new HashMap<>();
        Map<ServiceInstance, List<PersistenceLabel>> ofHosts = new HashMap<>();
        hosts(row).forEach((name, pairs) -> ofHosts.put(Manager.ecm(name), persistent(pairs, features, known)));
        List<PersistenceLabel> asked = persistent(row.get("request"), features, known);
        Map<PersistenceLabel, List<ServiceInstance>> ofLabels = new HashMap<>();
        for (PersistenceLabel label : asked) {
            List<ServiceInstance> having = new ArrayList<>(ofHosts.keySet());
            having.removeIf(host -> !ofHosts.get(host).contains(label));
            ofLabels.put(label, having);
        }
        Map<Long, TreeSet<String>> byScore = new TreeMap<>(Collections.reverseOrder());
        for (ScoreServiceInstance one : new DefaultNodeLabelScorer().calculate(ofLabels, ofHosts, asked).keySet()) {
            long score = Math.round(one.getScore() * 1e6);
            byScore.computeIfAbsent(score, same -> new TreeSet<>()).add(one.getServiceInstance().getInstance());
        }
        List<List<String>> ranked = new ArrayList<>();
        byScore.values().forEach(names -> ranked.add(new ArrayList<>(names)));
        return ranked;
    }

    /** As rows of Linkis's table of labels. */
    private static List<PersistenceLabel> persistent(JsonNode pairs, JsonNode features, Map<String, PersistenceLabel> known) {
        List<PersistenceLabel> rows = new ArrayList<>();
        for (JsonNode pair : pairs) {
            rows.add(known.computeIfAbsent(pair.toString(), same -> {
                PersistenceLabel label = new PersistenceLabel();
                label.setId(known.size() + 1);
                label.setLabelKey(pair.get(0).asText());
                label.setStringValue(pair.get(1).asText());
                label.setFeature(Feature.valueOf(features.get(pair.get(0).asText()).asText()));
                return label;
            }));
        }
        return rows;
    }
}
