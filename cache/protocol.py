"""What engines and the transceiver ask of a KV-cache manager, whichever it is."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvferry.cache.admission import PoolOptions, Verdict
from kvferry.cache.block_keys import ReuseScope
from kvferry.cache.holds import Access, Hold
from kvferry.cache.layout import CacheLayout
from kvferry.cache.lifecycle import Counts
from kvferry.cache.manager import NO_SCOPE, GroupUsage
from kvferry.cache.page_table import BlockLists, PageTable
from kvferry.cache.sequence import DEFAULT_PRIORITY, Priority, SequenceCache
from kvferry.cache.storage import PoolStorage


class CacheManager(Protocol):
    """See `KVCacheManager` for what each member does.

    Concurrency: one thread, the engine's loop.
    """

    @property
    def version(self) -> str: ...
    @property
    def layout(self) -> CacheLayout: ...
    @property
    def storage(self) -> PoolStorage: ...
    @property
    def options(self) -> PoolOptions: ...

    def buffer(self, layer_id: int, role: str) -> torch.Tensor: ...
    def paged_buffer(self, layer_id: int, role: str) -> torch.Tensor: ...
    def state(self, layer_id: int, role: str) -> torch.Tensor: ...
    def page_table(self) -> PageTable: ...

    def fits_ever(self, slots: Sequence[int]) -> Verdict: ...
    def can_admit(self, slots: Sequence[int]) -> Verdict: ...
    def create_sequence(
        self,
        request_id: str,
        reserve: Sequence[int] | None = None,
        *,
        token_ids: Sequence[int] | npt.NDArray[np.integer] = (),
        scope: ReuseScope = NO_SCOPE,
        priority: Priority = DEFAULT_PRIORITY,
        for_transfer: bool = False,
    ) -> SequenceCache: ...
    def probe(self, token_ids: Sequence[int] | npt.NDArray[np.integer], scope: ReuseScope = NO_SCOPE) -> int: ...
    def resize_many(
        self, sequences: Sequence[SequenceCache], *, capacity: Counts | None = None, history: Counts | None = None
    ) -> None: ...

    def hold(self, pages: BlockLists, access: Access) -> Hold: ...
    def release(self, hold: Hold) -> None: ...

    def usage(self) -> tuple[GroupUsage, ...]: ...
    def check_integrity(self) -> None: ...
