package io.linkisrm.linkis;

import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import linkis.rm.v1.Cap;
import org.apache.linkis.manager.common.entity.resource.Resource;

/**
 * How much a user may have for a creator and an engine type, by Linkis's own configuration: said with each request, so that it is judged
 * by what is configured now, and nothing has to be kept in step.
 */
final class Caps {
    /** What Linkis counts by. */
    static final List<String> LABELS = Collections.unmodifiableList(Arrays.asList("user", "creator", "engine_type"));
    /** The same for what is in a queue. */
    static final List<String> LABELS_IN_QUEUE = Collections.unmodifiableList(Arrays.asList("user", "creator", "engine_type", "queue"));
    /** The same for what is in a namespace. Linkis configures nothing there, and shows how much it is. */
    static final List<String> LABELS_IN_NAMESPACE =
            Collections.unmodifiableList(Arrays.asList("user", "creator", "engine_type", "namespace"));

    private Caps() {}

    /** The caps that a configured maximum means. The number of instances in a queue is one that Linkis itself never looks at. */
    static List<Cap> of(Resource configured) {
        Map<String, Long> here = new HashMap<>(Amounts.dimensions(configured));
        Map<String, Long> inQueue = new HashMap<>();
        for (String dimension : Arrays.asList("queue_memory", "queue_cores")) {
            if (here.containsKey(dimension)) {
                inQueue.put(dimension, here.remove(dimension));
            }
        }
        here.keySet().removeAll(Arrays.asList("queue_instances", "kubernetes_memory", "kubernetes_millicores"));
        List<Cap> caps = new ArrayList<>();
        if (!here.isEmpty()) {
            caps.add(Cap.newBuilder().addAllLabels(LABELS).putAllMax(here).build());
        }
        if (!inQueue.isEmpty()) {
            caps.add(Cap.newBuilder().addAllLabels(LABELS_IN_QUEUE).putAllMax(inQueue).build());
        }
        return caps;
    }
}
