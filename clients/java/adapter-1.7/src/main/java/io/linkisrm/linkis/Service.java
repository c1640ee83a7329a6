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

/** Calls of the service that Linkis needs. Each throws {@link ServiceException}. */
final class Service {
    private static final int PAGE = 1000;
    /** More scopes than a user, creator and engine type can have. */
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

    /** Succeeds also if the EM was not registered. */
    void unregister(EmInstance em) {
        try {
            client.call(ResourceManagerServiceGrpc.getUnregisterMethod(), UnregisterRequest.newBuilder().setEm(em).build());
        } catch (ServiceException e) {
            if (!e.is("EM_NOT_REGISTERED")) {
                throw e;
            }
        }
    }

    /** @param wait maximum wait of the request, which extends the time of the call */
    RequestResourceResponse request(RequestResourceRequest request, java.time.Duration within) {
        return client.call(ResourceManagerServiceGrpc.getRequestResourceMethod(), request, within);
    }

    Ticket inited(ResourceInitedRequest request) {
        return client.call(ResourceManagerServiceGrpc.getResourceInitedMethod(), request).getTicket();
    }

    Ticket reported(ResourceReportedRequest request) {
        return client.call(ResourceManagerServiceGrpc.getResourceReportedMethod(), request).getTicket();
    }

    /** Succeeds also if the history has no such ticket. */
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
            // Does not wait for lists, unlike the batch calls.
            return client.call(UsageServiceGrpc.getGetEmMethod(), GetEmRequest.newBuilder().setEm(em).build()).getEm();
        } catch (ServiceException e) {
            if (e.is("EM_NOT_REGISTERED")) {
                return null;
            }
            throw e;
        }
    }

    /** The registered ones of these EMs. */
    List<EmResource> ems(List<EmInstance> ems) {
        List<EmResource> found = new ArrayList<>();
        for (int from = 0; from < ems.size(); from += PAGE) {
            BatchGetEmsRequest some = BatchGetEmsRequest.newBuilder().addAllEms(ems.subList(from, Math.min(from + PAGE, ems.size()))).build();
            found.addAll(client.call(UsageServiceGrpc.getBatchGetEmsMethod(), some).getEmsList());
        }
        return found;
    }

    /** The live ones of these tickets, by their ids; of at most 1000. */
    Map<String, Ticket> tickets(Collection<String> ids) {
        Map<String, Ticket> live = new HashMap<>();
        BatchGetTicketsRequest request = BatchGetTicketsRequest.newBuilder().addAllTicketIds(ids).build();
        for (Ticket ticket : client.call(UsageServiceGrpc.getBatchGetTicketsMethod(), request).getTicketsList()) {
            live.put(ticket.getTicketId(), ticket);
        }
        return live;
    }

    /** The use of a user, creator and engine type. With places, also the use in each queue or namespace, by any further labels. */
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
                // The limit was deleted. The caller tries again.
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

    /** Follows the history from a position, or from now on if it is empty. */
    Messages<FollowActionsResponse> follow(String position) {
        return client.follow(UsageServiceGrpc.getFollowActionsMethod(), FollowActionsRequest.newBuilder().setPosition(position).build());
    }

    /** Whether a label set is counted. */
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

    /** Starts the counting of a label set, without a maximum. */
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

    /** Repairs the counters of an ECM. Succeeds also if it is not registered. */
    void repair(EmInstance em) {
        try {
            repair(RepairRequest.newBuilder().setEm(em));
        } catch (ServiceException e) {
            if (!e.is("EM_NOT_REGISTERED")) {
                throw e;
            }
        }
    }

    /** Repairs the counters of a user, creator and engine type, in each queue and namespace. */
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

    /** Whether a text can be a ticket of the service: other texts in Linkis's rows are none. */
    static boolean isTicket(String text) {
        try {
            return java.util.UUID.fromString(text).toString().equalsIgnoreCase(text);
        } catch (IllegalArgumentException e) {
            return false;
        }
    }

    /** The bytes of tickets, concatenated as in a report. */
    static ByteString bytes(Collection<String> tickets) {
        java.nio.ByteBuffer bytes = java.nio.ByteBuffer.allocate(16 * tickets.size());
        for (String ticket : tickets) {
            java.util.UUID id = java.util.UUID.fromString(ticket);
            bytes.putLong(id.getMostSignificantBits()).putLong(id.getLeastSignificantBits());
        }
        return ByteString.copyFrom(bytes.array());
    }
}
