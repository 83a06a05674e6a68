"""The KV cache of one request: three cursors and a positional list of slots per life cycle."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvferry.cache.errors import ConfigError, LocalProtocolError
from kvferry.cache.ids import NO_SLOT, LifeCycleId
from kvferry.cache.lifecycle import LifeCycle, ceil_div
from kvferry.cache.page_table import BlockLists, SlotList

if TYPE_CHECKING:
    from kvferry.cache.manager import KVCacheManager


class PageChange(NamedTuple):
    """What one life cycle of a sequence gains and loses in a resize.

    Attributes:
        ordinals: block ordinals that need a new page.
        released: slots whose pages are no longer needed.
        table: the slot list after the change; new pages are still -1.
    """

    ordinals: SlotList
    released: SlotList
    table: SlotList


class SequenceCache:
    """The pages of one request, with 0 <= committed <= history <= capacity, all in tokens.

    committed: final tokens, never rewound. history: tokens that need no query any more; it alone decides which pages
    are out of their window, and it never decreases. capacity: tokens that can be stored.

    Made by `KVCacheManager.create_sequence`; after `close` every call but `close` raises LocalProtocolError.

    Concurrency: the manager's thread.
    """

    def __init__(self, manager: KVCacheManager, request_id: str, reserved: tuple[int, ...]) -> None:
        self.request_id = request_id
        self.reserved = reserved
        self.committed = 0
        self.history = 0
        self.capacity = 0
        self._manager: KVCacheManager | None = manager
        self._tables = [np.empty(0, np.int32) for _ in manager.layout.life_cycles]

    @property
    def closed(self) -> bool:
        return self._manager is None

    @property
    def num_blocks(self) -> int:
        return len(self._tables[0])

    def slots(self, life_cycle: LifeCycleId) -> SlotList:
        """Slot of every block, -1 where there is no page. Shapes: [num_blocks]. Valid while: until the next resize."""
        return self._tables[life_cycle]

    def pages(self, num_tokens: int) -> BlockLists:
        """Slots and epochs of the blocks that hold the first `num_tokens` tokens, copied."""
        manager = self._open_manager()
        blocks = ceil_div(num_tokens, manager.layout.tokens_per_block)
        return manager.with_epochs(tuple(table[:blocks].copy() for table in self._tables))

    def resize(self, *, capacity: int | None = None, history: int | None = None) -> None:
        """Move the cursors; pages come and go with them. Either everything changes or nothing.

        A smaller capacity rewinds; a larger history releases pages that left their window. Blocks that are already
        stale at the new history are never allocated: declaring a prompt as history while growing is how a decode
        worker takes only the pages it needs.

        Raises:
            ConfigError: history would decrease, or capacity would fall below history or committed.
            CapacityError: not enough free slots; nothing changed.
        """
        manager = self._open_manager()
        new_history = self.history if history is None else history
        new_capacity = self.capacity if capacity is None else capacity
        self._check_cursors(new_history, new_capacity)
        changes = [
            self._change(table, group.life_cycle, new_history, new_capacity, manager.layout.tokens_per_block)
            for table, group in zip(self._tables, manager.layout.life_cycles, strict=True)
        ]
        manager.apply(self, changes)
        self._tables = [change.table for change in changes]
        self.history, self.capacity = new_history, new_capacity

    def commit(self, num_tokens: int) -> None:
        """Declare the first `num_tokens` tokens final. Raises ConfigError beyond history or backwards."""
        self._open_manager()
        if not self.committed <= num_tokens <= self.history:
            raise ConfigError(
                f"sequence {self.request_id}: commit of {num_tokens} tokens, but {self.committed} are committed and "
                f"history is {self.history}: commit between the two"
            )
        self.committed = num_tokens

    def close(self) -> None:
        """Give all pages and the reservation back. Pages a hold keeps become free when it ends. Idempotent."""
        if self._manager is not None:
            self._manager.forget(self)
            self._manager = None
            self._tables = [np.empty(0, np.int32) for _ in self._tables]

    def _open_manager(self) -> KVCacheManager:
        if self._manager is None:
            raise LocalProtocolError(f"sequence {self.request_id} is closed")
        return self._manager

    def _check_cursors(self, history: int, capacity: int) -> None:
        if history < self.history:
            raise ConfigError(
                f"sequence {self.request_id}: history {self.history} cannot decrease to {history}; rewind capacity only"
            )
        if capacity < history:
            raise ConfigError(f"sequence {self.request_id}: capacity {capacity} is below history {history}")

    @staticmethod
    def _change(
        table: SlotList, life_cycle: LifeCycle, history: int, capacity: int, tokens_per_block: int
    ) -> PageChange:
        blocks = ceil_div(capacity, tokens_per_block)
        stale = life_cycle.stale_range(history, tokens_per_block).clipped(blocks)
        after = np.full(blocks, NO_SLOT, np.int32)
        kept = min(blocks, len(table))
        after[:kept] = table[:kept]
        after[stale.start : stale.end] = NO_SLOT
        dropped = np.concatenate([table[stale.start : min(stale.end, kept)], table[kept:]])
        fresh = np.arange(kept, blocks, dtype=np.int32)
        fresh = fresh[(fresh < stale.start) | (fresh >= stale.end)]
        return PageChange(fresh, dropped[dropped >= 0], after)
