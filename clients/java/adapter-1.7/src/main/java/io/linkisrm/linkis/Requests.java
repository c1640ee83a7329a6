package io.linkisrm.linkis;

import java.util.List;
import linkis.rm.v1.EmInstance;
import linkis.rm.v1.RegisterRequest;
import linkis.rm.v1.RequestResourceRequest;
import org.apache.linkis.common.ServiceInstance;
import org.apache.linkis.manager.common.entity.node.EngineNode;
import org.apache.linkis.manager.common.entity.resource.NodeResource;
import org.apache.linkis.manager.common.entity.resource.Resource;
import org.apache.linkis.manager.label.entity.Label;
import org.apache.linkis.manager.label.service.NodeLabelService;
import org.apache.linkis.manager.rm.domain.RMLabelContainer;
import org.apache.linkis.manager.rm.service.LabelResourceService;
import org.apache.linkis.manager.rm.utils.UserConfiguration;

/** Converts Linkis's requests to those of the service. */
final class Requests {
    private final LabelResourceService resources;
    private final NodeLabelService labels;
    private final Rows rows;
    private final Engines engines;

    Requests(LabelResourceService resources, NodeLabelService labels, Rows rows, Engines engines) {
        this.resources = resources;
        this.labels = labels;
        this.rows = rows;
        this.engines = engines;
    }

    /** The labels of a request, which must name ECM, user and engine type. */
    RMLabelContainer container(List<Label<?>> list) {
        RMLabelContainer container = resources.enrichLabels(list);
        if (container.getEMInstanceLabel() == null || container.getCombinedResourceLabel() == null) {
            throw Failures.notFound("EMLabel, userCreator and engineTypeLabel cannot be null");
        }
        return container;
    }

    /** The labels of an engine, which must name the engine and its user. */
    RMLabelContainer engineContainer(List<Label<?>> list) {
        RMLabelContainer container = engines.complete(resources.enrichLabels(list));
        if (container.getEngineInstanceLabel() == null || container.getUserCreatorLabel() == null) {
            throw Failures.notFound("engine instance label is null");
        }
        return container;
    }

    /** The ECM of an engine, by its labels or by its node. */
    static EmInstance host(RMLabelContainer container, EngineNode node) {
        if (container.getEMInstanceLabel() != null) {
            return Service.em(container.getEMInstanceLabel().getServiceInstance());
        } else if (node != null && node.getEMNode() != null) {
            return Service.em(node.getEMNode().getServiceInstance());
        }
        throw Failures.notFound("The host of engine " + container.getEngineInstanceLabel() + " is not known");
    }

    /** The request of an engine that starts, with the configured maxima of its user as caps. */
    RequestResourceRequest.Builder request(RMLabelContainer container, Scope scope, NodeResource resource) {
        Resource max = UserConfiguration.getUserConfiguredResource(
                resource.getResourceType(), container.getUserCreatorLabel(), container.getEngineTypeLabel());
        if (max == null && !resource.getResourceType().name().contains("Kubernetes")) {
            throw Failures.notFound("The configuration of " + scope + " cannot be determined, so nothing is granted: see this manager's log");
        }
        RequestResourceRequest.Builder request = RequestResourceRequest.newBuilder()
                .setEm(Service.em(container.getEMInstanceLabel().getServiceInstance())).setUser(scope.user).setCreator(scope.creator)
                .setEngineType(scope.engineType).setResource(Amounts.told(resource.getMinResource(), resource.getResourceType()))
                .putAllLabels(LabelMap.of(container.getLabels()));
        if (max != null) {
            rows.configured(scope, resource.getResourceType(), max);
            request.addAllCaps(Caps.of(max));
        }
        return request;
    }

    /** The registration of an ECM, with its labels in Linkis. */
    RegisterRequest registration(ServiceInstance ecm, NodeResource resource) {
        RegisterRequest.Builder request = RegisterRequest.newBuilder().setEm(Service.em(ecm))
                .setTotal(Amounts.told(resource.getMaxResource(), resource.getResourceType()))
                .putAllLabels(LabelMap.of(labels.getNodeLabels(ecm)));
        if (resource.getMinResource() != null) {
            request.setProtectedResource(Amounts.told(resource.getMinResource(), resource.getResourceType()));
        }
        return request.build();
    }
}
