package io.linkisrm.it;

import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.module.scala.DefaultScalaModule;
import io.linkisrm.linkis.AdapterConfiguration;
import io.linkisrm.linkis.RemoteResourceManager;
import java.lang.reflect.Field;
import java.lang.reflect.Proxy;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.Callable;
import javax.servlet.http.Cookie;
import javax.servlet.http.HttpServletRequest;
import javax.sql.DataSource;
import org.apache.ibatis.session.SqlSessionFactory;
import org.apache.linkis.common.ServiceInstance;
import org.apache.linkis.manager.PersistenceSpringConfiguration;
import org.apache.linkis.manager.am.converter.DefaultMetricsConverter;
import org.apache.linkis.manager.am.locker.DefaultEngineNodeLocker;
import org.apache.linkis.manager.am.manager.DefaultEngineNodeManager;
import org.apache.linkis.manager.am.pointer.DefaultNodePointerBuilder;
import org.apache.linkis.manager.am.service.engine.EngineStopService;
import org.apache.linkis.manager.common.constant.AMConstant;
import org.apache.linkis.manager.common.entity.enumeration.NodeStatus;
import org.apache.linkis.manager.common.entity.node.AMEMNode;
import org.apache.linkis.manager.common.entity.node.AMEngineNode;
import org.apache.linkis.manager.common.entity.node.EngineNode;
import org.apache.linkis.manager.common.entity.resource.CommonNodeResource;
import org.apache.linkis.manager.common.entity.resource.NodeResource;
import org.apache.linkis.manager.common.entity.resource.Resource;
import org.apache.linkis.manager.common.entity.resource.ResourceType;
import org.apache.linkis.manager.common.entity.resource.YarnResource;
import org.apache.linkis.manager.common.protocol.engine.EngineCreateRequest;
import org.apache.linkis.manager.common.protocol.engine.EngineStopRequest;
import org.apache.linkis.manager.common.protocol.resource.ResourceUsedProtocol;
import org.apache.linkis.manager.label.builder.factory.LabelBuilderFactory;
import org.apache.linkis.manager.label.builder.factory.LabelBuilderFactoryContext;
import org.apache.linkis.manager.label.entity.Label;
import org.apache.linkis.manager.label.entity.em.EMInstanceLabel;
import org.apache.linkis.manager.label.entity.engine.EngineTypeLabel;
import org.apache.linkis.manager.label.entity.engine.UserCreatorLabel;
import org.apache.linkis.manager.label.entity.node.AliasServiceInstanceLabel;
import org.apache.linkis.manager.label.score.DefaultNodeLabelScorer;
import org.apache.linkis.manager.label.service.NodeLabelService;
import org.apache.linkis.manager.label.service.impl.DefaultNodeLabelService;
import org.apache.linkis.manager.label.service.impl.DefaultResourceLabelService;
import org.apache.linkis.manager.persistence.NodeManagerPersistence;
import org.apache.linkis.manager.rm.AvailableResource;
import org.apache.linkis.manager.rm.ResultResource;
import org.apache.linkis.manager.rm.external.service.ExternalResourceService;
import org.apache.linkis.manager.rm.message.RMMessageService;
import org.apache.linkis.manager.rm.restful.RMMonitorRest;
import org.apache.linkis.manager.rm.service.ResourceLockService;
import org.apache.linkis.manager.rm.service.impl.DefaultResourceManager;
import org.apache.linkis.manager.rm.service.impl.LabelResourceServiceImpl;
import org.apache.linkis.manager.rm.service.impl.ResourceLogService;
import org.apache.linkis.manager.rm.service.impl.UserResourceService;
import org.apache.linkis.server.Message;
import org.apache.linkis.server.security.SSOUtils;
import org.mybatis.spring.SqlSessionFactoryBean;
import org.mybatis.spring.annotation.MapperScan;
import org.springframework.context.annotation.AnnotationConfigApplicationContext;
import org.springframework.context.annotation.Bean;
import org.springframework.context.annotation.Configuration;
import org.springframework.core.env.MapPropertySource;
import org.springframework.core.io.support.PathMatchingResourcePatternResolver;
import org.springframework.jdbc.datasource.DataSourceTransactionManager;
import org.springframework.transaction.PlatformTransactionManager;
import org.springframework.transaction.annotation.EnableTransactionManagement;
import scala.runtime.BoxedUnit;

/**
 * Linkis's resource manager with its own classes, Spring beans and mappers. A cluster with free capacity replaces YARN, and stopped engines
 * are cleared as Linkis does after killing them.
 */
final class Manager implements AutoCloseable {
    static final String ECM = "linkis-cg-engineconnmanager";
    static final String EC = "linkis-cg-engineconn";
    private static final LabelBuilderFactory LABELS = LabelBuilderFactoryContext.getLabelBuilderFactory();

    final AnnotationConfigApplicationContext context = new AnnotationConfigApplicationContext();
    final DefaultResourceManager resources;

    @Configuration
    @EnableTransactionManagement
    @MapperScan(basePackages = "org.apache.linkis.manager.dao")
    static class Database {
        @Bean
        SqlSessionFactory sqlSessionFactory(DataSource source) throws Exception {
            SqlSessionFactoryBean factory = new SqlSessionFactoryBean();
            PathMatchingResourcePatternResolver files = new PathMatchingResourcePatternResolver();
            factory.setDataSource(source);
            factory.setConfigLocation(files.getResource("classpath:/mybatis-config.xml"));
            List<org.springframework.core.io.Resource> mappers =
                    new ArrayList<>(Arrays.asList(files.getResources("classpath*:mapper/common/*ManagerMapper.xml")));
            mappers.addAll(Arrays.asList(files.getResources("classpath*:mapper/common/ECResourceRecordMapper.xml")));
            factory.setMapperLocations(mappers.toArray(new org.springframework.core.io.Resource[0]));
            return factory.getObject();
        }

        @Bean
        PlatformTransactionManager transactions(DataSource source) {
            return new DataSourceTransactionManager(source);
        }
    }

    /** Linkis's own, or, with an address, the adapter. */
    Manager(DataSource source, String address) {
        this(source, address == null ? null : Map.of("linkis.rm.address", address));
    }

    /** The adapter with these lines of configuration; without lines, Linkis's own. */
    Manager(DataSource source, Map<String, String> lines) {
        if (lines != null) {
            context.getEnvironment().getPropertySources().addFirst(new MapPropertySource("linkis", new HashMap<>(lines)));
        }
        context.registerBean(DataSource.class, () -> source);
        context.register(Database.class, PersistenceSpringConfiguration.class, LabelResourceServiceImpl.class,
                DefaultResourceLabelService.class, DefaultNodeLabelService.class, DefaultNodeLabelScorer.class, ResourceLockService.class,
                ResourceLogService.class, DefaultMetricsConverter.class, DefaultEngineNodeManager.class, DefaultEngineNodeLocker.class,
                DefaultNodePointerBuilder.class, RMMessageService.class, RMMonitorRest.class, UserResourceService.class);
        context.register(DefaultResourceManager.class);
        context.registerBean(EngineStopService.class, this::stopper);
        context.registerBean(ExternalResourceService.class, Manager::cluster);
        if (lines != null) {
            context.register(AdapterConfiguration.class);
        }
        context.refresh();
        resources = context.getBean(DefaultResourceManager.class);
    }

    @Override
    public void close() {
        context.close();
    }

    /** Sets the lifetime of the adapter's unused grants: Linkis has one configuration for all managers of a process. */
    void expireAfter(long millis) throws ReflectiveOperationException {
        Field field = RemoteResourceManager.class.getDeclaredField("unusedMillis");
        field.setAccessible(true);
        field.setLong(resources, millis);
    }

    static ServiceInstance instance(String application, String name) {
        return ServiceInstance.apply(application, name);
    }

    static ServiceInstance ecm(String name) {
        return instance(ECM, name);
    }

    /** Registers an ECM as Linkis does: the node, its labels, then its resource. */
    void register(String ecm, Resource total, Resource kept, Label<?>... more) {
        ServiceInstance instance = ecm(ecm);
        NodeManagerPersistence nodes = context.getBean(NodeManagerPersistence.class);
        if (nodes.getNode(instance) == null) {
            AMEMNode node = new AMEMNode();
            node.setServiceInstance(instance);
            node.setOwner("hadoop");
            node.setMark(AMConstant.PROCESS_MARK);
            nodes.addNodeInstance(node);
        }
        List<Label<?>> labels = new ArrayList<>(Arrays.asList(more));
        labels.add(label(ecm));
        AliasServiceInstanceLabel alias = LABELS.createLabel(AliasServiceInstanceLabel.class);
        alias.setAlias(ECM);
        labels.add(alias);
        context.getBean(NodeLabelService.class).addLabelsToNode(instance, labels);
        NodeResource resource = new CommonNodeResource();
        resource.setResourceType(ResourceType.LoadInstance);
        resource.setMaxResource(total);
        resource.setMinResource(kept);
        resource.setLeftResource(total);
        resource.setUsedResource(Resource.initResource(ResourceType.LoadInstance));
        resource.setLockedResource(Resource.initResource(ResourceType.LoadInstance));
        resources.register(instance, resource);
    }

    static EMInstanceLabel label(String ecm) {
        EMInstanceLabel label = LABELS.createLabel(EMInstanceLabel.class);
        label.setServiceName(ECM);
        label.setInstance(ecm);
        return label;
    }

    static List<Label<?>> labels(String ecm, String user, String engine, String version) {
        UserCreatorLabel who = LABELS.createLabel(UserCreatorLabel.class);
        who.setUser(user);
        who.setCreator("IDE");
        EngineTypeLabel type = LABELS.createLabel(EngineTypeLabel.class);
        type.setEngineType(engine);
        type.setVersion(version);
        return new ArrayList<>(Arrays.<Label<?>>asList(who, type, label(ecm)));
    }

    static NodeResource amount(Resource resource, ResourceType type) {
        NodeResource node = new CommonNodeResource();
        node.setResourceType(type);
        node.setMaxResource(resource);
        node.setMinResource(resource);
        return node;
    }

    ResultResource request(List<Label<?>> labels, Resource resource, ResourceType type) {
        EngineCreateRequest request = new EngineCreateRequest();
        request.setProperties(new HashMap<>());
        return resources.requestResource(labels, amount(resource, type), request, 60_000);
    }

    static String ticket(ResultResource result) {
        return ((AvailableResource) result).ticketId();
    }

    /** Gives the engine of a ticket its own name, as Linkis does after the ECM's reply. */
    void started(String ticket, String engine, String owner, List<Label<?>> labels) {
        AMEngineNode node = new AMEngineNode();
        node.setServiceInstance(instance(EC, engine));
        node.setOwner(owner);
        node.setMark(AMConstant.PROCESS_MARK);
        inSpiteOfDeadlocks(() -> context.getBean(DefaultEngineNodeManager.class).updateEngineNode(instance(EC, ticket), node));
        List<Label<?>> kept = new ArrayList<>(labels);
        kept.removeIf(label -> label.getLabelKey().startsWith("combined_") || label.getLabelKey().equals("engineInstance"));
        inSpiteOfDeadlocks(() -> context.getBean(NodeLabelService.class).addLabelsToNode(instance(EC, engine), kept));
    }

    /** Linkis's updates of nodes scan whole tables: the database may end one of two concurrent ones. */
    static void inSpiteOfDeadlocks(Runnable step) {
        for (int tries = 0; ; tries++) {
            try {
                step.run();
                return;
            } catch (RuntimeException e) {
                StringBuilder causes = new StringBuilder();
                for (Throwable cause = e; cause != null; cause = cause.getCause()) {
                    causes.append(cause);
                }
                if (tries == 20 || !causes.toString().contains("Deadlock")) {
                    throw e;
                }
            }
        }
    }

    /** Confirms the engine. */
    void used(String engine, Resource used, ResourceType type) {
        NodeResource resource = amount(used, type);
        resource.setUsedResource(used);
        context.getBean(RMMessageService.class)
                .dealWithResourceUsedProtocol(new ResourceUsedProtocol(instance(EC, engine), resource, null));
    }

    /** Clears an ended engine as Linkis does. */
    void clear(String engine) {
        ServiceInstance instance = instance(EC, engine);
        EngineNode node = context.getBean(DefaultEngineNodeManager.class).getEngineNode(instance);
        if (node == null) {
            return;
        }
        NodeLabelService labels = context.getBean(NodeLabelService.class);
        node.setLabels(labels.getNodeLabels(instance));
        node.setNodeStatus(NodeStatus.ShuttingDown);
        try {
            resources.resourceReleased(node);
        } catch (RuntimeException e) {
            org.slf4j.LoggerFactory.getLogger(Manager.class).warn("as Linkis does, it goes on", e);
        }
        inSpiteOfDeadlocks(() -> labels.removeLabelsFromNode(instance, true));
        inSpiteOfDeadlocks(() -> context.getBean(DefaultEngineNodeManager.class).deleteEngineNode(node));
    }

    /** Replies to the console about a user, page by page. */
    String console(String user, String engine) throws Exception {
        RMMonitorRest rest = context.getBean(RMMonitorRest.class);
        HttpServletRequest asked = asked();
        Map<String, Object> which = new HashMap<>();
        which.put("userCreator", "(" + user + ",IDE)");
        List<Callable<Message>> pages = List.of(() -> rest.getUserResourceByLabel(asked, user, "IDE", engine),
                () -> rest.getAllUserResource(asked, user, "IDE", engine, 1, 20), () -> rest.getUserResource(asked, new HashMap<>()),
                () -> rest.getEngines(asked, new HashMap<>()), () -> rest.getApplicationList(asked, which));
        ObjectMapper json = new ObjectMapper().registerModule(new DefaultScalaModule());
        StringBuilder told = new StringBuilder();
        for (Callable<Message> page : pages) {
            String answer;
            try {
                answer = json.writeValueAsString(page.call().getData());
            } catch (Exception e) {
                // Linkis's pages do not support all of Linkis's resources.
                answer = e.toString();
            }
            told.append('\n').append(answer);
        }
        return told.toString();
    }

    /** A request of Linkis's administrator, who is logged in. */
    private static HttpServletRequest asked() {
        List<Cookie> session = new ArrayList<>();
        SSOUtils.setLoginUser(cookie -> {
            session.add(cookie);
            return BoxedUnit.UNIT;
        }, "hadoop", true);
        return (HttpServletRequest) Proxy.newProxyInstance(Manager.class.getClassLoader(), new Class<?>[] {HttpServletRequest.class},
                (proxy, method, arguments) -> method.getName().equals("getCookies") ? session.toArray(new Cookie[0]) : null);
    }

    private EngineStopService stopper() {
        return (EngineStopService) Proxy.newProxyInstance(getClass().getClassLoader(), new Class<?>[] {EngineStopService.class},
                (proxy, method, arguments) -> {
                    if (method.getName().equals("asyncStopEngine")) {
                        String engine = ((EngineStopRequest) arguments[0]).getServiceInstance().getInstance();
                        new Thread(() -> clear(engine), "stop-" + engine).start();
                        return null;
                    }
                    return other(proxy, method.getName(), arguments);
                });
    }

    private static ExternalResourceService cluster() {
        return (ExternalResourceService) Proxy.newProxyInstance(Manager.class.getClassLoader(), new Class<?>[] {ExternalResourceService.class},
                (proxy, method, arguments) -> {
                    if (method.getName().equals("getResource")) {
                        NodeResource room = new CommonNodeResource();
                        room.setResourceType(ResourceType.Yarn);
                        room.setMaxResource(new YarnResource(1L << 50, 100_000, 1000, "default"));
                        room.setUsedResource(new YarnResource(0, 0, 0, "default"));
                        return room;
                    }
                    return other(proxy, method.getName(), arguments);
                });
    }

    private static Object other(Object proxy, String method, Object[] arguments) {
        switch (method) {
            case "toString":
                return "stand-in";
            case "hashCode":
                return System.identityHashCode(proxy);
            case "equals":
                return proxy == arguments[0];
            default:
                throw new UnsupportedOperationException(method);
        }
    }
}
