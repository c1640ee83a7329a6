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
 * Caps of a user, creator and engine type from Linkis's own configuration. Each request carries them, so that it is decided by the current
 * configuration without synchronization.
 */
final class Caps {
    /** Label names that Linkis counts by. */
    static final List<String> LABELS = Collections.unmodifiableList(Arrays.asList("user", "creator", "engine_type"));
    /** Label names for amounts in a queue. */
    static final List<String> LABELS_IN_QUEUE = Collections.unmodifiableList(Arrays.asList("user", "creator", "engine_type", "queue"));
    /** Label names for amounts in a namespace. Linkis configures no maximum there, and shows the use. */
    static final List<String> LABELS_IN_NAMESPACE =
            Collections.unmodifiableList(Arrays.asList("user", "creator", "engine_type", "namespace"));

    private Caps() {}

    /** Caps of a configured maximum. The number of instances in a queue is omitted, because Linkis itself never checks it. */
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
