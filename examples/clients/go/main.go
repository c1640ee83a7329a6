// One life of a ticket: an EM registers its capacity, and two engines share it, one after the other.
//
//	go run . [ADDRESS]
//
// Without an address, it uses LINKIS_RM_ADDRESS, or 127.0.0.1:50051.
package main

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"log"
	"os"
	"slices"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	rm "linkis-rm/linkis/rm/v1"
)

//go:generate go build -o bin/ tool
//go:generate protoc -I ../../../proto --plugin=bin/protoc-gen-go --plugin=bin/protoc-gen-go-grpc --go_out=. --go_opt=module=linkis-rm --go-grpc_out=. --go-grpc_opt=module=linkis-rm linkis/rm/v1/accounting.proto linkis/rm/v1/limit.proto linkis/rm/v1/resource.proto linkis/rm/v1/resource_manager.proto linkis/rm/v1/usage.proto

const (
	gib     = 1 << 30
	timeout = 10 * time.Second // A call without a deadline may hang for ever.
	wait    = 30 * time.Second // Maximum time of a request in the wait queue.
)

func main() {
	address := cmp.Or(append(os.Args[1:], os.Getenv("LINKIS_RM_ADDRESS"), "127.0.0.1:50051")...)
	conn := must(grpc.NewClient(strings.TrimPrefix(address, "http://"),
		grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithUnaryInterceptor(withDeadline)))
	defer conn.Close()
	live(context.Background(), rm.NewResourceManagerServiceClient(conn), rm.NewUsageServiceClient(conn))
}

func live(ctx context.Context, manager rm.ResourceManagerServiceClient, ledger rm.UsageServiceClient) {
	// Register the EM's capacity. The protected part is never granted.
	em := &rm.EmInstance{ApplicationName: "linkis-cg-engineconnmanager", Instance: "go-host:9102"}
	registration := &rm.RegisterRequest{Em: em, Total: amount(16, 8, 4), ProtectedResource: amount(2, 1, 0)}
	epoch := must(manager.Register(ctx, registration)).GetEm().GetEpoch()
	step("registered", "%s, epoch %d", em.Instance, epoch)

	// Request before an engine starts. A request with a request_id may be repeated after a lost reply: it is granted once.
	first := &rm.RequestResourceRequest{Em: em, User: "alice", Creator: "IDE", EngineType: "spark-3.2.1",
		Resource: amount(4, 4, 1), RequestId: rand.Text()}
	grant := granted(must(manager.RequestResource(ctx, first)))
	step("granted", "%s, locked until %s", grant.TicketId, grant.ExpireTime.AsTime().Format(time.RFC3339Nano))
	again := granted(must(manager.RequestResource(ctx, first)))
	check(again.TicketId == grant.TicketId, "a repeated request_id returned another ticket")
	step("repeated", "%s, the same", again.TicketId)

	// A second engine does not fit beside the first. A refusal is not an error but the other case of the reply.
	second := &rm.RequestResourceRequest{Em: em, User: "bob", Creator: "IDE", EngineType: "spark-3.2.1",
		Resource: amount(4, 6, 1), RequestId: rand.Text()}
	answer, isRefusal := must(manager.RequestResource(ctx, second)).Result.(*rm.RequestResourceResponse_NotEnough)
	check(isRefusal, "two engines were granted with capacity for one")
	refusal := answer.NotEnough
	step("refused", "%d: %s", refusal.Code, refusal.Reason)
	for _, short := range refusal.Shortfalls {
		step("", "%s: requested %d, left %d, in all %d", short.Dimension, short.Requested, short.Available, short.Max)
	}
	check(!refusal.NeverFits, "the request would never fit")
	step("", "it fits after others have ended")

	// The request waits, concurrently with other work. The deadline of the call must be later than the end of the wait.
	second.WaitTimeout = durationpb.New(wait)
	waiting := make(chan *rm.AvailableResource)
	go func() {
		ctx, cancel := context.WithTimeout(ctx, wait+timeout)
		defer cancel()
		waiting <- granted(must(manager.RequestResource(ctx, second)))
	}()
	untilWaiting(ctx, ledger, em)
	step("waiting", "bob, for %d cores", second.Resource.GetLoadInstance().Cores)

	// The first engine runs: confirm it, and send the EM's heartbeat. The epoch rejects calls for an earlier registration.
	engine := &rm.EngineInstance{ApplicationName: "linkis-cg-engineconn", Instance: "go-host:41001"}
	inited := &rm.ResourceInitedRequest{TicketId: grant.TicketId, User: "alice", Em: em, Engine: engine, Epoch: epoch}
	ticket := must(manager.ResourceInited(ctx, inited)).Ticket
	step("inited", "%s has %d cores, %s", ticket.Engine.Instance, ticket.Used.GetLoadInstance().Cores, ticket.State)
	report := &rm.HeartbeatRequest{Em: em, Epoch: epoch, Sequence: 1, Health: rm.Health_HEALTH_HEALTHY}
	report.TicketIds = must(hex.DecodeString(strings.ReplaceAll(grant.TicketId, "-", ""))) // 16 bytes for each engine.
	reply := must(manager.Heartbeat(ctx, report))
	for _, unknown := range reply.UnknownTickets {
		step("stop", "the engine of %s: %s", unknown.TicketId, unknown.Reason)
	}
	step("reported", "1 engine; the next report within %s", reply.ReportInterval.AsDuration())

	// The engine ends, and the waiting request is granted its capacity. A release may be repeated.
	must(manager.ResourceReleased(ctx, &rm.ResourceReleasedRequest{TicketId: grant.TicketId, User: "alice", Em: em}))
	step("released", "%s", grant.TicketId)
	next := <-waiting
	step("granted", "%s, after its wait", next.TicketId)

	// The details of an error are for programs: a reason, and metadata. The text is for display.
	_, err := manager.RequestResource(ctx, first)
	info := errorInfo(err)
	check(info.GetReason() == "TICKET_ENDED", "a request whose ticket has ended has another result")
	step("error", "%s, %s %v", status.Code(err), info.Reason, info.Metadata)
	step("", "%s", status.Convert(err).Message())

	must(manager.ResourceReleased(ctx, &rm.ResourceReleasedRequest{TicketId: next.TicketId}))
	gone := must(manager.Unregister(ctx, &rm.UnregisterRequest{Em: em, Epoch: epoch}))
	step("unregistered", "%s, and %d tickets with it", em.Instance, gone.RemovedTickets)
}

// granted returns the grant in a reply.
//
// Granted or refused, the call succeeds: the reply has one of two cases. The getter of the unset case returns nil, whose getters return
// zero values: after a refusal, answer.GetAvailable().GetTicketId() is "". So check the case first.
func granted(answer *rm.RequestResourceResponse) *rm.AvailableResource {
	switch result := answer.Result.(type) {
	case *rm.RequestResourceResponse_Available:
		return result.Available
	case *rm.RequestResourceResponse_NotEnough:
		log.Fatalf("not granted: %s", result.NotEnough.Reason)
	}
	log.Fatal("neither granted nor refused") // A later release may know more cases.
	return nil
}

// errorInfo returns the reason of an error and its metadata; nil if the error is not from the service.
func errorInfo(err error) *errdetails.ErrorInfo {
	for _, detail := range status.Convert(err).Details() {
		if info, ok := detail.(*errdetails.ErrorInfo); ok {
			return info
		}
	}
	return nil
}

// untilWaiting only orders the output of this example: a client need not check whether its request waits.
func untilWaiting(ctx context.Context, ledger rm.UsageServiceClient, em *rm.EmInstance) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	isHere := func(waiting *rm.WaitingRequest) bool { return proto.Equal(waiting.Em, em) }
	for !slices.ContainsFunc(must(ledger.ListWaiting(ctx, &rm.ListWaitingRequest{PageSize: 1000})).Waiting, isHere) {
		time.Sleep(50 * time.Millisecond)
	}
}

// withDeadline sets a deadline on each call without one.
func withDeadline(ctx context.Context, method string, request, reply any, conn *grpc.ClientConn, call grpc.UnaryInvoker,
	options ...grpc.CallOption) error {
	if _, has := ctx.Deadline(); !has {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, timeout)
		defer cancel()
	}
	return call(ctx, method, request, reply, conn, options...)
}

func amount(memoryGib, cores, instances int64) *rm.Resource {
	load := &rm.LoadInstanceResource{Memory: memoryGib * gib, Cores: cores, Instances: instances}
	return &rm.Resource{Kind: &rm.Resource_LoadInstance{LoadInstance: load}}
}

// must ends this example on an error; a real program returns the error.
func must[T any](value T, err error) T {
	if err != nil {
		log.Fatalf("%v %s", err, errorInfo(err).GetReason())
	}
	return value
}

func check(holds bool, otherwise string) {
	if !holds {
		log.Fatal(otherwise)
	}
}

func step(what, format string, values ...any) {
	fmt.Printf("%-13s %s\n", what, fmt.Sprintf(format, values...))
}
