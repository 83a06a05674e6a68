"""What a worker tells a peer about itself: rank and page table."""

from kvferry.cache.errors import Incompatibility, IncompatiblePeer
from kvferry.cache.ids import LayerId
from kvferry.cache.layout import BufferView
from kvferry.cache.lifecycle import LifeCycle
from kvferry.cache.page_table import LayerGroupEntry, PageTable, PoolEntry
from kvferry.cache.spec import ITEM_BYTES
from kvferry.transfer.control.convert import checks, common
from kvferry.transfer.types import RankInfo
from kvferry.v1 import common_pb2
from kvferry.v1 import peer_pb2 as pb

MAX_RANKS = 1 << 16
MAX_METADATA_BYTES = 4 << 20
MAX_POOLS = 256
MAX_LAYER_GROUPS = 256
MAX_BUFFERS = 1 << 14
MAX_TOKENS_PER_BLOCK = 1 << 16
MAX_SLOTS = (1 << 31) - 1
MAX_HEADS = 1 << 16
MAX_REASONS = 256
ADDRESS_SPACE_BYTES = 1 << 64


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
        page_table=page_table_to_wire(info.page_table),
        protocol_version=info.protocol_version,
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
        page_table=page_table_from_wire(message.page_table),
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


def page_table_to_wire(table: PageTable) -> pb.PageTable:
    return pb.PageTable(
        layout_digest=table.layout_digest,
        dtype=table.dtype,
        tokens_per_block=table.tokens_per_block,
        device=table.device,
        pools=[_pool_to_wire(pool) for pool in table.pools],
        layer_groups=[_layer_group_to_wire(group) for group in table.layer_groups],
    )


def page_table_from_wire(message: pb.PageTable) -> PageTable:
    checks.sized("PageTable.pools", message.pools, low=1, high=MAX_POOLS)
    checks.sized("PageTable.layer_groups", message.layer_groups, low=1, high=MAX_LAYER_GROUPS)
    pools = tuple(_pool_from_wire(pool) for pool in message.pools)
    tokens = checks.count("PageTable.tokens_per_block", message.tokens_per_block, low=1, high=MAX_TOKENS_PER_BLOCK)
    checks.require(message.dtype in ITEM_BYTES, "PageTable.dtype", message.dtype, f"use one of {', '.join(ITEM_BYTES)}")
    geometry = _Geometry(pools, tokens, ITEM_BYTES.get(message.dtype, 0))
    return PageTable(
        layout_digest=checks.name("PageTable.layout_digest", message.layout_digest),
        dtype=message.dtype,
        tokens_per_block=tokens,
        device=checks.name("PageTable.device", message.device),
        pools=pools,
        layer_groups=tuple(geometry.layer_group(group) for group in message.layer_groups),
    )


def _pool_to_wire(pool: PoolEntry) -> pb.Pool:
    return pb.Pool(
        base=pool.base, slot_bytes=pool.slot_bytes, slot_stride_bytes=pool.slot_stride, num_slots=pool.num_slots
    )


def _pool_from_wire(message: pb.Pool) -> PoolEntry:
    slot_bytes = checks.count("Pool.slot_bytes", message.slot_bytes, low=1)
    stride = checks.count("Pool.slot_stride_bytes", message.slot_stride_bytes, low=slot_bytes)
    num_slots = checks.count("Pool.num_slots", message.num_slots, low=1, high=MAX_SLOTS)
    end = message.base + stride * num_slots
    checks.require(end <= ADDRESS_SPACE_BYTES, "Pool.base", message.base, f"its last slot ends at {end}, past 2^64")
    return PoolEntry(message.base, slot_bytes, stride, num_slots)


def _layer_group_to_wire(group: LayerGroupEntry) -> pb.LayerGroup:
    return pb.LayerGroup(
        window_tokens=group.life_cycle.window or 0,
        sink_blocks=group.life_cycle.sink_blocks,
        pool=group.pool,
        buffers=[_buffer_to_wire(view) for view in group.buffers],
    )


def _buffer_to_wire(view: BufferView) -> pb.Buffer:
    return pb.Buffer(
        layer_id=view.layer_id,
        role=view.role,
        offset_bytes=view.offset_bytes,
        num_heads=view.num_heads,
        head_dim=view.head_dim,
        head_stride_bytes=view.head_stride_bytes,
        token_stride_bytes=view.token_stride_bytes,
    )


class _Geometry:
    """Checks layer groups against the pools and the block size of their table."""

    def __init__(self, pools: tuple[PoolEntry, ...], tokens_per_block: int, item_bytes: int) -> None:
        self._pools = pools
        self._tokens_per_block = tokens_per_block
        self._item_bytes = item_bytes

    def layer_group(self, message: pb.LayerGroup) -> LayerGroupEntry:
        pool = checks.count("LayerGroup.pool", message.pool, high=len(self._pools) - 1)
        checks.sized("LayerGroup.buffers", message.buffers, low=1, high=MAX_BUFFERS)
        slot_bytes = self._pools[pool].slot_bytes
        return LayerGroupEntry(
            _life_cycle(message), pool, tuple(self._buffer(view, slot_bytes) for view in message.buffers)
        )

    def _buffer(self, message: pb.Buffer, slot_bytes: int) -> BufferView:
        num_heads = checks.count("Buffer.num_heads", message.num_heads, low=1, high=MAX_HEADS)
        row_bytes = checks.count("Buffer.head_dim", message.head_dim, low=1, high=MAX_HEADS) * self._item_bytes
        token_stride = checks.count("Buffer.token_stride_bytes", message.token_stride_bytes, low=row_bytes)
        head_stride = checks.count("Buffer.head_stride_bytes", message.head_stride_bytes, low=1)
        last_token = (num_heads - 1) * head_stride + (self._tokens_per_block - 1) * token_stride
        end = message.offset_bytes + last_token + row_bytes
        rule = f"the buffer ends at {end}, past the slot's {slot_bytes} bytes"
        checks.require(end <= slot_bytes, "Buffer.offset_bytes", message.offset_bytes, rule)
        return BufferView(
            layer_id=LayerId(message.layer_id),
            role=checks.name("Buffer.role", message.role),
            offset_bytes=message.offset_bytes,
            num_heads=num_heads,
            head_dim=message.head_dim,
            head_stride_bytes=head_stride,
            token_stride_bytes=token_stride,
        )


def _life_cycle(message: pb.LayerGroup) -> LifeCycle:
    sinks = message.sink_blocks
    checks.require(bool(message.window_tokens) or not sinks, "LayerGroup.sink_blocks", sinks, "sinks need a window")
    return LifeCycle(message.window_tokens or None, sinks)
