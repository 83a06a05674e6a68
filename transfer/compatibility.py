"""May two workers pair? Facts of both sides in, every difference out."""

from collections.abc import Callable, Iterator, Sequence

from kvferry.cache.errors import Incompatibility
from kvferry.cache.layout import BufferView, StateView
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
        ("manager", local.manager, remote.manager, "pages are laid out and retained by different rules"),
        ("num_ranks", local.num_ranks, remote.num_ranks, "only equal parallel layouts are supported"),
        ("rank", local.rank, remote.rank, "equal layouts pair rank by rank"),
    ]
    for field, ours, theirs, why in rows:
        if ours != theirs:
            yield Incompatibility(field, str(ours), str(theirs), why)
    if not ((local.role.prefills and remote.role.decodes) or (local.role.decodes and remote.role.prefills)):
        yield Incompatibility("role", local.role.value, remote.role.value, "one side must prefill, the other decode")


def _geometry_differences(local: PageTable, remote: PageTable) -> Iterator[Incompatibility]:
    """The digest is only what the peer says, so what it stands for is compared as well."""
    rows = [(field, text(local), text(remote)) for field, value, text in _GEOMETRY if value(local) != value(remote)]
    if not rows and local.layout_digest != remote.layout_digest:
        rows = [("layout_digest", local.layout_digest, remote.layout_digest)]
    for field, ours, theirs in rows:
        yield Incompatibility(field, ours, theirs, "slots are copied whole, so both sides need one layout")


def _life_cycles(table: PageTable) -> str:
    return ", ".join(str(group.life_cycle) for group in table.layer_groups)


def _slot_bytes(table: PageTable) -> str:
    """Per group; the sizes in the pools of one group are joined by a plus sign."""
    return ", ".join("+".join(str(table.pools[pool].slot_bytes) for pool in g.pools) for g in table.layer_groups)


def _buffers(table: PageTable) -> str:
    """Layer ids and shapes of each group, short enough for a message."""
    return "; ".join(
        _layers(group.buffers) + " ".join(sorted({_shape(buffer) for buffer in group.buffers}))
        for group in table.layer_groups
        if group.buffers
    )


def _shape(buffer: BufferView) -> str:
    shape = f"{buffer.num_heads}x{buffer.head_dim}"
    return f"{buffer.role}[{shape}] {buffer.dtype}, stride {buffer.head_stride_bytes}"


def _states(table: PageTable) -> str:
    """As `_buffers`, for recurrent layers; "none" without them."""
    states = [state for group in table.layer_groups for state in group.states]
    shapes = sorted({f"{state.role}[{'x'.join(map(str, state.shape))}] {state.dtype}" for state in states})
    return _layers(states) + " ".join(shapes) if states else "none"


def _layers(parts: Sequence[BufferView | StateView]) -> str:
    layers = sorted({part.layer_id for part in parts})
    return f"layers {layers[0]}..{layers[-1]} ({len(layers)}) "


_GEOMETRY: tuple[tuple[str, Callable[[PageTable], object], Callable[[PageTable], str]], ...] = (
    ("dtype", lambda table: table.dtype, lambda table: table.dtype),
    ("tokens_per_block", lambda table: table.tokens_per_block, lambda table: str(table.tokens_per_block)),
    ("life_cycles", _life_cycles, _life_cycles),
    ("slot_bytes", _slot_bytes, _slot_bytes),
    ("buffers", lambda table: [group.buffers for group in table.layer_groups if group.buffers], _buffers),
    ("states", lambda table: [group.states for group in table.layer_groups if group.states], _states),
)
"""What two tables must agree in: field, what is compared, how it is shown."""
