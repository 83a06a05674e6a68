"""Models, page tables and rank records for tests. No bytes and no manager are behind them."""

import dataclasses
from typing import Any

import numpy as np

from kvferry.cache.ids import LayerId
from kvferry.cache.layout import build_layout
from kvferry.cache.page_table import BlockLists, LayerGroupEntry, PageTable, PoolEntry
from kvferry.cache.spec import BufferSpec, LayerSpec, ModelSpec, StateSpec
from kvferry.transfer.types import RankInfo, Role, WorkerId
from tests.cache.specs import spec

WINDOWS: list[int | None] = [8, None, 8, None]
PLAIN = spec(WINDOWS)
"""Two life cycles whose slots share one pool."""

_SCALE = BufferSpec("key_block_scale", 2, 4, "uint8", own_base=True)

SCALED = ModelSpec(
    "scaled",
    "float32",
    tuple(dataclasses.replace(layer, buffers=(*layer.buffers, _SCALE)) for layer in spec([8, None]).layers),
)
"""Two life cycles in one group of two pools: block scales lie at a base of their own."""

HYBRID = ModelSpec(
    "hybrid",
    "float32",
    (
        *spec([8, None]).layers,
        LayerSpec(
            LayerId(2), None, (), (StateSpec("conv_state", (4, 6), "float32"), StateSpec("ssm_state", (2, 3, 4)))
        ),
    ),
)
"""Two attention layers and a recurrent one, whose state is a page in a pool of its own."""

MIXED = ModelSpec("mixed", "float32", (SCALED.layers[0], *HYBRID.layers[1:]))
"""A window in a group of two pools, full attention in a group of one, and a recurrent state."""


def page_table(model: ModelSpec = PLAIN, num_slots: int = 64, *, tokens_per_block: int = 4) -> PageTable:
    """The table of pools that do not exist, at addresses of their own."""
    layout = build_layout(model, tokens_per_block=tokens_per_block)
    pools: list[PoolEntry] = []
    indices = []
    for group in layout.pool_groups:
        indices.append(tuple(range(len(pools), len(pools) + len(group.pool_bytes))))
        pools += [
            PoolEntry((len(pools) + at + 1) << 40, size, size, num_slots) for at, size in enumerate(group.pool_bytes)
        ]
    groups = tuple(
        LayerGroupEntry(entry.life_cycle, indices[entry.pool_group], entry.buffers, entry.states)
        for entry in layout.life_cycles
    )
    return PageTable(layout.digest, layout.dtype, tokens_per_block, "cpu", tuple(pools), groups)


def rank_info(table: PageTable, **changes: Any) -> RankInfo:
    info = RankInfo(
        worker=WorkerId("w", 7),
        role=Role.BOTH,
        rank=0,
        num_ranks=1,
        transport="loopback",
        agent_name="agent",
        agent_metadata=b"",
        model_digest="d",
        manager="V2",
        page_table=table,
    )
    return dataclasses.replace(info, **changes)


def lists(*slots: list[int]) -> BlockLists:
    """Block lists with epoch 1 for every page."""
    arrays = tuple(np.array(group, np.int32) for group in slots)
    return BlockLists(arrays, tuple((group >= 0).astype(np.uint32) for group in arrays))
