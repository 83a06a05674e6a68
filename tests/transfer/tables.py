"""Managers, page tables and rank records for tests."""

import dataclasses
from typing import Any

import numpy as np

from kvferry.cache.layout import build_layout
from kvferry.cache.manager import KVCacheManager
from kvferry.cache.page_table import BlockLists, PageTable
from kvferry.transfer.types import RankInfo, Role, WorkerId
from tests.cache.specs import spec

WINDOWS: list[int | None] = [8, None, 8, None]


def manager(
    num_slots: int = 64, windows: list[int | None] | None = None, *, tokens_per_block: int = 4
) -> KVCacheManager:
    layout = build_layout(spec(windows or WINDOWS), tokens_per_block=tokens_per_block)
    return KVCacheManager(layout, [num_slots] * len(layout.pool_groups))


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
        page_table=table,
    )
    return dataclasses.replace(info, **changes)


def lists(*slots: list[int]) -> BlockLists:
    """Block lists with epoch 1 for every page."""
    arrays = tuple(np.array(group, np.int32) for group in slots)
    return BlockLists(arrays, tuple((group >= 0).astype(np.uint32) for group in arrays))
