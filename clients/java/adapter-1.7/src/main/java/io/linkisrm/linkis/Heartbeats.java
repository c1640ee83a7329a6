package io.linkisrm.linkis;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.google.protobuf.ByteString;
import io.linkisrm.client.ServiceException;
import java.io.IOException;
import java.util.ArrayList;
import java.util.BitSet;
import java.util.Collections;
import java.util.HashMap;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.function.Consumer;
import linkis.rm.v1.EmInstance;
import linkis.rm.v1.EmResource;
import linkis.rm.v1.Health;
import linkis.rm.v1.HeartbeatRequest;
import linkis.rm.v1.HeartbeatResponse;
import linkis.rm.v1.Load;
import linkis.rm.v1.UnknownTicket;
import org.apache.linkis.common.ServiceInstance;
import org.apache.linkis.governance.common.conf.GovernanceCommonConf;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/**
 * Forwards the heartbeats of ECMs from Linkis's tables, regardless of the manager that received them. The sequence of a report is the
 * second of its heartbeat, so a heartbeat that several managers forward counts once.
 */
final class Heartbeats implements Background.Task {
    private static final Logger LOG = LoggerFactory.getLogger(Heartbeats.class);
    private static final ObjectMapper JSON = new ObjectMapper();
    private static final int PERMILLE = 1000;
    /** Above the maximum by which a heartbeat that another manager forwarded can be ahead. */
    private static final long CLOCK_BACK_SECONDS = 120;

    private final Service service;
    private final Tables tables;
    private final Engines engines;
    private final Consumer<ServiceInstance> registerAgain;
    /** Last heartbeat of each ECM: a heartbeat from before the start of this manager is no sign of life. */
    private Map<String, Long> seen;
    /** Unknown tickets in the last reply about each ECM. */
    private final Map<String, Set<String>> unknown = new HashMap<>();

    Heartbeats(Service service, Tables tables, Engines engines, Consumer<ServiceInstance> registerAgain) {
        this.service = service;
        this.tables = tables;
        this.engines = engines;
        this.registerAgain = registerAgain;
    }

    /** Application name of ECMs. */
    static String application() {
        return GovernanceCommonConf.ENGINE_CONN_MANAGER_SPRING_NAME().getValue();
    }

    static ServiceInstance instance(Tables.Ecm ecm) {
        ServiceInstance instance = new ServiceInstance();
        instance.setApplicationName(application());
        instance.setInstance(ecm.instance);
        return instance;
    }

    @Override
    public String name() {
        return "heartbeats";
    }

    @Override
    public void run() throws Exception {
        Map<String, Long> now = new HashMap<>();
        Map<EmInstance, Tables.Ecm> beaten = new HashMap<>();
        for (Tables.Ecm ecm : tables.ecms(application())) {
            now.put(ecm.instance, ecm.heartbeat);
            if (seen != null && ecm.heartbeat != 0 && !Long.valueOf(ecm.heartbeat).equals(seen.get(ecm.instance))) {
                beaten.put(Service.em(instance(ecm)), ecm);
            }
        }
        seen = now;
        unknown.keySet().retainAll(now.keySet());
        Map<EmInstance, EmResource> registered = new HashMap<>();
        service.ems(new ArrayList<>(beaten.keySet())).forEach(em -> registered.put(em.getEm(), em));
        for (Map.Entry<EmInstance, Tables.Ecm> one : beaten.entrySet()) {
            try {
                EmResource em = registered.get(one.getKey());
                if (em == null) {
                    registerAgain.accept(instance(one.getValue()));
                } else {
                    passOn(em, one.getValue());
                }
            } catch (ServiceException e) {
                if (!e.is("STALE_REPORT") && !e.is("EM_NOT_REGISTERED")) {
                    LOG.warn("linkis-rm: the heartbeat of {} is not forwarded: {}", one.getValue().instance, e.getMessage());
                }
            } catch (InterruptedException e) {
                throw e;
            } catch (Exception e) {
                // Catches every exception, so that one ECM does not delay the others.
                LOG.warn("linkis-rm: the heartbeat of {} is not forwarded: {}", one.getValue().instance, e.toString());
            }
        }
    }

    private void passOn(EmResource em, Tables.Ecm ecm) throws Exception {
        List<String> tickets = new ArrayList<>();
        BitSet idle = new BitSet();
        for (Tables.EngineNode engine : tables.enginesOn(ecm.instance)) {
            if (Service.isTicket(engine.ticket)) {
                idle.set(tickets.size(), engine.idle);
                tickets.add(engine.ticket);
            }
        }
        HeartbeatRequest.Builder report = HeartbeatRequest.newBuilder().setEm(em.getEm()).setEpoch(em.getEpoch())
                .setSequence(ecm.heartbeat).setHealth(health(ecm.health)).setTicketIds(Service.bytes(tickets))
                .setIdle(ByteString.copyFrom(idle.toByteArray()));
        Load load = load(ecm.load);
        if (load != null) {
            report.setLoad(load);
        }
        HeartbeatResponse answer = send(report);
        Set<String> before = unknown.getOrDefault(ecm.instance, Collections.<String>emptySet());
        Set<String> now = new HashSet<>();
        for (UnknownTicket ticket : answer.getUnknownTicketsList()) {
            now.add(ticket.getTicketId());
            // A ticket that is unknown for the first time may be ending: Linkis's rows end after its ticket.
            if (before.contains(ticket.getTicketId())) {
                LOG.warn("linkis-rm: the engine of {} is stopped: {}", ticket.getTicketId(), ticket.getReason());
                engines.stop(ticket.getTicketId());
            }
        }
        unknown.put(ecm.instance, now);
        stop(ecm, new HashSet<>(answer.getStopIdleTicketsList()), new HashSet<>(answer.getStopTicketsList()));
    }

    /**
     * Stops the engines of recalled tickets: those of {@code ifIdle} that are still unlocked in Linkis, and those of {@code anyway}. As when
     * an operator stops the unlocked engines of an ECM, Linkis's manager may hand such an engine out at this moment; its task is then
     * repeated on another one. The task of a busy engine fails.
     */
    private void stop(Tables.Ecm ecm, Set<String> ifIdle, Set<String> anyway) throws Exception {
        if (ifIdle.isEmpty() && anyway.isEmpty()) {
            return;
        }
        for (Tables.EngineNode engine : tables.enginesOn(ecm.instance)) {
            if (anyway.contains(engine.ticket) || engine.idle && ifIdle.contains(engine.ticket)) {
                LOG.info("linkis-rm: the {} engine of {} is stopped, because a request waits", engine.idle ? "idle" : "busy",
                        engine.ticket);
                engines.stop(engine.ticket);
            }
        }
    }

    /** If the database's clock was set back, such as an hour in autumn, sequences continue from the last one meanwhile. */
    private HeartbeatResponse send(HeartbeatRequest.Builder report) {
        try {
            return service.heartbeat(report.build());
        } catch (ServiceException e) {
            long last = e.is("STALE_REPORT") ? Long.parseLong(e.facts().getOrDefault("last_sequence", "0")) : 0;
            if (last - report.getSequence() < CLOCK_BACK_SECONDS) {
                throw e;
            }
            return service.heartbeat(report.setSequence(last + 1).build());
        }
    }

    /** Parses Linkis's form: a JSON object with "nodeHealthy". */
    static Health health(String text) {
        String health = text == null ? "" : text;
        if (health.contains("UnHealthy") || health.contains("StockUnavailable")) {
            return Health.HEALTH_UNHEALTHY;
        }
        return health.contains("WARN") || health.contains("StockAvailable") ? Health.HEALTH_WARN : Health.HEALTH_HEALTHY;
    }

    /** Parses Linkis's form: a JSON object; null if values are missing. */
    static Load load(String text) {
        try {
            JsonNode load = text == null ? null : JSON.readTree(text);
            long max = load == null ? 0 : load.path("maxMemory").asLong();
            if (max <= 0) {
                return null;
            }
            long used = Math.max(0, Math.min(max, load.path("usedMemory").asLong()));
            int busy = (int) Math.max(0, Math.min(PERMILLE, Math.round(load.path("systemCPUUsed").asDouble() * PERMILLE)));
            return Load.newBuilder().setMemoryMax(max).setMemoryUsed(used).setCpuPermille(busy).build();
        } catch (IOException e) {
            return null;
        }
    }
}
