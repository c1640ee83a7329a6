package io.linkisrm.linkis;

import com.google.protobuf.ByteString;
import com.google.protobuf.Duration;
import io.linkisrm.client.LinkisRmClient;
import io.linkisrm.client.Messages;
import io.linkisrm.client.ServiceException;
import java.util.ArrayList;
import java.util.Collection;
import java.util.Collections;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import linkis.rm.v1.AdminServiceGrpc;
import linkis.rm.v1.BatchGetEmsRequest;
import linkis.rm.v1.BatchGetTicketsRequest;
import linkis.rm.v1.EmInstance;
import linkis.rm.v1.EmResource;
import linkis.rm.v1.EngineInstance;
import linkis.rm.v1.FollowActionsRequest;
import linkis.rm.v1.FollowActionsResponse;
import linkis.rm.v1.GetEmRequest;
import linkis.rm.v1.GetScopeRequest;
import linkis.rm.v1.GetServerInfoRequest;
import linkis.rm.v1.GetServerInfoResponse;
import linkis.rm.v1.GetTicketRequest;
import linkis.rm.v1.HeartbeatRequest;
import linkis.rm.v1.HeartbeatResponse;
import linkis.rm.v1.HoldRequest;
import linkis.rm.v1.Limit;
import linkis.rm.v1.LimitMode;
import linkis.rm.v1.LimitServiceGrpc;
import linkis.rm.v1.ListLimitsRequest;
import linkis.rm.v1.ListLimitsResponse;
import linkis.rm.v1.ListScopesRequest;
import linkis.rm.v1.ListScopesResponse;
import linkis.rm.v1.RegisterRequest;
import linkis.rm.v1.ReleaseHoldRequest;
import linkis.rm.v1.RepairRequest;
import linkis.rm.v1.RequestResourceRequest;
import linkis.rm.v1.RequestResourceResponse;
import linkis.rm.v1.ResourceInitedRequest;
import linkis.rm.v1.ResourceManagerServiceGrpc;
import linkis.rm.v1.ResourceReleasedRequest;
import linkis.rm.v1.ResourceReportedRequest;
import linkis.rm.v1.ScopeUsage;
import linkis.rm.v1.SetLimitRequest;
import linkis.rm.v1.Ticket;
import linkis.rm.v1.UnregisterRequest;
import linkis.rm.v1.UsageServiceGrpc;
import org.apache.linkis.common.ServiceInstance;

/** What Linkis needs of the service, call by call. Each throws {@link ServiceException}. */
final class Service {
    private static final int PAGE = 1000;
    /** More label sets than there can be in a user's scopes of one creator and engine type. */
    private static final int SCOPES_MAX = 20_000;

    private final LinkisRmClient client;

    Service(LinkisRmClient client) {
        this.client = client;
    }

    static EmInstance em(ServiceInstance instance) {
        return EmInstance.newBuilder().setApplicationName(instance.getApplicationName()).setInstance(instance.getInstance()).build();
    }

    LinkisRmClient client() {
        return client;
    }

    GetServerInfoResponse info() {
        return client.call(UsageServiceGrpc.getGetServerInfoMethod(), GetServerInfoRequest.getDefaultInstance());
    }

    EmResource register(RegisterRequest request) {
        return client.call(ResourceManagerServiceGrpc.getRegisterMethod(), request).getEm();
    }

    /** That it was not registered is as good. */
    void unregister(EmInstance em) {
        try {
            client.call(ResourceManagerServiceGrpc.getUnregisterMethod(), UnregisterRequest.newBuilder().setEm(em).build());
        } catch (ServiceException e) {
            if (!e.is("EM_NOT_REGISTERED")) {
                throw e;
            }
        }
    }

    /** @param wait how long the request may stand in line, for which the call takes so much longer */
    RequestResourceResponse request(RequestResourceRequest request, java.time.Duration within) {
        return client.call(ResourceManagerServiceGrpc.getRequestResourceMethod(), request, within);
    }

    Ticket inited(ResourceInitedRequest request) {
        return client.call(ResourceManagerServiceGrpc.getResourceInitedMethod(), request).getTicket();
    }

    Ticket reported(ResourceReportedRequest request) {
        return client.call(ResourceManagerServiceGrpc.getResourceReportedMethod(), request).getTicket();
    }

    /** That there never was such a ticket, as far as anybody remembers, is as good. */
    void released(String ticket) {
        try {
            client.call(ResourceManagerServiceGrpc.getResourceReleasedMethod(),
                    ResourceReleasedRequest.newBuilder().setTicketId(ticket).build());
        } catch (ServiceException e) {
            if (!Failures.isOver(e)) {
                throw e;
            }
        }
    }

    HeartbeatResponse heartbeat(HeartbeatRequest request) {
        return client.call(ResourceManagerServiceGrpc.getHeartbeatMethod(), request);
    }

    /** The one ticket of an engine; null if it has none, or several. */
    Ticket ticketOf(ServiceInstance engine) {
        EngineInstance which =
                EngineInstance.newBuilder().setApplicationName(engine.getApplicationName()).setInstance(engine.getInstance()).build();
        try {
            return client.call(UsageServiceGrpc.getGetTicketMethod(), GetTicketRequest.newBuilder().setEngine(which).build()).getTicket();
        } catch (ServiceException e) {
            if (e.is("TICKET_NOT_FOUND") || e.is("MANY_TICKETS")) {
                return null;
            }
            throw e;
        }
    }

    /** The EM; null if it is not registered. */
    EmResource em(EmInstance em) {
        try {
            // It waits for no list, as the calls for many do.
            return client.call(UsageServiceGrpc.getGetEmMethod(), GetEmRequest.newBuilder().setEm(em).build()).getEm();
        } catch (ServiceException e) {
            if (e.is("EM_NOT_REGISTERED")) {
                return null;
            }
            throw e;
        }
    }

    /** Those of these EMs that are registered. */
    List<EmResource> ems(List<EmInstance> ems) {
        List<EmResource> found = new ArrayList<>();
        for (int from = 0; from < ems.size(); from += PAGE) {
            BatchGetEmsRequest some = BatchGetEmsRequest.newBuilder().addAllEms(ems.subList(from, Math.min(from + PAGE, ems.size()))).build();
            found.addAll(client.call(UsageServiceGrpc.getBatchGetEmsMethod(), some).getEmsList());
        }
        return found;
    }

    /** Those of these tickets that live, by their ids; of at most 1000. */
    Map<String, Ticket> tickets(Collection<String> ids) {
        Map<String, Ticket> live = new HashMap<>();
        BatchGetTicketsRequest request = BatchGetTicketsRequest.newBuilder().addAllTicketIds(ids).build();
        for (Ticket ticket : client.call(UsageServiceGrpc.getBatchGetTicketsMethod(), request).getTicketsList()) {
            live.put(ticket.getTicketId(), ticket);
        }
        return live;
    }

    /**
     * What is held under a user, creator and engine type; with places, also what of it is in which queue or namespace, and by whatever else
     * it is counted besides.
     */
    List<ScopeUsage> scopes(Scope scope, boolean places) {
        return places ? scopesWith(labels(scope)) : Collections.singletonList(scope(labels(scope)));
    }

    private static Map<String, String> labels(Scope scope) {
        Map<String, String> labels = new HashMap<>();
        labels.put("user", scope.user);
        labels.put("creator", scope.creator);
        labels.put("engine_type", scope.engineType);
        return labels;
    }

    private ScopeUsage scope(Map<String, String> labels) {
        try {
            return client.call(UsageServiceGrpc.getGetScopeMethod(), GetScopeRequest.newBuilder().putAllLabels(labels).build()).getScope();
        } catch (ServiceException e) {
            if (e.is("SCOPE_NOT_COUNTED")) {
                // Somebody took that limit away. Who asks, asks again.
                count(Caps.LABELS);
            }
            throw e;
        }
    }

    private List<ScopeUsage> scopesWith(Map<String, String> labels) {
        ListScopesRequest.Builder request = ListScopesRequest.newBuilder().setPageSize(PAGE).putAllLabels(labels);
        List<ScopeUsage> found = new ArrayList<>();
        do {
            ListScopesResponse page = client.call(UsageServiceGrpc.getListScopesMethod(), request.build());
            found.addAll(page.getScopesList());
            request.setPageToken(page.getNextPageToken());
        } while (!request.getPageToken().isEmpty() && found.size() < SCOPES_MAX);
        return found;
    }

    /** What happens, from behind a position; from now on, if it is empty. */
    Messages<FollowActionsResponse> follow(String position) {
        return client.follow(UsageServiceGrpc.getFollowActionsMethod(), FollowActionsRequest.newBuilder().setPosition(position).build());
    }

    /** Whether what a set of labels holds is counted. */
    boolean counts(List<String> labels) {
        ListLimitsRequest.Builder request = ListLimitsRequest.newBuilder().setPageSize(PAGE);
        do {
            ListLimitsResponse page = client.call(LimitServiceGrpc.getListLimitsMethod(), request.build());
            for (Limit limit : page.getLimitsList()) {
                List<String> named = new ArrayList<>(limit.getEachList());
                named.addAll(limit.getLabelsMap().keySet());
                if (named.size() == labels.size() && named.containsAll(labels)) {
                    return true;
                }
            }
            request.setPageToken(page.getNextPageToken());
        } while (!request.getPageToken().isEmpty());
        return false;
    }

    /** Has what a set of labels holds counted, and limits nothing. */
    void count(List<String> labels) {
        Limit limit = Limit.newBuilder().addAllEach(labels).setMode(LimitMode.LIMIT_MODE_OFF).build();
        client.call(LimitServiceGrpc.getSetLimitMethod(), SetLimitRequest.newBuilder().setLimit(limit).build());
    }

    void hold(HoldRequest request) {
        client.call(AdminServiceGrpc.getHoldMethod(), request);
    }

    void releaseHold(ReleaseHoldRequest request) {
        client.call(AdminServiceGrpc.getReleaseHoldMethod(), request);
    }

    /** Puts the counters of a host in order. That it is not registered is as good. */
    void repair(EmInstance em) {
        try {
            repair(RepairRequest.newBuilder().setEm(em));
        } catch (ServiceException e) {
            if (!e.is("EM_NOT_REGISTERED")) {
                throw e;
            }
        }
    }

    /** Puts the counters of a user, creator and engine type in order, in each place. */
    void repair(Scope scope) {
        for (ScopeUsage one : scopes(scope, true)) {
            repair(RepairRequest.newBuilder().putAllScope(one.getLabelsMap()));
        }
    }

    private void repair(RepairRequest.Builder request) {
        client.call(AdminServiceGrpc.getRepairMethod(), request.build());
    }

    static Duration told(java.time.Duration duration) {
        return Duration.newBuilder().setSeconds(duration.getSeconds()).setNanos(duration.getNano()).build();
    }

    /** Whether it may be one of the service's: something else in Linkis's rows is none. */
    static boolean isTicket(String text) {
        try {
            return java.util.UUID.fromString(text).toString().equalsIgnoreCase(text);
        } catch (IllegalArgumentException e) {
            return false;
        }
    }

    /** The bytes of tickets, one after another, as a report has them. */
    static ByteString bytes(Collection<String> tickets) {
        java.nio.ByteBuffer bytes = java.nio.ByteBuffer.allocate(16 * tickets.size());
        for (String ticket : tickets) {
            java.util.UUID id = java.util.UUID.fromString(ticket);
            bytes.putLong(id.getMostSignificantBits()).putLong(id.getLeastSignificantBits());
        }
        return ByteString.copyFrom(bytes.array());
    }
}
