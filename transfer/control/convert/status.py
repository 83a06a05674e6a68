"""What a worker says of its pools, queues and peers."""

from kvferry.transfer.control.convert import checks, common
from kvferry.transfer.inference import PeerStatus, PoolGroupStatus, WorkerStatus
from kvferry.v1 import peer_pb2 as pb

MAX_POOL_GROUPS = 256
MAX_LIFE_CYCLES = 256
MAX_PEERS = 1 << 14


@checks.outgoing
def status_to_wire(status: WorkerStatus) -> pb.WorkerStatus:
    return pb.WorkerStatus(
        worker=common.worker_to_wire(status.worker),
        role=common.role_to_wire(status.role),
        model=status.model,
        manager=status.manager,
        transport=status.transport,
        runtime=status.runtime,
        pool_groups=[_pool_group_to_wire(group) for group in status.pool_groups],
        waiting=status.waiting,
        running=status.running,
        holding=status.holding,
        receiving=status.receiving,
        peers=[_peer_to_wire(peer) for peer in status.peers],
        integrity=checks.clipped(status.integrity),
        process_id=status.process_id,
        condition=checks.clipped(status.condition),
    )


def status_from_wire(message: pb.WorkerStatus) -> WorkerStatus:
    checks.present(message, "worker")
    checks.sized("WorkerStatus.pool_groups", message.pool_groups, high=MAX_POOL_GROUPS)
    checks.sized("WorkerStatus.peers", message.peers, high=MAX_PEERS)
    for field, story in (("integrity", message.integrity), ("condition", message.condition)):
        checks.require(bool(story), f"WorkerStatus.{field}", story, "it must not be empty")
    return WorkerStatus(
        worker=common.worker_from_wire(message.worker),
        role=common.role_from_wire("WorkerStatus.role", message.role),
        model=checks.text("WorkerStatus.model", message.model),
        manager=checks.name("WorkerStatus.manager", message.manager),
        transport=checks.name("WorkerStatus.transport", message.transport),
        runtime=checks.name("WorkerStatus.runtime", message.runtime),
        pool_groups=tuple(_pool_group_from_wire(group) for group in message.pool_groups),
        waiting=message.waiting,
        running=message.running,
        holding=message.holding,
        receiving=message.receiving,
        peers=tuple(_peer_from_wire(peer) for peer in message.peers),
        integrity=checks.text("WorkerStatus.integrity", message.integrity),
        process_id=checks.count("WorkerStatus.process_id", message.process_id, low=1),
        condition=checks.text("WorkerStatus.condition", message.condition),
    )


def _pool_group_to_wire(group: PoolGroupStatus) -> pb.PoolGroup:
    return pb.PoolGroup(
        life_cycles=group.life_cycles,
        slot_bytes=group.slot_bytes,
        num_slots=group.num_slots,
        free=group.free,
        cached=group.cached,
        in_use=group.in_use,
        quarantined=group.quarantined,
        reserved=group.reserved,
    )


def _pool_group_from_wire(message: pb.PoolGroup) -> PoolGroupStatus:
    """Whether the counts add up to num_slots is not checked: a status must be able to show books that disagree."""
    checks.sized("PoolGroup.life_cycles", message.life_cycles, high=MAX_LIFE_CYCLES)
    return PoolGroupStatus(
        life_cycles=tuple(checks.name("PoolGroup.life_cycles", name) for name in message.life_cycles),
        slot_bytes=checks.count("PoolGroup.slot_bytes", message.slot_bytes),
        num_slots=checks.count("PoolGroup.num_slots", message.num_slots),
        free=checks.count("PoolGroup.free", message.free),
        cached=checks.count("PoolGroup.cached", message.cached),
        in_use=checks.count("PoolGroup.in_use", message.in_use),
        quarantined=checks.count("PoolGroup.quarantined", message.quarantined),
        reserved=checks.count("PoolGroup.reserved", message.reserved),
    )


def _peer_to_wire(peer: PeerStatus) -> pb.PairedWorker:
    return pb.PairedWorker(
        worker=common.worker_to_wire(peer.worker), role=common.role_to_wire(peer.role), lane=peer.lane
    )


def _peer_from_wire(message: pb.PairedWorker) -> PeerStatus:
    checks.present(message, "worker")
    return PeerStatus(
        worker=common.worker_from_wire(message.worker),
        role=common.role_from_wire("PairedWorker.role", message.role),
        lane=checks.name("PairedWorker.lane", message.lane),
    )
