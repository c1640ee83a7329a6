import com.google.protobuf.Any;
import com.google.protobuf.ByteString;
import com.google.protobuf.Duration;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.rpc.ErrorInfo;
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.StatusRuntimeException;
import io.grpc.protobuf.StatusProto;
import java.nio.ByteBuffer;
import java.time.Instant;
import java.util.UUID;
import java.util.concurrent.TimeUnit;
import linkis.rm.v1.*;

/**
 * One life of a ticket: an EM registers its capacity, and two engines share it, one after the other.
 *
 * <p>Takes an address; by default LINKIS_RM_ADDRESS, or 127.0.0.1:50051.
 */
public final class Life {
    private static final long GIB = 1L << 30;
    private static final int TIMEOUT = 10; // Seconds. A call without a deadline may hang forever.
    private static final int WAIT = 30; // Maximum wait of a request, in seconds.

    private final ResourceManagerServiceGrpc.ResourceManagerServiceBlockingStub stub;
    private final ResourceManagerServiceGrpc.ResourceManagerServiceFutureStub futures;
    private final UsageServiceGrpc.UsageServiceBlockingStub ledger;

    private Life(io.grpc.Channel channel) {
        stub = ResourceManagerServiceGrpc.newBlockingStub(channel);
        futures = ResourceManagerServiceGrpc.newFutureStub(channel);
        ledger = UsageServiceGrpc.newBlockingStub(channel);
    }

    public static void main(String[] args) throws Exception {
        var named = System.getenv().getOrDefault("LINKIS_RM_ADDRESS", "127.0.0.1:50051");
        var address = (args.length > 0 ? args[0] : named).replaceFirst("^http://", "");
        var channel = Grpc.newChannelBuilder(address, InsecureChannelCredentials.create()).build();
        try {
            new Life(channel).live();
        } finally {
            channel.shutdownNow().awaitTermination(TIMEOUT, TimeUnit.SECONDS);
        }
    }

    private void live() throws Exception {
        // Register the EM's capacity. The protected part is never granted.
        var em = EmInstance.newBuilder().setApplicationName("linkis-cg-engineconnmanager").setInstance("java-host:9102").build();
        var registration = RegisterRequest.newBuilder().setEm(em).setTotal(amount(16, 8, 4)).setProtectedResource(amount(2, 1, 0));
        long epoch = manager().register(registration.build()).getEm().getEpoch();
        step("registered", em.getInstance() + ", epoch " + epoch);

        // Request before an engine starts. A request with a request_id may be repeated after a lost reply: it is granted once.
        var first = RequestResourceRequest.newBuilder().setEm(em).setUser("alice").setCreator("IDE").setEngineType("spark-3.2.1")
                .setResource(amount(4, 4, 1)).setRequestId(UUID.randomUUID().toString()).build();
        var grant = granted(manager().requestResource(first));
        var until = Instant.ofEpochSecond(grant.getExpireTime().getSeconds(), grant.getExpireTime().getNanos());
        step("granted", grant.getTicketId() + ", locked until " + until);
        var again = granted(manager().requestResource(first));
        check(again.getTicketId().equals(grant.getTicketId()), "a repeated request_id returned another ticket");
        step("repeated", again.getTicketId() + ", the same");

        // A second engine does not fit beside the first. A refusal is not an error but the other case of the reply.
        var second = RequestResourceRequest.newBuilder().setEm(em).setUser("bob").setCreator("IDE").setEngineType("spark-3.2.1")
                .setResource(amount(4, 6, 1)).setRequestId(UUID.randomUUID().toString());
        var answer = manager().requestResource(second.build());
        check(answer.hasNotEnough(), "two engines were granted with capacity for one");
        var refusal = answer.getNotEnough();
        step("refused", refusal.getCode() + ": " + refusal.getReason());
        for (var s : refusal.getShortfallsList()) {
            step("", s.getDimension() + ": requested " + s.getRequested() + ", left " + s.getAvailable() + ", in all " + s.getMax());
        }
        step("", refusal.getNeverFits() ? "it never fits" : "it fits after others have ended");

        // The request waits, concurrently with other work. The deadline of the call must be later than the end of the wait.
        second.setWaitTimeout(Duration.newBuilder().setSeconds(WAIT));
        var waiting = futures.withDeadlineAfter(WAIT + TIMEOUT, TimeUnit.SECONDS).requestResource(second.build());
        untilWaiting(em);
        step("waiting", "bob, for " + second.getResource().getLoadInstance().getCores() + " cores");

        // The first engine runs: confirm it, and send the EM's heartbeat. The epoch rejects calls for an earlier registration.
        var engine = EngineInstance.newBuilder().setApplicationName("linkis-cg-engineconn").setInstance("java-host:41001");
        var inited = ResourceInitedRequest.newBuilder().setTicketId(grant.getTicketId()).setUser("alice").setEm(em).setEngine(engine)
                .setEpoch(epoch);
        var ticket = manager().resourceInited(inited.build()).getTicket();
        var cores = ticket.getUsed().getLoadInstance().getCores();
        step("inited", ticket.getEngine().getInstance() + " has " + cores + " cores, " + ticket.getState());
        var report = HeartbeatRequest.newBuilder().setEm(em).setEpoch(epoch).setSequence(1).setHealth(Health.HEALTH_HEALTHY)
                .setTicketIds(bytes(grant.getTicketId())); // Several tickets are concatenated.
        var reply = manager().heartbeat(report.build());
        for (var unknown : reply.getUnknownTicketsList()) {
            step("stop", "the engine of " + unknown.getTicketId() + ": " + unknown.getReason());
        }
        step("reported", "1 engine; the next report within " + reply.getReportInterval().getSeconds() + "s");

        // The engine ends, and the waiting request is granted its capacity. A release may be repeated.
        var release = ResourceReleasedRequest.newBuilder().setTicketId(grant.getTicketId()).setUser("alice").setEm(em);
        manager().resourceReleased(release.build());
        step("released", grant.getTicketId());
        var next = granted(waiting.get());
        step("granted", next.getTicketId() + ", after its wait");

        // The details of an error are for programs: a reason, and metadata. The text is for display.
        try {
            manager().requestResource(first);
            check(false, "a request whose ticket has ended was granted again");
        } catch (StatusRuntimeException error) {
            var info = errorInfo(error);
            check(info.getReason().equals("TICKET_ENDED"), "not TICKET_ENDED: " + error.getMessage());
            step("error", error.getStatus().getCode() + ", " + info.getReason() + " " + info.getMetadataMap());
            step("", error.getStatus().getDescription());
        }

        manager().resourceReleased(ResourceReleasedRequest.newBuilder().setTicketId(next.getTicketId()).build());
        var gone = manager().unregister(UnregisterRequest.newBuilder().setEm(em).setEpoch(epoch).build());
        step("unregistered", em.getInstance() + ", and " + gone.getRemovedTickets() + " tickets with it");
    }

    /** A deadline starts when the stub is created: so each call has a stub of its own. */
    private ResourceManagerServiceGrpc.ResourceManagerServiceBlockingStub manager() {
        return stub.withDeadlineAfter(TIMEOUT, TimeUnit.SECONDS);
    }

    /**
     * The grant in a reply.
     *
     * <p>Granted or refused, the call succeeds: the reply has one of two cases. The unset case reads as an empty message: after a refusal,
     * {@code answer.getAvailable().getTicketId()} is "". So check the case first.
     */
    private static AvailableResource granted(RequestResourceResponse answer) {
        return switch (answer.getResultCase()) {
            case AVAILABLE -> answer.getAvailable();
            case NOT_ENOUGH -> throw new IllegalStateException("not granted: " + answer.getNotEnough().getReason());
            case RESULT_NOT_SET -> throw new IllegalStateException("neither granted nor refused"); // A case of a later release.
        };
    }

    /** The reason of an error and its metadata; empty if the error is not from the service. */
    private static ErrorInfo errorInfo(StatusRuntimeException error) throws InvalidProtocolBufferException {
        for (Any detail : StatusProto.fromThrowable(error).getDetailsList()) {
            if (detail.is(ErrorInfo.class)) {
                return detail.unpack(ErrorInfo.class);
            }
        }
        return ErrorInfo.getDefaultInstance();
    }

    /** Only orders the output of this example: a client need not check whether its request waits. */
    private void untilWaiting(EmInstance em) throws InterruptedException {
        var line = ledger.withDeadlineAfter(TIMEOUT, TimeUnit.SECONDS);
        var all = ListWaitingRequest.newBuilder().setPageSize(1000).build();
        while (line.listWaiting(all).getWaitingList().stream().noneMatch(waiting -> waiting.getEm().equals(em))) {
            Thread.sleep(50);
        }
    }

    private static ByteString bytes(String ticketId) {
        var id = UUID.fromString(ticketId);
        var bytes = ByteBuffer.allocate(16).putLong(id.getMostSignificantBits()).putLong(id.getLeastSignificantBits());
        return ByteString.copyFrom(bytes.flip());
    }

    private static Resource amount(long memoryGib, long cores, long instances) {
        var load = LoadInstanceResource.newBuilder().setMemory(memoryGib * GIB).setCores(cores).setInstances(instances);
        return Resource.newBuilder().setLoadInstance(load).build();
    }

    private static void check(boolean holds, String otherwise) {
        if (!holds) {
            throw new IllegalStateException(otherwise);
        }
    }

    private static void step(String what, String text) {
        System.out.printf("%-13s %s%n", what, text);
    }
}
