"""The KV cache of one request: three cursors and a positional list of slots per life cycle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from kvferry.cache.block_keys import BlockKey, KeyChain, ReuseScope, as_token_ids, chain
from kvferry.cache.block_tables import Parked
from kvferry.cache.errors import ConfigError, InvariantError, LocalProtocolError
from kvferry.cache.ids import NO_SLOT, LayerId, LifeCycleId
from kvferry.cache.lifecycle import ceil_div
from kvferry.cache.page_table import BlockLists, SlotList
from kvferry.cache.planned_drops import DropPlan
from kvferry.cache.published import Match
from kvferry.cache.slots import NO_NODE

if TYPE_CHECKING:
    from kvferry.cache.manager import KVCacheManager

Priority = int | Callable[[int, LifeCycleId], int]
"""When a sequence's pages are evicted, 0 (first) to 100, for all alike or by (block ordinal, life cycle)."""

DEFAULT_PRIORITY = 35
HIGHEST_PRIORITY = 100


class SequenceState(Enum):
    """SUSPENDED: keeps its pages, cannot run. ACTIVE: in the block tables. CLOSED: gone."""

    SUSPENDED = "suspended"
    ACTIVE = "active"
    CLOSED = "closed"


class Publishing(Enum):
    """Whether commits publish blocks.

    STOPPED: internally, since the tree is full or lost the block before; the caller still sees commits succeed.
    FINISHED: by stop_committing or close, or the manager publishes nothing.
    """

    ALLOWED = "allowed"
    STOPPED = "stopped"
    FINISHED = "finished"


class Borrowed(NamedTuple):
    """A matched page that is copied on the first resume, since the sequence will write into its block."""

    life_cycle: LifeCycleId
    ordinal: int
    slot: int


class SequenceCache:
    """The pages of one request, with 0 <= committed <= history <= capacity, all in tokens.

    committed: final tokens, never rewound. history: tokens that need no query any more; it alone decides which pages
    are out of their window, and it never decreases. capacity: tokens that can be stored.

    Made SUSPENDED by `KVCacheManager.create_sequence`, with the matched prefix held and all three cursors at its
    length. After `close` every call but `close` raises LocalProtocolError.

    Concurrency: the manager's thread.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        request_id: str,
        reserved: tuple[int, ...] | None,
        scope: ReuseScope,
        priority: Priority,
        match: Match,
        prompt: KeyChain,
        parked: Parked,
        borrowed: tuple[Borrowed, ...],
    ) -> None:
        self.request_id = request_id
        self.reserved = reserved
        self.reused_tokens = match.num_tokens
        self.borrowed = borrowed
        self.parked = parked
        self.row = -1
        self.state = SequenceState.SUSPENDED
        self.manager = manager
        self._scope = scope
        self._priority = priority
        off = manager.options.commit_policy == "off"
        self._publishing = Publishing.FINISHED if off else Publishing.ALLOWED
        self._tip = match.tip
        self._end = NO_NODE
        full_tokens = match.num_tokens - match.num_tokens % manager.layout.tokens_per_block
        self._pending = prompt.token_ids[full_tokens : match.num_tokens]
        self._prompt = prompt
        self._follows_prompt = True
        in_common = match.num_tokens + manager.options.match_backoff_tokens
        self._earlier_turn = manager.published.drops.turn_on(match.nodes, in_common)
        if self._tip != NO_NODE:
            manager.published.tree.refer(self._tip)

    # ---- cursors and pages

    @property
    def closed(self) -> bool:
        return self.state is SequenceState.CLOSED

    @property
    def committed(self) -> int:
        return int(self.manager.tables.committed[self.row]) if self.row >= 0 else self.parked.committed

    @property
    def history(self) -> int:
        return int(self.manager.tables.history[self.row]) if self.row >= 0 else self.parked.history

    @property
    def capacity(self) -> int:
        return int(self.manager.tables.capacity[self.row]) if self.row >= 0 else self.parked.capacity

    @property
    def num_blocks(self) -> int:
        return 0 if self.closed else ceil_div(self.capacity, self.manager.layout.tokens_per_block)

    def slots(self, life_cycle: LifeCycleId) -> SlotList:
        """Slot of every block, -1 where there is no page. Shapes: [num_blocks]. Valid while: until the next change."""
        if self.state is SequenceState.ACTIVE:
            return self.manager.tables.row(life_cycle, self.row)
        return self.parked.tables[life_cycle]

    def num_pages(self, life_cycle: LifeCycleId) -> int:
        """Slots that the sequence uses for a life cycle, borrowed and scratch ones included."""
        scratch = len(self.manager.scratch.of(self.row, life_cycle)) if self.row >= 0 else 0
        lent = sum(entry.life_cycle == life_cycle for entry in self.borrowed)
        return int((self.slots(life_cycle) >= 0).sum()) + lent + scratch

    @property
    def state_slot(self) -> int:
        """Slot of the recurrent state. Raises InvariantError when the sequence has none."""
        recurrent = self.manager.layout.recurrent
        slots = self.slots(recurrent.id) if recurrent else np.empty(0, np.int32)
        present = slots[slots >= 0]
        if len(present) != 1:
            raise InvariantError(f"sequence {self.request_id} has {len(present)} recurrent states, not one")
        return int(present[0])

    def page_indices(self, life_cycle: LifeCycleId, layer_id: LayerId) -> npt.NDArray[np.int64]:
        """Where each block of one layer lies in `KVCacheManager.paged_buffer`, -1 where there is no page.

        Scratch blocks are there, too; they hold what the layer wrote until the next layer writes.

        Shapes: [num_blocks]. Valid while: until the next change.
        """
        self._require(SequenceState.ACTIVE)
        group = self.manager.layout.life_cycles[life_cycle]
        place = group.layer_ids.index(layer_id) if group.sub_pages > 1 else 0
        slots = self.slots(life_cycle).astype(np.int64)
        indices = np.where(slots >= 0, slots * group.sub_pages + place, NO_SLOT)
        scratch = self.manager.scratch.of(self.row, life_cycle)
        if len(scratch):
            first, last = self.manager.scratch.blocks(self.row, life_cycle)
            block = np.arange(last - first)
            inside = (block + place) % group.sub_pages
            indices[first:last] = scratch[block // group.sub_pages].astype(np.int64) * group.sub_pages + inside
        return indices

    def pages(self, num_tokens: int, *, skip_blocks: int = 0) -> BlockLists:
        """Slots and epochs of the blocks that hold the first `num_tokens` tokens, copied; skipped ones as absent."""
        self._require(SequenceState.ACTIVE)
        blocks = ceil_div(num_tokens, self.manager.layout.tokens_per_block)
        tables = tuple(self.slots(group.id)[:blocks].copy() for group in self.manager.layout.life_cycles)
        for table in tables:
            table[:skip_blocks] = NO_SLOT
        return self.manager.with_epochs(tables)

    # ---- life

    def resume(self) -> None:
        """Become ACTIVE: take a row, copies of the blocks and the state that are only borrowed, and scratch pages.

        Raises:
            CapacityError: other sequences hold more than max_util_for_resume allows, or there are not enough slots for
                the copies; nothing changed.
        """
        self._require(SequenceState.SUSPENDED)
        self.manager.activate(self)

    def suspend(self) -> None:
        """Become SUSPENDED: pages are kept, scratch pages and the row are not."""
        self._require(SequenceState.ACTIVE)
        self.manager.park(self)

    def resize(self, *, capacity: int | None = None, history: int | None = None) -> None:
        """Move the cursors; pages come and go with them. Either everything changes or nothing.

        A smaller capacity rewinds; a larger history releases pages that left their window. Blocks that are already
        stale at the new history are never allocated: declaring a prompt as history while growing is how a decode
        worker takes only the pages it needs. Blocks that go stale before they are committed are not published.

        Raises:
            ConfigError: history would decrease, or capacity would fall below history; with scratch pages also see
                `KVCacheManager.resize_rows`.
            CapacityError: not enough slots; nothing changed.
        """
        self._require(SequenceState.ACTIVE)
        self.manager.resize_row(self.row, capacity=capacity, history=history)

    def close(self) -> None:
        """Stop committing and give all pages and the reservation back. Pages that a hold keeps go later. Idempotent."""
        if self.closed:
            return
        try:
            self.stop_committing()
        finally:
            # Whatever a caller's priority function does, nothing is left behind.
            self._publishing = Publishing.FINISHED
            self._leave_tip()
            self._leave_end()
            self.manager.forget(self)
            self.state = SequenceState.CLOSED
            self.parked = Parked(*self.parked[:3], tuple(np.empty(0, np.int32) for _ in self.parked.tables))

    # ---- publishing

    def commit(self, token_ids: Sequence[int] | npt.NDArray[np.integer] = (), *, snapshot: bool = False) -> None:
        """Declare the tokens after the committed ones final, and computed: history moves with them if it is behind.

        Full blocks are published, as far as they have pages.

        Args:
            token_ids: tokens [committed, committed + n). Shapes: [n].
            snapshot: also publish a copy of the recurrent state, if it stands at the end of a full block and a slot can
                be had. Never raises for want of a slot.

        Raises:
            ConfigError: beyond the capacity, or ids out of range.
            LocalProtocolError: a transfer still writes into one of the pages. Nothing changed.
        """
        self._require(SequenceState.ACTIVE)
        ids = as_token_ids(token_ids)
        end = self.committed + len(ids)
        if end > self.capacity:
            raise ConfigError(
                f"sequence {self.request_id}: commit of {len(ids)} tokens, but {self.committed} are committed and "
                f"capacity is {self.capacity}: commit what was computed"
            )
        history = max(end, self.history)
        if self.manager.options.window_scratch:
            self.manager.check_cursors(np.array([self.row]), np.array([history]), np.array([self.capacity]))
        if self._publishing is Publishing.ALLOWED:
            self._require_unwritten(end)
            self._publish(ids, end)
        self.manager.tables.committed[self.row] = end
        if history > self.history:
            self.resize(history=history)
        if snapshot and not len(self._pending) and self._tip != NO_NODE:
            self._publish_snapshot(self._tip, self.manager.layout.tokens_per_block)

    def stop_committing(self) -> None:
        """Publish the last block although it is not full, and the recurrent state. Later commits move cursors only.

        Neither is published while a transfer writes into it.
        """
        if self.closed:
            raise LocalProtocolError(f"sequence {self.request_id} is closed: it stopped committing then")
        if self._publishing is Publishing.FINISHED:
            return
        if self._publishing is Publishing.ALLOWED:
            self._publish_end()
        self._publishing = Publishing.FINISHED
        went_on = self._end != NO_NODE and self.committed > self.reused_tokens
        if went_on and self.manager.options.commit_policy == "per_conversation":
            self.manager.published.drops.take_turn(self._earlier_turn, self._end, self.plan_drop())
        self._leave_tip()

    def plan_drop(self) -> DropPlan:
        """Note what was published only to go on from exactly the committed length, to be dropped once that happened.

        Raises: LocalProtocolError when nothing was published, or after `close`.
        """
        end = self._end if self._end != NO_NODE else self._tip
        if end == NO_NODE or self.closed:
            raise LocalProtocolError(
                f"sequence {self.request_id} has published nothing, or is closed: plan before closing"
            )
        return self.manager.published.drops.plan(end, self.committed)

    # ---- private

    def _require_unwritten(self, end: int) -> None:
        p = self.manager.layout.tokens_per_block
        written = self.manager.written(self, self.committed // p, ceil_div(end, p)) if end > self.committed else []
        if written:
            raise LocalProtocolError(
                f"sequence {self.request_id} commits tokens [{self.committed}, {end}) while a transfer writes into "
                f"their slots {written}: commit when it is over"
            )

    def _require(self, state: SequenceState) -> None:
        if self.state is not state:
            raise LocalProtocolError(
                f"sequence {self.request_id} is {self.state.value}, it must be {state.value} for this"
            )

    def _publish(self, ids: npt.NDArray[np.uint32], end: int) -> None:
        """Publish the blocks that are full now. `end` is the committed length after this."""
        p = self.manager.layout.tokens_per_block
        tokens = np.concatenate([self._pending, ids]) if len(self._pending) else ids
        num_full = len(tokens) // p
        if num_full and self._has_parent():
            published, first = self.manager.published, (end - len(tokens)) // p
            slots = self.manager.publishable(self, first, first + num_full, end)
            blocks = tokens[: num_full * p]
            keys = self._keys(first, blocks)
            result = published.publish_blocks(self._tip, keys, blocks.reshape(-1, p), slots, self._priority_of)
            self._move_on(result, first, num_full)
        self._pending = tokens[num_full * p :].copy()  # not a view that keeps all of a prompt

    def _keys(self, first: int, blocks: npt.NDArray[np.uint32]) -> list[BlockKey]:
        """Names of full blocks from ordinal `first` on; those of the prompt that was looked up are known already."""
        p, last = self.manager.layout.tokens_per_block, first + len(blocks) // self.manager.layout.tokens_per_block
        self._follows_prompt = self._follows_prompt and self._prompt.names(first, blocks)
        keys: list[BlockKey] = []
        if self._follows_prompt and self._prompt.num_blocks > first:
            keys = self._prompt.keys(first, min(last, self._prompt.num_blocks))
        parent = keys[-1] if keys else self.manager.published.tree.key(self._tip)
        return keys + chain(parent, blocks[len(keys) * p :], p)

    def _has_parent(self) -> bool:
        """Make sure that there is a node to publish below; without one, publishing stops."""
        tree = self.manager.published.tree
        if self._tip == NO_NODE:
            self._tip = tree.open_root(self._scope)
            tree.refer(self._tip)
        if not tree.alive(self._tip):
            self._publishing = Publishing.STOPPED
        return tree.alive(self._tip)

    def _move_on(self, result: tuple[int, list[SlotList]] | None, first: int, num_blocks: int) -> None:
        if result is None:
            self._publishing = Publishing.STOPPED
            return
        tip, slots = result
        self.manager.published.tree.refer(tip)
        self.manager.published.tree.unrefer(self._tip)
        self._tip = tip
        for table, after in zip(self.manager.tables.tables, slots, strict=True):
            published = after >= 0  # what is not worth publishing keeps its page as well
            table[self.row, first : first + num_blocks][published] = after[published]

    def _publish_end(self) -> None:
        """Publish the partial last block, if the manager reuses such, and the state at the end.

        With room for tokens beyond the history a step may be under way that has moved the state on.
        """
        self._leave_end()  # of a call that failed
        ordinal = self.committed // self.manager.layout.tokens_per_block
        partial = len(self._pending) and self.manager.rules.partial_blocks
        if partial and not self.manager.written(self, ordinal, ordinal + 1) and self._has_parent():
            slots = self.manager.publishable(self, ordinal, ordinal + 1, self.committed)
            self._end = self.manager.published.publish_partial(
                self._tip, self._pending, [int(table[0]) for table in slots], self._priority_of
            )
            position = len(self._pending)
        else:
            self._end = NO_NODE if len(self._pending) else self._tip
            position = self.manager.layout.tokens_per_block
        if self._end != NO_NODE:
            self.manager.published.tree.refer(self._end)
            if self.capacity == self.history:
                self._publish_snapshot(self._end, position)
            if not self.manager.published.tree.alive(self._end):
                self._leave_end()

    def _publish_snapshot(self, node: int, position_in_block: int) -> None:
        """Publish a copy of the recurrent state, if it stands at the committed length.

        At the matched length it is published already, or has not been received.
        """
        if (
            self.state is SequenceState.ACTIVE
            and self.reused_tokens < self.committed == self.history
            and self._publishing is Publishing.ALLOWED
        ):
            self.manager.publish_snapshot(self, node, position_in_block, self._priority_of)

    def _leave_tip(self) -> None:
        if self._tip != NO_NODE:
            self.manager.published.tree.unrefer(self._tip)
            self._tip = NO_NODE

    def _leave_end(self) -> None:
        if self._end != NO_NODE:
            self.manager.published.tree.unrefer(self._end)
            self._end = NO_NODE

    def _priority_of(self, ordinals: npt.NDArray[np.int32], life_cycle: LifeCycleId) -> npt.NDArray[np.int16]:
        if not callable(self._priority):
            return np.full(len(ordinals), self._priority, np.int16)
        found = [check_priority(self._priority(ordinal, life_cycle)) for ordinal in ordinals.tolist()]
        return np.array(found, np.int16)


def check_priority(priority: int) -> int:
    """The priority itself. Raises ConfigError unless it is between 0 and 100."""
    if not 0 <= priority <= HIGHEST_PRIORITY:
        raise ConfigError(f"priority is {priority}: it must lie between 0 (goes first) and {HIGHEST_PRIORITY}")
    return priority
