package io.linkisrm.linkis;

import io.linkisrm.client.ServiceException;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import java.util.Map;
import java.util.UUID;
import javax.sql.DataSource;
import linkis.rm.v1.EmInstance;
import linkis.rm.v1.EmResource;
import linkis.rm.v1.EngineInstance;
import linkis.rm.v1.RequestResourceRequest;
import linkis.rm.v1.RequestResourceResponse;
import linkis.rm.v1.ResourceInitedRequest;
import linkis.rm.v1.ResourceReportedRequest;
import linkis.rm.v1.Ticket;
import org.apache.linkis.common.ServiceInstance;
import org.apache.linkis.manager.am.service.engine.EngineStopService;
import org.apache.linkis.manager.am.vo.CanCreateECRes;
import org.apache.linkis.manager.common.conf.RMConfiguration;
import org.apache.linkis.manager.common.entity.node.EngineNode;
import org.apache.linkis.manager.common.entity.persistence.PersistenceLabel;
import org.apache.linkis.manager.common.entity.persistence.PersistenceLock;
import org.apache.linkis.manager.common.entity.persistence.PersistenceResource;
import org.apache.linkis.manager.common.entity.resource.NodeResource;
import org.apache.linkis.manager.common.entity.resource.Resource;
import org.apache.linkis.manager.common.exception.RMErrorException;
import org.apache.linkis.manager.common.exception.RMWarnException;
import org.apache.linkis.manager.common.protocol.engine.EngineCreateRequest;
import org.apache.linkis.manager.common.utils.ResourceUtils;
import org.apache.linkis.manager.dao.ECResourceRecordMapper;
import org.apache.linkis.manager.label.entity.Label;
import org.apache.linkis.manager.label.service.NodeLabelService;
import org.apache.linkis.manager.persistence.NodeManagerPersistence;
import org.apache.linkis.manager.persistence.NodeMetricManagerPersistence;
import org.apache.linkis.manager.persistence.ResourceManagerPersistence;
import org.apache.linkis.manager.rm.AvailableResource;
import org.apache.linkis.manager.rm.NotEnoughResource;
import org.apache.linkis.manager.rm.ResourceInfo;
import org.apache.linkis.manager.rm.ResultResource;
import org.apache.linkis.manager.rm.domain.RMLabelContainer;
import org.apache.linkis.manager.rm.exception.RMErrorCode;
import org.apache.linkis.manager.rm.external.service.ExternalResourceService;
import org.apache.linkis.manager.rm.service.LabelResourceService;
import org.apache.linkis.manager.rm.service.impl.DefaultResourceManager;
import org.apache.linkis.manager.rm.service.impl.ResourceLogService;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;
import org.springframework.beans.factory.annotation.Autowired;
import org.springframework.context.SmartLifecycle;
import org.springframework.core.env.Environment;

/**
 * Linkis's resource manager with the decisions of linkis-rm. It writes the same rows as Linkis's own into Linkis's tables, from the replies
 * of the service. The rows decide nothing.
 */
public class RemoteResourceManager extends DefaultResourceManager implements SmartLifecycle {
    private static final Logger LOG = LoggerFactory.getLogger(RemoteResourceManager.class);

    @Autowired private Environment environment;
    @Autowired private DataSource database;
    @Autowired private LabelResourceService resources;
    @Autowired private ResourceManagerPersistence resourceRows;
    @Autowired private NodeManagerPersistence nodes;
    @Autowired private NodeMetricManagerPersistence metrics;
    @Autowired private NodeLabelService labels;
    @Autowired private ResourceLogService log;
    @Autowired private ECResourceRecordMapper records;
    @Autowired private EngineStopService stopper;
    @Autowired private ExternalResourceService external;

    private Settings settings;
    private Service service;
    private Engines engines;
    private Requests requests;
    private Mirror mirror;
    private Holds holds;
    private Own own;
    private Unanswered unanswered;
    private Background background;
    /** Lifetime of an unused grant; the service's default if this is not positive. */
    private long unusedMillis = RMConfiguration.RM_WAIT_EVENT_TIME_OUT.getValue();
    private volatile boolean running;

    @Override
    public void afterPropertiesSet() {
        super.afterPropertiesSet();
        settings = Settings.of(environment);
        service = Connections.open(settings);
        Tables tables = new Tables(database);
        engines = new Engines(resources, resourceRows, nodes, metrics, labels, log, records, stopper, tables);
        Rows rows = new Rows(service, resources, tables);
        requests = new Requests(resources, labels, rows, engines);
        mirror = new Mirror(rows);
        holds = new Holds(service);
        own = new Own();
        unanswered = new Unanswered(service);
        background = new Background(new Feed(service, tables, mirror, engines, own, new Position(database)),
                new Heartbeats(service, tables, engines, this::registerAgain), new Sweep(service, tables, engines, mirror), unanswered);
    }

    @Override
    public void start() {
        mirror.start();
        background.start();
        running = true;
        LOG.info("linkis-rm: resources are managed by {}", settings.address);
    }

    @Override
    public void stop() {
        running = false;
        background.stop();
        mirror.stop();
        service.client().close();
    }

    @Override
    public boolean isRunning() {
        return running;
    }

    @Override
    public void register(ServiceInstance ecm, NodeResource resource) {
        asked(() -> service.register(requests.registration(ecm, resource)));
        if (resources.getLabelResource(Rows.label(ecm)) == null) {
            resources.setLabelResource(Rows.label(ecm), resource, Rows.label(ecm).getStringValue());
        }
        mirror.show(ecm);
    }

    @Override
    public void unregister(ServiceInstance ecm) {
        asked(() -> {
            service.unregister(Service.em(ecm));
            return null;
        });
        if (resources.getLabelResource(Rows.label(ecm)) != null) {
            resources.removeResourceByLabel(Rows.label(ecm));
        }
    }

    @Override
    public ResultResource requestResource(List<Label<?>> list, NodeResource resource, EngineCreateRequest request) {
        return requestResource(list, resource, request, -1);
    }

    @Override
    public ResultResource requestResource(List<Label<?>> list, NodeResource resource, EngineCreateRequest request, long wait) {
        RMLabelContainer container = requests.container(list);
        resource.setLockedResource(resource.getMinResource());
        Scope scope = Scope.of(container);
        RequestResourceRequest.Builder asked;
        try {
            AcrossCluster.check(container, resource, request, external);
            asked = requests.request(container, scope, resource);
        } catch (RMWarnException e) {
            return new NotEnoughResource(e.getMessage());
        }
        Duration inLine = settings.wait.toMillis() > wait && wait > 0 ? Duration.ofMillis(wait) : settings.wait;
        if (!inLine.isZero()) {
            asked.setWaitTimeout(Service.told(inLine));
        }
        if (unusedMillis > 0) {
            asked.setLockTtl(Service.told(Duration.ofMillis(unusedMillis)));
        }
        // The id makes repetitions of the request one request.
        asked.setRequestId(UUID.randomUUID().toString());
        RequestResourceResponse answer;
        try {
            answer = service.request(asked.build(), settings.client.timeout().plus(inLine));
        } catch (ServiceException e) {
            if (e.isInDoubt()) {
                unanswered.add(asked.build());
            }
            if (Failures.isOfHost(e)) {
                // Linkis tries again, perhaps on another ECM.
                return new NotEnoughResource(Failures.noHost(e).getMessage());
            }
            throw Failures.of(e);
        }
        if (!answer.hasAvailable()) {
            if (!Refusal.isByHost(answer.getNotEnough())) {
                mirror.show(scope);
            }
            return new NotEnoughResource(Refusal.message(answer.getNotEnough()));
        }
        String ticket = answer.getAvailable().getTicketId();
        boolean written = false;
        try {
            engines.granted(container, resource, ticket);
            written = true;
        } finally {
            // Catches every exception, because Scala throws undeclared ones.
            if (!written) {
                giveBack(container, ticket);
            }
        }
        show(container, ticket, "granted");
        return new AvailableResource(ticket);
    }

    @Override
    public CanCreateECRes canRequestResource(List<Label<?>> list, NodeResource resource, EngineCreateRequest request) {
        RMLabelContainer container = requests.container(list);
        Scope scope = Scope.of(container);
        CanCreateECRes result = new CanCreateECRes();
        RequestResourceResponse answer;
        try {
            RequestResourceRequest asked = requests.request(container, scope, resource).setDryRun(true).build();
            answer = asked(() -> service.request(asked, settings.client.timeout()));
        } catch (RMWarnException e) {
            result.setCanCreateEC(false);
            result.setReason(e.getMessage());
            return result;
        }
        result.setCanCreateEC(answer.hasAvailable());
        if (answer.hasNotEnough()) {
            result.setReason(Refusal.reasonForConsole(answer.getNotEnough()));
        }
        ServiceInstance ecm = container.getEMInstanceLabel().getServiceInstance();
        mirror.show(ecm, scope);
        result.setEcmResource(left(resources.getLabelResource(container.getEMInstanceLabel())));
        result.setLabelResource(left(resources.getLabelResource(container.getCombinedResourceLabel())));
        return result;
    }

    @Override
    public void resourceUsed(List<Label<?>> list, NodeResource used) {
        RMLabelContainer container = requests.engineContainer(list);
        ServiceInstance engine = container.getEngineInstanceLabel().getServiceInstance();
        PersistenceResource row = engines.row(container.getEngineInstanceLabel());
        EngineNode node = nodes.getEngineNode(engine);
        String ticket = row != null && row.getTicketId() != null ? row.getTicketId() : node == null ? null : node.getTicketId();
        if (ticket == null) {
            throw Failures.notFound("No locked resource found by engine " + container.getEngineInstanceLabel());
        }
        NodeResource held = ResourceUtils.fromPersistenceResource(row);
        Resource granted = held == null ? null : held.getLockedResource();
        String application = used == null ? "" : Amounts.application(used.getUsedResource());
        ResourceInitedRequest.Builder inited = ResourceInitedRequest.newBuilder().setTicketId(ticket).setEm(Requests.host(container, node))
                .setUser(container.getUserCreatorLabel().getUser())
                .setEngine(EngineInstance.newBuilder().setApplicationName(engine.getApplicationName()).setInstance(engine.getInstance()));
        // As in Linkis, the granted amounts count, regardless of the engine's report. Only its application is taken.
        if (granted != null && !application.isEmpty()) {
            inited.setUsed(Amounts.told(Amounts.withApplication(granted, application), held.getResourceType()));
        }
        try {
            service.inited(inited.build());
        } catch (ServiceException e) {
            if (Failures.isOver(e)) {
                // Linkis only logs the exception, and the engine would continue to use freed amounts.
                engines.stop(engine);
            }
            throw Failures.of(e);
        }
        if (row != null && held.getUsedResource() == null) {
            engines.used(container, row, granted, application);
        }
        show(container, ticket, "inited");
    }

    @Override
    public void resourceReport(List<Label<?>> list, NodeResource report) {
        RMLabelContainer container = requests.engineContainer(list);
        PersistenceResource row = engines.row(container.getEngineInstanceLabel());
        if (row == null || row.getTicketId() == null || report.getUsedResource() == null) {
            throw Failures.notFound("No used resource found by engine " + container.getEngineInstanceLabel());
        }
        EngineNode node = nodes.getEngineNode(container.getEngineInstanceLabel().getServiceInstance());
        Ticket ticket = asked(() -> service.reported(ResourceReportedRequest.newBuilder().setTicketId(row.getTicketId())
                .setUser(container.getUserCreatorLabel().getUser()).setEm(Requests.host(container, node))
                .setUsed(Amounts.told(report.getUsedResource(), report.getResourceType())).build()));
        engines.reported(container, row, Amounts.read(ticket.getUsed()));
        mirror.show(container.getEMInstanceLabel().getServiceInstance(), Scope.of(container));
    }

    @Override
    public void resourceReleased(EngineNode engine) {
        RMLabelContainer container = resources.enrichLabels(engine.getLabels());
        PersistenceResource row = container.getEngineInstanceLabel() == null ? null : engines.row(container.getEngineInstanceLabel());
        String ticket = ticketOf(engine, row);
        if (ticket == null) {
            throw Failures.notFound("No used resource found by engine " + engine.getServiceInstance());
        }
        // If this fails, the row stays, and Sweep releases the ticket when the service answers again.
        asked(() -> {
            service.released(ticket);
            return null;
        });
        if (row == null) {
            return;
        }
        boolean known = container.getCombinedResourceLabel() != null;
        try {
            if (known) {
                engines.released(engine, container, row);
            } else {
                // Labels were lost: Linkis's record has the scope of the engine.
                engines.ended(ticket, "released");
            }
        } catch (Exception e) {
            throw new RMErrorException(RMErrorCode.LABEL_RESOURCE_NOT_FOUND.getErrorCode(), "released, but its rows remain for now: " + e, e);
        }
        if (known && container.getEMInstanceLabel() != null) {
            show(container, ticket, "released");
        }
    }

    @Override
    public ResourceInfo getResourceInfo(ServiceInstance[] instances) {
        ResourceInfo info = super.getResourceInfo(instances);
        List<EmInstance> ecms = new ArrayList<>();
        for (ServiceInstance instance : instances) {
            if (Heartbeats.application().equals(instance.getApplicationName())) {
                ecms.add(Service.em(instance));
            }
        }
        try {
            Map<EmInstance, EmResource> found = new java.util.HashMap<>();
            service.ems(ecms).forEach(em -> found.put(em.getEm(), em));
            info.resourceInfo().forEach(node -> {
                EmResource em = found.get(Service.em(node.getServiceInstance()));
                if (em != null) {
                    node.setNodeResource(Rows.shown(em));
                }
            });
        } catch (ServiceException e) {
            // The list is displayed and decides nothing, so the tables suffice.
            LOG.warn("linkis-rm: the ECMs are shown with their state of the last reply: {}", e.getMessage());
        }
        return info;
    }

    @Override
    public void resetResource(PersistenceLabel label, NodeResource resource) {
        Object row = Holds.row(label);
        if (row == null) {
            // The service does not count this label.
            super.resetResource(label, resource);
            return;
        }
        asked(() -> {
            // Linkis locks what it resets, and the service does not repair what has a hold.
            holds.release(label);
            if (row instanceof Scope) {
                service.repair((Scope) row);
            } else {
                service.repair(Service.em((ServiceInstance) row));
            }
            return null;
        });
        mirror.changed(Collections.singleton(row));
    }

    @Override
    public PersistenceLock tryLockOneLabel(Label<?> label, long timeOut, String user) {
        // Linkis's lock excludes other managers; the hold stops changes in the service meanwhile.
        PersistenceLock lock = super.tryLockOneLabel(label, timeOut, user);
        try {
            holds.hold(label, user);
        } catch (ServiceException e) {
            super.unLock(lock);
            throw Failures.of(e);
        }
        return lock;
    }

    @Override
    public void unLock(PersistenceLock lock) {
        try {
            holds.release(lock);
        } catch (ServiceException e) {
            LOG.warn("linkis-rm: the hold of {} ends at its deadline: {}", lock.getLockObject(), e.getMessage());
        } finally {
            super.unLock(lock);
        }
    }

    /** Registers an ECM again that Linkis has, and that was lost in the service while it was silent. */
    private void registerAgain(ServiceInstance ecm) {
        NodeResource row = resources.getLabelResource(Rows.label(ecm));
        if (row != null) {
            service.register(requests.registration(ecm, row));
            mirror.changed(Collections.singleton(ecm));
        }
    }

    /** Waits until the rows of a change are written that happens to a ticket once. */
    private void show(RMLabelContainer container, String ticket, String action) {
        if (mirror.show(container.getEMInstanceLabel().getServiceInstance(), Scope.of(container))) {
            own.shown(ticket, action);
        }
    }

    private void giveBack(RMLabelContainer container, String ticket) {
        LOG.error("linkis-rm: the grant {} is released, because its rows in Linkis's tables cannot be written", ticket);
        engines.undo(container, ticket);
        try {
            service.released(ticket);
        } catch (ServiceException e) {
            LOG.error("linkis-rm: {} cannot be released, and expires", ticket, e);
        }
    }

    /** The ticket by its rows in Linkis; without rows, by the engine in the service. */
    private String ticketOf(EngineNode engine, PersistenceResource row) {
        if (row != null && row.getTicketId() != null) {
            return row.getTicketId();
        } else if (engine.getTicketId() != null) {
            return engine.getTicketId();
        }
        Ticket ticket = asked(() -> service.ticketOf(engine.getServiceInstance()));
        return ticket == null ? null : ticket.getTicketId();
    }

    private static String left(NodeResource row) {
        return row == null ? null : ResourceUtils.serializeResource(row.getLeftResource());
    }

    private interface Call<T> {
        T call();
    }

    private static <T> T asked(Call<T> call) {
        try {
            return call.call();
        } catch (ServiceException e) {
            throw Failures.of(e);
        }
    }
}
