package io.linkisrm.linkis;

import java.sql.SQLException;
import java.util.Arrays;
import java.util.Collections;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import linkis.rm.v1.EmResource;
import linkis.rm.v1.ScopeUsage;
import org.apache.linkis.common.ServiceInstance;
import org.apache.linkis.manager.common.entity.resource.CommonNodeResource;
import org.apache.linkis.manager.common.entity.resource.NodeResource;
import org.apache.linkis.manager.common.entity.resource.Resource;
import org.apache.linkis.manager.common.entity.resource.ResourceType;
import org.apache.linkis.manager.common.utils.ResourceUtils;
import org.apache.linkis.manager.label.builder.factory.LabelBuilderFactoryContext;
import org.apache.linkis.manager.label.entity.CombinedLabel;
import org.apache.linkis.manager.label.entity.Label;
import org.apache.linkis.manager.label.entity.em.EMInstanceLabel;
import org.apache.linkis.manager.rm.service.LabelResourceService;

/** Writes the rows of ECMs and users from the state of the service. */
final class Rows implements Mirror.Writer {
    private static final int CONFIGURED_MAX = 10_000;

    private final Service service;
    private final LabelResourceService resources;
    private final Tables tables;
    /** Last configured maximum of each scope. The least recently used one is evicted, and its row keeps its maximum. */
    private final Map<Scope, Configured> configured = Collections.synchronizedMap(new LinkedHashMap<Scope, Configured>(16, 0.75f, true) {
        private static final long serialVersionUID = 1L;

        @Override
        protected boolean removeEldestEntry(Map.Entry<Scope, Configured> eldest) {
            return size() > CONFIGURED_MAX;
        }
    });

    private static final class Configured {
        private final ResourceType type;
        private final Resource max;

        private Configured(ResourceType type, Resource max) {
            this.type = type;
            this.max = max;
        }
    }

    Rows(Service service, LabelResourceService resources, Tables tables) {
        this.service = service;
        this.resources = resources;
        this.tables = tables;
    }

    /** The label of an ECM's row. */
    static EMInstanceLabel label(ServiceInstance ecm) {
        EMInstanceLabel label = LabelBuilderFactoryContext.getLabelBuilderFactory().createLabel(EMInstanceLabel.class);
        label.setServiceName(ecm.getApplicationName());
        label.setInstance(ecm.getInstance());
        return label;
    }

    /** An ECM as the console shows it. */
    static NodeResource shown(EmResource em) {
        NodeResource shown = new CommonNodeResource();
        shown.setResourceType(Amounts.type(em.getTotal()));
        shown.setMaxResource(Amounts.read(em.getTotal()));
        shown.setMinResource(Amounts.read(em.getProtectedResource()));
        shown.setUsedResource(Amounts.read(em.getUsed()));
        shown.setLockedResource(Amounts.read(em.getLocked()));
        shown.setLeftResource(Amounts.read(em.getLeft()));
        return shown;
    }

    /** Sets the maximum in a user's row. */
    void configured(Scope scope, ResourceType type, Resource max) {
        configured.put(scope, new Configured(type, max));
    }

    @Override
    public void write(Object row) throws Exception {
        tables.inTurn(row instanceof Scope ? row.toString() : ((ServiceInstance) row).getInstance(), () -> {
            if (row instanceof Scope) {
                write((Scope) row);
            } else {
                write((ServiceInstance) row);
            }
            return null;
        });
    }

    private void write(ServiceInstance ecm) throws SQLException {
        EMInstanceLabel label = label(ecm);
        NodeResource row = resources.getLabelResource(label);
        if (row == null && !tables.isNode(ecm.getInstance())) {
            // The row is another Linkis's, or has no owner.
            return;
        }
        EmResource em = service.em(Service.em(ecm));
        if (em == null) {
            if (row != null) {
                // The ECM disappeared without Linkis removing it: the row keeps its capacity for its return.
                Resource nothing = Amounts.nothing(row.getMaxResource(), row.getResourceType());
                String before = text(row);
                row.setUsedResource(nothing);
                row.setLockedResource(nothing);
                row.setLeftResource(nothing);
                write(label, row, before, label.getStringValue());
            }
            return;
        }
        NodeResource shown = shown(em);
        if (row != null) {
            shown.setExpectedResource(row.getExpectedResource());
        }
        write(label, shown, text(row), label.getStringValue());
    }

    /** Often another manager has written an equal row already. */
    private void write(Label<?> label, NodeResource row, String before, String source) {
        if (!text(row).equals(before)) {
            resources.setLabelResource(label, row, source);
        }
    }

    private static String text(NodeResource row) {
        return row == null ? null : ResourceUtils.toJSONString(Arrays.asList(row.getMaxResource(), row.getMinResource(),
                row.getUsedResource(), row.getLockedResource(), row.getLeftResource(), row.getExpectedResource()));
    }

    private void write(Scope scope) {
        CombinedLabel label = scope.combined();
        NodeResource row = resources.getLabelResource(label);
        Configured wanted = configured.get(scope);
        String before = text(row);
        if (row == null) {
            if (wanted == null) {
                // This manager has no request of this scope: the manager with the request writes the row.
                return;
            }
            row = new CommonNodeResource();
            row.setResourceType(wanted.type);
            row.setUsedResource(Resource.initResource(wanted.type));
            row.setLockedResource(Resource.initResource(wanted.type));
        }
        ResourceType type = row.getResourceType();
        Resource max = wanted == null ? row.getMaxResource() : wanted.max;
        if (wanted != null && wanted.type != type) {
            max = Amounts.of(type, Amounts.dimensions(max), Amounts.place(max));
        }
        Held held = Held.of(service.scopes(scope, Amounts.hasPlace(type)));
        row.setMaxResource(max);
        row.setMinResource(Resource.initResource(type));
        row.setUsedResource(Amounts.of(type, held.used, held.place(held.usedIn, row.getUsedResource())));
        row.setLockedResource(Amounts.of(type, held.locked, held.place(held.lockedIn, row.getLockedResource())));
        Map<String, Long> left = new HashMap<>();
        Amounts.dimensions(max).forEach((dimension, amount) -> left.put(dimension,
                amount - held.used.getOrDefault(dimension, 0L) - held.locked.getOrDefault(dimension, 0L)));
        Resource last = row.getLeftResource() == null ? max : row.getLeftResource();
        row.setLeftResource(Amounts.of(type, left, held.place(held.everywhere(), last)));
        write(label, row, before, scope.toString());
    }

    /** The use of a scope by any further labels, and its queues or namespaces. */
    private static final class Held {
        private final Map<String, Long> used = new HashMap<>();
        private final Map<String, Long> locked = new HashMap<>();
        private final Set<String> usedIn = new java.util.TreeSet<>();
        private final Set<String> lockedIn = new java.util.TreeSet<>();

        static Held of(List<ScopeUsage> scopes) {
            Held held = new Held();
            for (ScopeUsage scope : scopes) {
                String place = scope.getLabelsOrDefault("queue", scope.getLabelsOrDefault("namespace", ""));
                int labels = scope.getLabelsCount();
                boolean here = labels == Caps.LABELS.size();
                boolean placed = labels == Caps.LABELS.size() + 1 && !place.isEmpty();
                if (here || placed) {
                    held.add(scope.getUsedMap(), place, placed, held.used, held.usedIn);
                    held.add(scope.getLockedMap(), place, placed, held.locked, held.lockedIn);
                }
            }
            return held;
        }

        private void add(Map<String, Long> amounts, String place, boolean placed, Map<String, Long> sums, Set<String> places) {
            amounts.forEach((dimension, amount) -> {
                boolean ofPlace = dimension.startsWith("queue_") || dimension.startsWith("kubernetes_");
                if (ofPlace == placed && amount != 0) {
                    sums.merge(dimension, amount, Long::sum);
                    if (placed) {
                        places.add(place);
                    }
                }
            });
        }

        private Set<String> everywhere() {
            Set<String> places = new java.util.TreeSet<>(usedIn);
            places.addAll(lockedIn);
            return places;
        }

        /** Linkis shows the queue of the last request. It stays while the scope has use in it. */
        private String place(Set<String> places, Resource last) {
            String before = Amounts.place(last);
            return places.isEmpty() || places.contains(before) ? before : places.iterator().next();
        }
    }
}
