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
 * One life of a ticket: a host offers what it has, and two engines share it, one after the other.
 *
 * <p>Takes an address; without one, that in LINKIS_RM_ADDRESS, or 127.0.0.1:50051.
 */
public final class Life {
    private static final long GIB = 1L << 30;
    private static final int TIMEOUT = 10; // Seconds. A call without a deadline may hang for ever.
    private static final int WAIT = 30; // Seconds that a request may stand in line.

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
        // The host offers what it has. What is protected stays its own.
        var em = EmInstance.newBuilder().setApplicationName("linkis-cg-engineconnmanager").setInstance("java-host:9102").build();
        var registration = RegisterRequest.newBuilder().setEm(em).setTotal(amount(16, 8, 4)).setProtectedResource(amount(2, 1, 0));
        long epoch = manager().register(registration.build()).getEm().getEpoch();
        step("registered", em.getInstance() + ", epoch " + epoch);

        // Ask before an engine starts. Who chooses a request_id may ask again whenever an answer was lost: it is granted once.
        var first = RequestResourceRequest.newBuilder().setEm(em).setUser("alice").setCreator("IDE").setEngineType("spark-3.2.1")
                .setResource(amount(4, 4, 1)).setRequestId(UUID.randomUUID().toString()).build();
        var grant = granted(manager().requestResource(first));
        var until = Instant.ofEpochSecond(grant.getExpireTime().getSeconds(), grant.getExpireTime().getNanos());
        step("granted", grant.getTicketId() + ", locked until " + until);
        var again = granted(manager().requestResource(first));
        check(again.getTicketId().equals(grant.getTicketId()), "the same request_id got another ticket");
        step("asked again", again.getTicketId() + ", the same");

        // A second engine is too much beside the first. That is no error but the other case of the answer.
        var second = RequestResourceRequest.newBuilder().setEm(em).setUser("bob").setCreator("IDE").setEngineType("spark-3.2.1")
                .setResource(amount(4, 6, 1)).setRequestId(UUID.randomUUID().toString());
        var answer = manager().requestResource(second.build());
        check(answer.hasNotEnough(), "two engines were granted where there is room for one");
        var refusal = answer.getNotEnough();
        step("refused", refusal.getCode() + ": " + refusal.getReason());
        for (var s : refusal.getShortfallsList()) {
            step("", s.getDimension() + ": asked " + s.getRequested() + ", left " + s.getAvailable() + ", in all " + s.getMax());
        }
        step("", refusal.getNeverFits() ? "it never fits" : "it fits once others have gone");

        // So it stands in line, beside whatever else happens. The deadline of the call has to be later than the end of the wait.
        second.setWaitTimeout(Duration.newBuilder().setSeconds(WAIT));
        var waiting = futures.withDeadlineAfter(WAIT + TIMEOUT, TimeUnit.SECONDS).requestResource(second.build());
        untilInLine(em);
        step("waiting", "bob, for " + second.getResource().getLoadInstance().getCores() + " cores");

        // The first engine runs, and its host reports that it does. An epoch keeps out whoever acted for an earlier registration.
        var engine = EngineInstance.newBuilder().setApplicationName("linkis-cg-engineconn").setInstance("java-host:41001");
        var inited = ResourceInitedRequest.newBuilder().setTicketId(grant.getTicketId()).setUser("alice").setEm(em).setEngine(engine)
                .setEpoch(epoch);
        var ticket = manager().resourceInited(inited.build()).getTicket();
        var cores = ticket.getUsed().getLoadInstance().getCores();
        step("inited", ticket.getEngine().getInstance() + " has " + cores + " cores, " + ticket.getState());
        var report = HeartbeatRequest.newBuilder().setEm(em).setEpoch(epoch).setSequence(1).setHealth(Health.HEALTH_HEALTHY)
                .setTicketIds(bytes(grant.getTicketId())); // Of more engines, one after another.
        var heard = manager().heartbeat(report.build());
        for (var unknown : heard.getUnknownTicketsList()) {
            step("stop", "the engine of " + unknown.getTicketId() + ": " + unknown.getReason());
        }
        step("reported", "1 engine; the next report within " + heard.getReportInterval().getSeconds() + "s");

        // It ends, and whoever is first in line gets what was its own. A release may be repeated.
        var release = ResourceReleasedRequest.newBuilder().setTicketId(grant.getTicketId()).setUser("alice").setEm(em);
        manager().resourceReleased(release.build());
        step("released", grant.getTicketId());
        var next = granted(waiting.get());
        step("granted", next.getTicketId() + ", after its wait");

        // An error says in its details what a program may act on: a reason, and facts. The text is for people.
        try {
            manager().requestResource(first);
            check(false, "a request whose ticket is over was granted again");
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

    /** A deadline counts from when the stub is made: so each call has a stub of its own. */
    private ResourceManagerServiceGrpc.ResourceManagerServiceBlockingStub manager() {
        return stub.withDeadlineAfter(TIMEOUT, TimeUnit.SECONDS);
    }

    /**
     * The grant in an answer.
     *
     * <p>Granted or not, the call succeeds: the answer holds one of two cases. That which is not set reads as if all of it were empty,
     * and nothing complains: after a refusal, answer.getAvailable().getTicketId() is "". So ask first which of them it is.
     */
    private static AvailableResource granted(RequestResourceResponse answer) {
        return switch (answer.getResultCase()) {
            case AVAILABLE -> answer.getAvailable();
            case NOT_ENOUGH -> throw new IllegalStateException("not granted: " + answer.getNotEnough().getReason());
            case RESULT_NOT_SET -> throw new IllegalStateException("neither granted nor refused"); // A case of a later release.
        };
    }

    /** The reason of an error and its facts; empty if it does not come from the service but from something in between. */
    private static ErrorInfo errorInfo(StatusRuntimeException error) throws InvalidProtocolBufferException {
        for (Any detail : StatusProto.fromThrowable(error).getDetailsList()) {
            if (detail.is(ErrorInfo.class)) {
                return detail.unpack(ErrorInfo.class);
            }
        }
        return ErrorInfo.getDefaultInstance();
    }

    /** Only for the order of what this example prints: nobody needs to look whether he stands in line. */
    private void untilInLine(EmInstance em) throws InterruptedException {
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
