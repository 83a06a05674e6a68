"""May two workers pair? Facts of both sides in, every difference out."""

from collections.abc import Iterator

from kvferry.cache.errors import Incompatibility
from kvferry.cache.page_table import PageTable
from kvferry.transfer.types import RankInfo


def check(local: RankInfo, remote: RankInfo) -> tuple[Incompatibility, ...]:
    """Every reason why these two must not exchange pages; empty when they may."""
    return (*_worker_differences(local, remote), *_geometry_differences(local.page_table, remote.page_table))


def _worker_differences(local: RankInfo, remote: RankInfo) -> Iterator[Incompatibility]:
    rows = [
        ("protocol_version", local.protocol_version, remote.protocol_version, "messages would be misread"),
        ("transport", local.transport, remote.transport, "both ends need the same transport library"),
        ("model_digest", local.model_digest, remote.model_digest, "the cache of another model means nothing here"),
        ("num_ranks", local.num_ranks, remote.num_ranks, "only equal parallel layouts are supported"),
        ("rank", local.rank, remote.rank, "equal layouts pair rank by rank"),
    ]
    for field, ours, theirs, why in rows:
        if ours != theirs:
            yield Incompatibility(field, str(ours), str(theirs), why)
    if not ((local.role.prefills and remote.role.decodes) or (local.role.decodes and remote.role.prefills)):
        yield Incompatibility("role", local.role.value, remote.role.value, "one side must prefill, the other decode")


def _geometry_differences(local: PageTable, remote: PageTable) -> Iterator[Incompatibility]:
    if local.layout_digest == remote.layout_digest:
        return
    rows = [
        ("dtype", local.dtype, remote.dtype),
        ("tokens_per_block", local.tokens_per_block, remote.tokens_per_block),
        ("life_cycles", _life_cycles(local), _life_cycles(remote)),
        ("slot_bytes", _slot_bytes(local), _slot_bytes(remote)),
        ("buffers", _buffers(local), _buffers(remote)),
    ]
    differing = [row for row in rows if row[1] != row[2]]
    for field, ours, theirs in differing or [("layout_digest", local.layout_digest, remote.layout_digest)]:
        yield Incompatibility(field, str(ours), str(theirs), "slots are copied whole, so both sides need one layout")


def _life_cycles(table: PageTable) -> str:
    return ", ".join(str(group.life_cycle) for group in table.layer_groups)


def _slot_bytes(table: PageTable) -> str:
    return ", ".join(str(table.pools[group.pool].slot_bytes) for group in table.layer_groups)


def _buffers(table: PageTable) -> str:
    """Layer ids and shapes of each group, short enough for a message."""
    parts = []
    for group in table.layer_groups:
        layers = sorted({buffer.layer_id for buffer in group.buffers})
        shapes = sorted({f"{b.role}[{b.num_heads}x{b.head_dim}], stride {b.head_stride_bytes}" for b in group.buffers})
        parts.append(f"layers {layers[0]}..{layers[-1]} ({len(layers)}) {' '.join(shapes)}")
    return "; ".join(parts)
