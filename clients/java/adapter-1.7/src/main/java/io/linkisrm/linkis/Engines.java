package io.linkisrm.linkis;

import java.util.ArrayList;
import java.util.List;
import org.apache.linkis.common.ServiceInstance;
import org.apache.linkis.governance.common.conf.GovernanceCommonConf;
import org.apache.linkis.manager.am.service.engine.EngineStopService;
import org.apache.linkis.manager.common.entity.enumeration.NodeStatus;
import org.apache.linkis.manager.common.entity.metrics.NodeMetrics;
import org.apache.linkis.manager.common.entity.node.AMEMNode;
import org.apache.linkis.manager.common.entity.node.AMEngineNode;
import org.apache.linkis.manager.common.entity.node.EngineNode;
import org.apache.linkis.manager.common.entity.persistence.ECResourceInfoRecord;
import org.apache.linkis.manager.common.entity.persistence.PersistenceLabel;
import org.apache.linkis.manager.common.entity.persistence.PersistenceResource;
import org.apache.linkis.manager.common.entity.resource.NodeResource;
import org.apache.linkis.manager.common.entity.resource.Resource;
import org.apache.linkis.manager.common.protocol.engine.EngineStopRequest;
import org.apache.linkis.manager.common.utils.ManagerUtils;
import org.apache.linkis.manager.common.utils.ResourceUtils;
import org.apache.linkis.manager.dao.ECResourceRecordMapper;
import org.apache.linkis.manager.label.builder.factory.LabelBuilderFactoryContext;
import org.apache.linkis.manager.label.entity.Label;
import org.apache.linkis.manager.label.entity.em.EMInstanceLabel;
import org.apache.linkis.manager.label.entity.engine.EngineInstanceLabel;
import org.apache.linkis.manager.label.service.NodeLabelService;
import org.apache.linkis.manager.persistence.NodeManagerPersistence;
import org.apache.linkis.manager.persistence.NodeMetricManagerPersistence;
import org.apache.linkis.manager.persistence.ResourceManagerPersistence;
import org.apache.linkis.manager.rm.domain.RMLabelContainer;
import org.apache.linkis.manager.rm.service.LabelResourceService;
import org.apache.linkis.manager.rm.service.impl.ChangeType;
import org.apache.linkis.manager.rm.service.impl.ResourceLogService;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/** Linkis's rows of an engine, from its grant to its end: its node, its labels, the row of its resource, its record. */
final class Engines {
    private static final Logger LOG = LoggerFactory.getLogger(Engines.class);

    private final LabelResourceService resources;
    private final ResourceManagerPersistence resourceRows;
    private final NodeManagerPersistence nodes;
    private final NodeMetricManagerPersistence metrics;
    private final NodeLabelService labels;
    private final ResourceLogService log;
    private final ECResourceRecordMapper records;
    private final EngineStopService stopper;
    private final Tables tables;

    Engines(LabelResourceService resources, ResourceManagerPersistence resourceRows, NodeManagerPersistence nodes,
            NodeMetricManagerPersistence metrics, NodeLabelService labels, ResourceLogService log, ECResourceRecordMapper records,
            EngineStopService stopper, Tables tables) {
        this.resources = resources;
        this.resourceRows = resourceRows;
        this.nodes = nodes;
        this.metrics = metrics;
        this.labels = labels;
        this.log = log;
        this.records = records;
        this.stopper = stopper;
        this.tables = tables;
    }

    static ServiceInstance instance(String name) {
        ServiceInstance instance = new ServiceInstance();
        instance.setApplicationName(GovernanceCommonConf.ENGINE_CONN_SPRING_NAME().getValue());
        instance.setInstance(name);
        return instance;
    }

    /** Writes a grant. The engine has the name of its ticket until it has one of its own. */
    void granted(RMLabelContainer container, NodeResource resource, String ticket) {
        AMEMNode host = new AMEMNode();
        host.setServiceInstance(container.getEMInstanceLabel().getServiceInstance());
        AMEngineNode engine = new AMEngineNode();
        engine.setEMNode(host);
        engine.setServiceInstance(instance(ticket));
        engine.setNodeResource(resource);
        engine.setTicketId(ticket);
        nodes.addEngineNode(engine);
        EngineInstanceLabel label = label(engine.getServiceInstance());
        labels.addLabelToNode(engine.getServiceInstance(), label);
        resources.setEngineConnLabelResource(label, resource, container.getCombinedResourceLabel().getStringValue());
        container.getLabels().add(label);
        log.recordUserResourceAction(
                container, ticket, ChangeType.ENGINE_REQUEST(), resource.getLockedResource(), NodeStatus.Starting, null);
    }

    /** Deletes the rows of an incomplete {@link #granted}. */
    void undo(RMLabelContainer container, String ticket) {
        ServiceInstance instance = instance(ticket);
        AMEMNode host = new AMEMNode();
        host.setServiceInstance(container.getEMInstanceLabel().getServiceInstance());
        AMEngineNode engine = new AMEngineNode();
        engine.setServiceInstance(instance);
        engine.setEMNode(host);
        quietly(() -> removeRow(ticket));
        quietly(() -> labels.removeLabelsFromNode(instance, true));
        quietly(() -> nodes.deleteEngineNode(engine));
    }

    /** The row of an engine's resource; null without one. */
    PersistenceResource row(EngineInstanceLabel label) {
        return resources.getPersistenceResource(label);
    }

    /**
     * The labels of an engine, completed from its record. If engines start concurrently with a label that is new to Linkis, all but one may
     * lack that label.
     */
    RMLabelContainer complete(RMLabelContainer container) {
        EngineInstanceLabel label = container.getEngineInstanceLabel();
        if (label == null || (container.getCombinedResourceLabel() != null && container.getEMInstanceLabel() != null)) {
            return container;
        }
        PersistenceResource row = row(label);
        ECResourceInfoRecord record = row == null ? null : records.getECResourceInfoRecord(row.getTicketId());
        Scope scope = record == null ? null : Scope.parse(record.getLabelValue());
        return scope == null ? container : container(scope, row.getTicketId(), record, label.getInstance());
    }

    /** Writes a confirmation: the locked amount becomes the used amount. */
    void used(RMLabelContainer container, PersistenceResource row, Resource granted, String application) {
        NodeResource resource = ResourceUtils.fromPersistenceResource(row);
        resource.setUsedResource(Amounts.withApplication(granted, application));
        resource.setLockedResource(Amounts.nothing(granted, resource.getResourceType()));
        EngineInstanceLabel label = container.getEngineInstanceLabel();
        resources.setLabelResource(label, resource, container.getCombinedResourceLabel().getStringValue());
        log.recordUserResourceAction(container, row.getTicketId(), ChangeType.ENGINE_INIT(),
                Amounts.withApplication(granted, ""), NodeStatus.Running, null);
    }

    /** Writes a confirmation that another manager should have written. */
    void used(String ticket, String application) throws Exception {
        tables.inTurn(ticket, () -> {
            PersistenceResource row = resourceRows.getNodeResourceByTicketId(ticket);
            ECResourceInfoRecord record = records.getECResourceInfoRecord(ticket);
            Scope scope = record == null ? null : Scope.parse(record.getLabelValue());
            if (row != null && row.getUsedResource() == null && scope != null) {
                RMLabelContainer container = container(scope, ticket, record, tables.instanceOf(ticket));
                used(container, row, ResourceUtils.fromPersistenceResource(row).getLockedResource(), application);
            }
            return null;
        });
    }

    /** Writes a changed use of an engine. */
    void reported(RMLabelContainer container, PersistenceResource row, Resource used) {
        NodeResource resource = ResourceUtils.fromPersistenceResource(row);
        resource.setUsedResource(used);
        resources.setLabelResource(
                container.getEngineInstanceLabel(), resource, container.getCombinedResourceLabel().getStringValue());
    }

    /** Writes the end of an engine that Linkis reports: closes its record and deletes its row. */
    void released(EngineNode engine, RMLabelContainer container, PersistenceResource row) throws Exception {
        tables.inTurn(row.getTicketId(), () -> {
            if (resourceRows.getNodeResourceByTicketId(row.getTicketId()) != null) {
                NodeMetrics last = metrics.getNodeMetrics(engine);
                NodeStatus status = engine.getNodeStatus() == null ? statusAtEnd(last) : engine.getNodeStatus();
                String told = last == null || last.getHeartBeatMsg() == null ? "" : last.getHeartBeatMsg();
                close(container, row, status, told);
                removeRow(row.getTicketId());
            }
            return null;
        });
    }

    /**
     * Writes the end of a ticket that Linkis did not report, like {@link #released}. Stops the engine if it has started, because its
     * amounts are free for other engines. Has no effect if that is done already.
     */
    void ended(String ticket, String how) throws Exception {
        String instance = tables.inTurn(ticket, () -> {
            PersistenceResource row = resourceRows.getNodeResourceByTicketId(ticket);
            if (row == null) {
                return null;
            }
            ECResourceInfoRecord record = records.getECResourceInfoRecord(ticket);
            Scope scope = record == null ? null : Scope.parse(record.getLabelValue());
            if (scope != null) {
                close(container(scope, ticket, record, record.getServiceInstance()), row, NodeStatus.Failed, null);
            }
            removeRow(ticket);
            return tables.instanceOf(ticket);
        });
        if (instance != null && !instance.equals(ticket)) {
            LOG.warn("linkis-rm: the ticket {} has ended ({}): its engine {} is stopped", ticket, how, instance);
            stop(instance(instance));
        }
    }

    /** Stops an engine, in the background. */
    void stop(ServiceInstance engine) {
        stopper.asyncStopEngine(new EngineStopRequest(engine, ManagerUtils.getAdminUser()));
    }

    /** Stops the engine of a ticket, if Linkis has one. */
    void stop(String ticket) throws Exception {
        String instance = tables.instanceOf(ticket);
        if (instance != null) {
            stop(instance(instance));
        }
    }

    private void close(RMLabelContainer container, PersistenceResource row, NodeStatus status, String told) {
        NodeResource resource = ResourceUtils.fromPersistenceResource(row);
        Resource held = resource.getUsedResource() == null ? resource.getLockedResource() : resource.getUsedResource();
        log.recordUserResourceAction(container, row.getTicketId(), ChangeType.ENGINE_CLEAR(), held, status, told);
    }

    private void removeRow(String ticket) {
        for (PersistenceLabel label : resourceRows.getLabelsByTicketId(ticket)) {
            resources.removeResourceByLabel(label);
        }
    }

    private static RMLabelContainer container(Scope scope, String ticket, ECResourceInfoRecord record, String instance) {
        List<Label<?>> labels = new ArrayList<>();
        labels.add(scope.userCreator());
        labels.add(scope.engineTypeLabel());
        labels.add(label(instance(instance == null ? ticket : instance)));
        if (record.getEcmInstance() != null) {
            EMInstanceLabel host = LabelBuilderFactoryContext.getLabelBuilderFactory().createLabel(EMInstanceLabel.class);
            host.setServiceName(GovernanceCommonConf.ENGINE_CONN_MANAGER_SPRING_NAME().getValue());
            host.setInstance(record.getEcmInstance());
            labels.add(host);
        }
        return new RMLabelContainer(labels);
    }

    private static EngineInstanceLabel label(ServiceInstance engine) {
        EngineInstanceLabel label = LabelBuilderFactoryContext.getLabelBuilderFactory().createLabel(EngineInstanceLabel.class);
        label.setServiceName(engine.getApplicationName());
        label.setInstance(engine.getInstance());
        return label;
    }

    private static NodeStatus statusAtEnd(NodeMetrics last) {
        NodeStatus status = last == null || last.getStatus() == null ? NodeStatus.Failed : NodeStatus.values()[last.getStatus()];
        return NodeStatus.isCompleted(status) ? status : NodeStatus.Failed;
    }

    private static void quietly(Runnable step) {
        try {
            step.run();
        } catch (RuntimeException e) {
            LOG.info("linkis-rm: nothing to undo: {}", e.toString());
        }
    }
}
