"""One life of a ticket: an EM registers its capacity, and two engines share it, one after the other.

    python life.py [ADDRESS]

Without an address, it uses LINKIS_RM_ADDRESS, or 127.0.0.1:50051.
"""

import os
import sys
import time
import uuid

import grpc
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import ErrorInfo
from grpc_status import rpc_status

from linkis.rm.v1 import resource_manager_pb2 as rm
from linkis.rm.v1 import resource_pb2 as resource
from linkis.rm.v1 import usage_pb2 as usage
from linkis.rm.v1.resource_manager_pb2_grpc import ResourceManagerServiceStub
from linkis.rm.v1.usage_pb2_grpc import UsageServiceStub

GIB = 1 << 30
TIMEOUT = 10  # Seconds. A call without a deadline may hang forever.
WAIT = 30  # Maximum wait of a request, in seconds.


def main(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        live(ResourceManagerServiceStub(channel), UsageServiceStub(channel))


def live(manager: ResourceManagerServiceStub, ledger: UsageServiceStub) -> None:
    # Register the EM's capacity. The protected part is never granted.
    em = resource.EmInstance(application_name="linkis-cg-engineconnmanager", instance="python-host:9102")
    registration = rm.RegisterRequest(em=em, total=amount(16, 8, 4), protected_resource=amount(2, 1, 0))
    epoch = manager.Register(registration, timeout=TIMEOUT).em.epoch
    step("registered", f"{em.instance}, epoch {epoch}")

    # Request before an engine starts. A request with a request_id may be repeated after a lost reply: it is granted once.
    first = rm.RequestResourceRequest(
        em=em, user="alice", creator="IDE", engine_type="spark-3.2.1", resource=amount(4, 4, 1), request_id=str(uuid.uuid4())
    )
    grant = granted(manager.RequestResource(first, timeout=TIMEOUT))
    step("granted", f"{grant.ticket_id}, locked until {grant.expire_time.ToJsonString()}")
    again = granted(manager.RequestResource(first, timeout=TIMEOUT))
    check(again.ticket_id == grant.ticket_id, "a repeated request_id returned another ticket")
    step("repeated", f"{again.ticket_id}, the same")

    # A second engine does not fit beside the first. A refusal is not an error but the other case of the reply.
    second = rm.RequestResourceRequest(
        em=em, user="bob", creator="IDE", engine_type="spark-3.2.1", resource=amount(4, 6, 1), request_id=str(uuid.uuid4())
    )
    answer = manager.RequestResource(second, timeout=TIMEOUT)
    check(answer.WhichOneof("result") == "not_enough", "two engines were granted with capacity for one")
    step("refused", f"{answer.not_enough.code}: {answer.not_enough.reason}")
    for short in answer.not_enough.shortfalls:
        step("", f"{short.dimension}: requested {short.requested}, left {short.available}, in all {short.max}")
    step("", "it never fits" if answer.not_enough.never_fits else "it fits after others have ended")

    # The request waits, concurrently with other work. The deadline of the call must be later than the end of the wait.
    second.wait_timeout.CopyFrom(Duration(seconds=WAIT))
    waiting = manager.RequestResource.future(second, timeout=WAIT + TIMEOUT)
    until_in_line(ledger, em)
    step("waiting", f"bob, for {second.resource.load_instance.cores} cores")

    # The first engine runs: confirm it, and send the EM's heartbeat. The epoch rejects calls for an earlier registration.
    engine = resource.EngineInstance(application_name="linkis-cg-engineconn", instance="python-host:41001")
    inited = rm.ResourceInitedRequest(ticket_id=grant.ticket_id, user="alice", em=em, engine=engine, epoch=epoch)
    ticket = manager.ResourceInited(inited, timeout=TIMEOUT).ticket
    step("inited", f"{ticket.engine.instance} has {ticket.used.load_instance.cores} cores, {ticket.state}")
    report = rm.HeartbeatRequest(em=em, epoch=epoch, sequence=1, health=resource.HEALTH_HEALTHY)
    report.ticket_ids = uuid.UUID(grant.ticket_id).bytes  # 16 bytes for each ticket, concatenated.
    reply = manager.Heartbeat(report, timeout=TIMEOUT)
    for unknown in reply.unknown_tickets:
        step("stop", f"the engine of {unknown.ticket_id}: {unknown.reason}")
    step("reported", f"1 engine; the next report within {reply.report_interval.ToJsonString()}")

    # The engine ends, and the waiting request is granted its capacity. A release may be repeated.
    manager.ResourceReleased(rm.ResourceReleasedRequest(ticket_id=grant.ticket_id, user="alice", em=em), timeout=TIMEOUT)
    step("released", grant.ticket_id)
    next_grant = granted(waiting.result())
    step("granted", f"{next_grant.ticket_id}, after its wait")

    # The details of an error are for programs: a reason, and metadata. The text is for display.
    try:
        manager.RequestResource(first, timeout=TIMEOUT)
        check(False, "a request whose ticket has ended was granted again")
    except grpc.RpcError as error:
        info = error_info(error)
        check(info.reason == "TICKET_ENDED", f"not TICKET_ENDED: {error.details()}")
        step("error", f"{error.code().name}, {info.reason} {dict(info.metadata)}")
        step("", error.details())

    manager.ResourceReleased(rm.ResourceReleasedRequest(ticket_id=next_grant.ticket_id), timeout=TIMEOUT)
    removed = manager.Unregister(rm.UnregisterRequest(em=em, epoch=epoch), timeout=TIMEOUT).removed_tickets
    step("unregistered", f"{em.instance}, and {removed} tickets with it")


def granted(answer: rm.RequestResourceResponse) -> rm.AvailableResource:
    """The grant in a reply.

    Granted or refused, the call succeeds: the reply has one of two cases. The unset case reads as an empty message: after a refusal,
    answer.available.ticket_id is "". So check the case first.
    """
    match answer.WhichOneof("result"):
        case "available":
            return answer.available
        case "not_enough":
            raise SystemExit(f"not granted: {answer.not_enough.reason}")
        case other:
            raise SystemExit(f"neither granted nor refused: {other}")  # A later release may have more cases.


def error_info(error: grpc.RpcError) -> ErrorInfo:
    """The reason of an error and its metadata; empty if the error is not from the service."""
    info = ErrorInfo()
    status = rpc_status.from_call(error)
    for detail in status.details if status else ():
        if detail.Unpack(info):
            break
    return info


def until_in_line(ledger: UsageServiceStub, em: resource.EmInstance) -> None:
    """Only orders the output of this example: a client need not check whether its request waits."""
    deadline = time.monotonic() + TIMEOUT
    while all(w.em != em for w in ledger.ListWaiting(usage.ListWaitingRequest(page_size=1000), timeout=TIMEOUT).waiting):
        check(time.monotonic() < deadline, "the request does not wait")
        time.sleep(0.05)


def amount(memory_gib: int, cores: int, instances: int) -> resource.Resource:
    load = resource.LoadInstanceResource(memory=memory_gib * GIB, cores=cores, instances=instances)
    return resource.Resource(load_instance=load)


def check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise SystemExit(otherwise)


def step(what: str, text: str) -> None:
    print(f"{what:<13} {text}", flush=True)


if __name__ == "__main__":
    target = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("LINKIS_RM_ADDRESS", "127.0.0.1:50051")
    try:
        main(target.removeprefix("http://"))
    except grpc.RpcError as error:
        raise SystemExit(f"{error.code().name} {error_info(error).reason}: {error.details()}") from None
