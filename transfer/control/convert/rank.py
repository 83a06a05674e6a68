"""What a worker tells a peer about itself, and why a peer was refused."""

from kvferry.cache.errors import Incompatibility, IncompatiblePeer
from kvferry.transfer.control.convert import checks, common, page_table
from kvferry.transfer.types import RankInfo
from kvferry.v1 import common_pb2
from kvferry.v1 import peer_pb2 as pb

MAX_RANKS = 1 << 16
MAX_METADATA_BYTES = 4 << 20
MAX_REASONS = 256


@checks.outgoing
def rank_to_wire(info: RankInfo) -> pb.RankInfo:
    return pb.RankInfo(
        worker=common.worker_to_wire(info.worker),
        role=common.role_to_wire(info.role),
        rank=info.rank,
        num_ranks=info.num_ranks,
        transport=info.transport,
        agent_name=info.agent_name,
        agent_metadata=info.agent_metadata,
        model_digest=info.model_digest,
        page_table=page_table.page_table_to_wire(info.page_table),
        protocol_version=info.protocol_version,
        manager=info.manager,
    )


def rank_from_wire(message: pb.RankInfo) -> RankInfo:
    checks.present(message, "worker")
    checks.present(message, "page_table")
    checks.sized("RankInfo.agent_metadata", message.agent_metadata, high=MAX_METADATA_BYTES)
    num_ranks = checks.count("RankInfo.num_ranks", message.num_ranks, low=1, high=MAX_RANKS)
    return RankInfo(
        worker=common.worker_from_wire(message.worker),
        role=common.role_from_wire("RankInfo.role", message.role),
        rank=checks.count("RankInfo.rank", message.rank, high=num_ranks - 1),
        num_ranks=num_ranks,
        transport=checks.name("RankInfo.transport", message.transport),
        agent_name=checks.name("RankInfo.agent_name", message.agent_name),
        agent_metadata=message.agent_metadata,
        model_digest=checks.name("RankInfo.model_digest", message.model_digest),
        manager=checks.name("RankInfo.manager", message.manager),
        page_table=page_table.page_table_from_wire(message.page_table),
        protocol_version=checks.count("RankInfo.protocol_version", message.protocol_version, low=1),
    )


@checks.outgoing
def rejection_to_wire(error: IncompatiblePeer) -> pb.Rejection:
    return pb.Rejection(
        reasons=[
            common_pb2.Incompatibility(**{name: checks.clipped(value) for name, value in vars(reason).items()})
            for reason in error.reasons[:MAX_REASONS]
        ]
    )


def rejection_from_wire(message: pb.Rejection, peer: str) -> IncompatiblePeer:
    """The error as this side sees it: what the peer called local is remote here."""
    checks.sized("Rejection.reasons", message.reasons, low=1, high=MAX_REASONS)
    return IncompatiblePeer(peer, [_reason_from_wire(reason) for reason in message.reasons])


def _reason_from_wire(message: common_pb2.Incompatibility) -> Incompatibility:
    return Incompatibility(
        field=checks.name("Incompatibility.field", message.field),
        local=checks.text("Incompatibility.remote", message.remote),
        remote=checks.text("Incompatibility.local", message.local),
        why=checks.text("Incompatibility.why", message.why),
    )
