"""The V2 KV-cache manager: pools shared by life cycles, sequences that take pages from them, holds for transfers.

How the parts fit: `SlotAllocator` knows who uses a slot, `BlockTables` which slots a sequence has, `PublishedPages`
what may be reused; this module moves pages between them. Whatever changes several of them is planned first.
"""

import itertools
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvferry.cache.admission import (
    DEFAULT_OPTIONS,
    PoolOptions,
    Verdict,
    as_count,
    as_counts,
    judge_count,
    judge_ever,
    judge_now,
)
from kvferry.cache.block_keys import BlockKey, KeyChain, ReuseScope, as_token_ids, chain
from kvferry.cache.block_tables import BlockTables, Parked, Rows, TableChange, by_pool_group
from kvferry.cache.errors import CapacityError, ConfigError, LocalProtocolError
from kvferry.cache.holds import Access, Hold, Holds
from kvferry.cache.ids import NO_SLOT, LifeCycleId
from kvferry.cache.integrity import check_manager
from kvferry.cache.layout import CacheLayout
from kvferry.cache.lifecycle import Counts
from kvferry.cache.page_table import BlockLists, PageTable, SlotList
from kvferry.cache.promises import Promises
from kvferry.cache.published import NO_MATCH, Match, PriorityOf, PublishedPages, ReuseRules
from kvferry.cache.resuming import activate
from kvferry.cache.scratch import ScratchPages
from kvferry.cache.sequence import DEFAULT_PRIORITY, Borrowed, Priority, SequenceCache, SequenceState, check_priority
from kvferry.cache.slots import SlotAllocator
from kvferry.cache.storage import PoolStorage

NO_SCOPE = ReuseScope()
_FIRST_EPOCHS = itertools.count(0, 1_000_003)
_NO_SLOTS = np.empty(0, np.int32)


class GroupUsage(NamedTuple):
    """Slots of one pool group. free + cached + held == num_slots.

    Attributes:
        cached: used by nobody, published, evictable.
        held: used by sequences or transfers.
        reserved: promised to open sequences, taken or not.
        transferring: read or written by a transfer.
    """

    num_slots: int
    free: int
    cached: int
    held: int
    reserved: int
    transferring: int


class KVCacheManager:
    """Pools of one rank and the sequences living in them.

    A sequence may be admitted with a reservation: the most slots it will ever hold at once, per pool group. Admission
    keeps the sum of what may still be taken within the pools, so such a sequence never fails for lack of pages.

    Raises: ConfigError when the slot counts do not fit the layout, or the device lacks the memory.

    Concurrency: one thread, the engine's loop.
    """

    version: ClassVar[str] = "V2"
    rules: ClassVar[ReuseRules] = ReuseRules()

    def __init__(
        self,
        layout: CacheLayout,
        num_slots: Sequence[int],
        device: str = "cpu",
        *,
        options: PoolOptions = DEFAULT_OPTIONS,
    ) -> None:
        if len(num_slots) != len(layout.pool_groups) or any(count < 1 for count in num_slots):
            raise ConfigError(f"slots {list(num_slots)}: need {len(layout.pool_groups)} positive counts, one per group")
        if options.window_scratch and layout.order != "layer_major":
            raise ConfigError("window_scratch needs slot order layer_major: layers share whole parts of a slot")
        self.layout = layout
        self.options = options
        self.storage = PoolStorage(layout, num_slots, device)
        # Pages of one manager are not taken for those of another in the same process.
        first_epoch = next(_FIRST_EPOCHS) % (1 << 31)
        self.allocators = tuple(SlotAllocator(count, first_epoch) for count in num_slots)
        self.published = PublishedPages(layout, self.allocators, self.rules, options.match_backoff_tokens)
        self.tables = BlockTables(layout.life_cycles, layout.tokens_per_block, options.max_rewind_tokens)
        self.sequences: set[SequenceCache] = set()
        self.holds = Holds(layout, self.allocators)
        self.scratch = ScratchPages(
            layout,
            self.tables,
            self.allocators,
            enabled=options.window_scratch,
            max_rewind_tokens=options.max_rewind_tokens,
        )
        self.promises = Promises(layout, self.allocators)

    # ---- layout and memory

    def buffer(self, layer_id: int, role: str) -> torch.Tensor:
        """One layer's buffer. Shapes: [num_slots, num_heads, tokens_per_block, head_dim], a view of the pool."""
        return self.storage.buffer(layer_id, role)

    def paged_buffer(self, layer_id: int, role: str) -> torch.Tensor:
        """One layer's buffer, indexed by `SequenceCache.page_indices`. Shapes: as `PoolStorage.paged_buffer`."""
        return self.storage.paged_buffer(layer_id, role)

    def state(self, layer_id: int, role: str) -> torch.Tensor:
        """One layer's recurrent state. Shapes: [num_slots, *state shape], a view of the pool."""
        return self.storage.state(layer_id, role)

    def page_table(self) -> PageTable:
        """The frozen geometry that peers and the transceiver see."""
        return self.storage.page_table()

    # ---- admission

    def fits_ever(self, slots: Sequence[int]) -> Verdict:
        """Whether even empty pools could hold a request that needs `slots` per pool group (`reserved_slots`).

        Raises: ConfigError: not one count per pool group, or a negative one.
        """
        if len(slots) != len(self.layout.pool_groups):
            raise ConfigError(f"slots {list(slots)}: need {len(self.layout.pool_groups)} counts, one per pool group")
        slots = [as_count("slots", count) for count in slots]
        return judge_ever(slots, self.storage.num_slots)

    def can_admit(self, slots: Sequence[int]) -> Verdict:
        """Whether such a request can be promised its slots now, and is within the cap on open sequences."""
        verdict = self.fits_ever(slots)
        if verdict.admitted:
            verdict = judge_count(len(self.sequences), self.options.max_sequences)
        return judge_now(slots, self.unpromised()) if verdict.admitted else verdict

    def unpromised(self) -> tuple[int, ...]:
        """Slots per pool group that are neither spoken for by an open sequence nor kept by transfers."""
        return self.promises.left()

    def create_sequence(
        self,
        request_id: str,
        reserve: Sequence[int] | None = None,
        *,
        token_ids: Sequence[int] | npt.NDArray[np.integer] = (),
        scope: ReuseScope = NO_SCOPE,
        priority: Priority = DEFAULT_PRIORITY,
        for_transfer: bool = False,
        keys: Sequence[BlockKey] | None = None,
        beam_width: int = 1,
    ) -> SequenceCache:
        """Open a sequence, SUSPENDED, that holds the longest published prefix of `token_ids`.

        Args:
            reserve: most slots per pool group (`reserved_slots`); None: no promise, growing may fail, and what others
                are promised is neither reused nor taken.
            token_ids: what may be matched; the caller leaves out the last token of a prompt, which must be computed.
            scope: only pages published in the same scope are matched.
            for_transfer: match full blocks only, and no recurrent state: the rest will be received.
            keys: `block_keys` of the tokens, if the caller has them.
            beam_width: only 1.

        Raises:
            CapacityError: not now, or (permanent) never; nothing changed.
            ConfigError: token ids or a priority out of range, a reservation of another length, or a beam.
        """
        if beam_width != 1:
            raise ConfigError(f"beam width is {beam_width}: a sequence has one beam; open a sequence for each beam")
        if reserve is None:
            judge_count(len(self.sequences), self.options.max_sequences).require(request_id)
        else:
            self.can_admit(reserve).require(request_id)
        ids = as_token_ids(token_ids)
        if not callable(priority):
            check_priority(priority)
        prompt = KeyChain(scope.key, ids, self.layout.tokens_per_block, keys or ())
        match = self._match(scope, prompt, for_transfer=for_transfer)
        if reserve is None and not self.promises.may_claim(self._claimable(match)):
            match = NO_MATCH
        parked, borrowed = self._claim(match, for_transfer=for_transfer)
        reserved = None if reserve is None else tuple(reserve)
        sequence = SequenceCache(self, request_id, reserved, scope, priority, match, prompt, parked, borrowed)
        self.sequences.add(sequence)
        self.promises.add(sequence)
        return sequence

    def probe(self, token_ids: Sequence[int] | npt.NDArray[np.integer], scope: ReuseScope = NO_SCOPE) -> int:
        """Tokens that a sequence created with these would reuse; fewer if it reserves nothing. Nothing changes."""
        prompt = KeyChain(scope.key, as_token_ids(token_ids), self.layout.tokens_per_block)
        return self._match(scope, prompt, for_transfer=False).num_tokens

    def block_keys(
        self, token_ids: Sequence[int] | npt.NDArray[np.integer], scope: ReuseScope = NO_SCOPE
    ) -> list[BlockKey]:
        """Names of the full blocks of a prompt, for `create_sequence` and for routers."""
        return chain(scope.key, as_token_ids(token_ids), self.layout.tokens_per_block)

    # ---- the step

    def resize_many(
        self, sequences: Sequence[SequenceCache], *, capacity: Counts | None = None, history: Counts | None = None
    ) -> None:
        """`resize_rows` of ACTIVE sequences.

        Raises: as `resize_rows`; LocalProtocolError also for a sequence of another manager.
        """
        rows = np.fromiter((s.row if s.manager is self else -1 for s in sequences), np.int64, len(sequences))
        if len(rows) and rows.min() < 0:
            names = [s.request_id for s, row in zip(sequences, rows, strict=True) if row < 0]
            raise LocalProtocolError(f"sequences {names} are not active here: resume them, or ask their own manager")
        self.resize_rows(rows, capacity=capacity, history=history)

    def resize_row(self, row: int, *, capacity: int | None, history: int | None) -> None:
        """`resize_rows` of one sequence; quick where no page comes or goes, as in most steps."""
        old_history, old_capacity = int(self.tables.history[row]), int(self.tables.capacity[row])
        new_history = old_history if history is None else as_count("history", history)
        new_capacity = old_capacity if capacity is None else as_count("capacity", capacity)
        simple = old_history <= new_history <= new_capacity and not self.options.window_scratch
        if simple and self.tables.stays(row, new_history, new_capacity):
            self.tables.history[row], self.tables.capacity[row] = new_history, new_capacity
            return
        rows, moved_history, moved_capacity = np.array([row]), np.array([new_history]), np.array([new_capacity])
        if simple:
            self._apply(self.tables.plan(rows, moved_history, moved_capacity))
        else:
            self.resize_rows(rows, history=moved_history, capacity=moved_capacity)

    def resize_rows(self, rows: Rows, *, capacity: Counts | None = None, history: Counts | None = None) -> None:
        """Move the cursors of many sequences; pages come and go with them. Either everything changes or nothing.

        Shapes: rows [n], distinct rows of ACTIVE sequences; capacity and history [n], in tokens, None: unchanged.

        Raises:
            ConfigError: a history would decrease, or a capacity fall below its history; of a sequence with scratch
                pages: the history leaves [capacity - max_rewind_tokens, capacity] or the capacity shrinks.
            LocalProtocolError: a row is not that of an active sequence, or is named twice.
            CapacityError: not enough slots, with the numbers; nothing changed.
        """
        self._check_rows(rows)
        new_history = self.tables.history[rows] if history is None else as_counts("history", history)
        new_capacity = self.tables.capacity[rows] if capacity is None else as_counts("capacity", capacity)
        if new_history.shape != rows.shape or new_capacity.shape != rows.shape:
            raise ConfigError(
                f"{len(rows)} sequences, history of shape {new_history.shape}, capacity of {new_capacity.shape}: give "
                "one of each per sequence"
            )
        self.check_cursors(rows, new_history, new_capacity)
        change = self.tables.plan(rows, new_history, new_capacity)
        self._apply(change)

    def _check_rows(self, rows: Rows) -> None:
        """A row below 0 is that of no sequence, although arrays take it for one counted from the end."""
        known = (rows >= 0) & (rows < len(self.tables.active))
        known[known] = self.tables.active[rows[known]]
        if not known.all():
            raise LocalProtocolError(f"rows {rows[~known].tolist()} have no active sequence")
        if len(rows) > 1 and np.bincount(rows).max() > 1:
            raise LocalProtocolError(f"rows {rows.tolist()} name a sequence twice")

    def check_cursors(self, rows: Rows, history: Counts, capacity: Counts) -> None:
        """Raise ConfigError, with the numbers of the first offender, unless the cursors may move there."""
        backwards = np.flatnonzero(history < self.tables.history[rows])
        below = np.flatnonzero(capacity < history)
        if len(backwards):
            old, new = int(self.tables.history[rows][backwards[0]]), int(history[backwards[0]])
            raise ConfigError(
                f"{self._name(rows[backwards[0]])}: history {old} cannot decrease to {new}; rewind capacity only"
            )
        if len(below):
            raise ConfigError(
                f"{self._name(rows[below[0]])}: capacity {int(capacity[below[0]])} is below history "
                f"{int(history[below[0]])}"
            )
        if self.options.window_scratch:
            self.scratch.check_cursors(rows, history, capacity, self._name)

    # ---- pages (called by SequenceCache)

    def activate(self, sequence: SequenceCache) -> None:
        """See `SequenceCache.resume`."""
        sequence.row = activate(self, sequence)
        sequence.borrowed = ()
        sequence.state = SequenceState.ACTIVE

    def park(self, sequence: SequenceCache) -> None:
        """See `SequenceCache.suspend`."""
        self.scratch.give_up(sequence.row)
        sequence.parked = self.tables.close_row(sequence.row)
        sequence.row = -1
        sequence.state = SequenceState.SUSPENDED

    def forget(self, sequence: SequenceCache) -> None:
        """Take back all pages of a sequence that closes."""
        if sequence.state is SequenceState.ACTIVE:
            self.park(sequence)
        for group, table in zip(self.layout.life_cycles, sequence.parked.tables, strict=True):
            self._allocator(group.id).drop_user(table[table >= 0])
        for entry in sequence.borrowed:
            self._allocator(entry.life_cycle).drop_user(np.array([entry.slot], np.int32))
        self.sequences.remove(sequence)
        self.promises.remove(sequence)

    def written(self, sequence: SequenceCache, first: int, last: int) -> list[int]:
        """Slots of blocks [first, last) of a sequence into which a transfer may still write."""
        found: list[int] = []
        for group in self.layout.life_cycles:
            slots = sequence.slots(group.id)[first:last]
            found += self._allocator(group.id).written(slots[slots >= 0]).tolist()
        return found

    def publishable(self, sequence: SequenceCache, first: int, last: int, committed: int) -> list[SlotList]:
        """Slots per life cycle of blocks [first, last) whose pages are worth publishing once `committed` tokens are."""
        keep_all = self.options.commit_policy == "all_reusable"
        found = []
        for group in self.layout.life_cycles:
            slots = sequence.slots(group.id)[first:last].copy()
            if group.life_cycle.recurrent:
                slots[:] = NO_SLOT
            elif not keep_all:
                stale = group.life_cycle.stale_range(committed, self.layout.tokens_per_block)
                slots[max(0, stale.start - first) : max(0, stale.end - first)] = NO_SLOT
            found.append(slots)
        return found

    def publish_snapshot(
        self, sequence: SequenceCache, node: int, position_in_block: int, priority_of: PriorityOf
    ) -> None:
        """Publish a copy of a sequence's recurrent state at a node, if a slot can be had and none is there yet."""
        recurrent = self.layout.recurrent
        if recurrent is None or not self.rules.snapshots or self.published.has_snapshot(node, position_in_block):
            return
        priorities = priority_of(self.published.tree.ordinals[[node]], recurrent.id)
        allocator, state = self._allocator(recurrent.id), np.array([sequence.state_slot], np.int32)
        if allocator.num_available and not len(allocator.written(state)):
            # What is evicted for it could be the node's own branch.
            self.published.tree.refer(node)
            self.published.make_room(recurrent.pool_group, 1)
            if self.published.tree.alive(node):
                copy = allocator.acquire(1)
                self.storage.copy_slots(recurrent.pool_group, state, copy)
                self.published.publish_snapshot(node, int(copy[0]), position_in_block, priorities)
                allocator.drop_user(copy)
            self.published.tree.unrefer(node)

    def require_slots(self, who: str | Rows, need: Counts, gain: Counts) -> None:
        """Raise CapacityError with the numbers unless so many slots can be had.

        Args:
            who: needs them: a name, or rows of the tables.
            gain: slots that will be given back before.

        Shapes: need and gain are [pool groups].
        """
        available = [a.num_available + int(extra) for a, extra in zip(self.allocators, gain, strict=True)]
        if any(count > left for count, left in zip(need.tolist(), available, strict=True)):
            name = who if isinstance(who, str) else self._names(who)
            raise CapacityError(
                f"{name} needs {need.tolist()} new slots per pool group, {available} can be given: retry after a "
                "release",
                requested=need.tolist(),
                available=available,
            )

    def with_epochs(self, slots: tuple[SlotList, ...]) -> BlockLists:
        """Add the epoch of every slot (0 for no page) to the slot lists of one sequence."""
        epochs = []
        for group, table in zip(self.layout.life_cycles, slots, strict=True):
            stamped = np.zeros(len(table), np.uint32)
            stamped[table >= 0] = self._allocator(group.id).epochs(table[table >= 0])
            epochs.append(stamped)
        return BlockLists(slots, tuple(epochs))

    # ---- holds (called for transfers)

    def hold(self, pages: BlockLists, access: Access) -> Hold:
        """Keep pages from becoming free, whatever their sequence does, until `release`.

        Raises:
            LocalProtocolError: a page has been handed out again since `pages` was read, or is to be written although it
                is published, shared, or read by a transfer.
        """
        return self.holds.hold(pages, access)

    def release(self, hold: Hold) -> None:
        """End a hold. Raises LocalProtocolError when it already ended, or is another manager's."""
        self.holds.release(hold)

    # ---- books

    def usage(self) -> tuple[GroupUsage, ...]:
        """The books of every pool group now."""
        return tuple(
            GroupUsage(
                a.num_slots, a.num_free, a.num_cached, a.num_slots - a.num_available, int(reserved), a.num_transferring
            )
            for a, reserved in zip(self.allocators, self.promises.total, strict=True)
        )

    def clear_reusable(self) -> None:
        """Drop all cached pages. Raises LocalProtocolError while a sequence is open."""
        if self.sequences:
            raise LocalProtocolError(f"{len(self.sequences)} sequences are open: close them before clearing the pools")
        self.published.clear()

    def check_integrity(self) -> None:
        """Raise InvariantError unless every slot's users are exactly the sequences and holds that list it.

        Source: pools specification 1.4.
        """
        check_manager(self)

    # ---- private

    def _group(self, life_cycle: LifeCycleId) -> int:
        return self.layout.life_cycles[life_cycle].pool_group

    def _allocator(self, life_cycle: LifeCycleId) -> SlotAllocator:
        return self.allocators[self._group(life_cycle)]

    def _name(self, row: int) -> str:
        return next((f"sequence {s.request_id}" for s in self.sequences if s.row == row), f"row {row}")

    def _names(self, rows: Rows) -> str:
        return self._name(rows[0]) if len(rows) == 1 else f"a step of {len(rows)} sequences"

    def _match(self, scope: ReuseScope, prompt: KeyChain, *, for_transfer: bool) -> Match:
        if self.options.commit_policy == "off":
            return NO_MATCH
        return self.published.match(scope, prompt, whole_blocks=for_transfer)

    def _claimable(self, match: Match) -> list[SlotList]:
        """Every slot of a match, per life cycle: no fewer than `_claim` uses."""
        pages = self.published.tree.pages[match.nodes]
        return [pages[pages[:, group.id] >= 0, group.id] for group in self.layout.life_cycles]

    def _claim(self, match: Match, *, for_transfer: bool) -> tuple[Parked, tuple[Borrowed, ...]]:
        """Become a user of a match's pages; those that will be written into are borrowed."""
        p, tokens = self.layout.tokens_per_block, match.num_tokens
        pages = self.published.tree.pages[match.nodes]
        tables, borrowed = [], []
        for group in self.layout.life_cycles:
            table = pages[:, group.id].copy()
            last = len(table) - 1
            if group.life_cycle.recurrent:
                if tokens and not for_transfer:
                    borrowed.append(Borrowed(group.id, last, int(table[last])))
                table[:] = NO_SLOT
            else:
                stale = group.life_cycle.stale_range(tokens, p)
                if not self.rules.window_aware:
                    self.published.touch(group.id, table[stale.start : stale.end])
                table[stale.start : stale.end] = NO_SLOT
                if tokens % p:
                    borrowed.append(Borrowed(group.id, last, int(table[last])))
                    table[last] = NO_SLOT
            self._allocator(group.id).add_user(table[table >= 0])
            tables.append(table)
        for entry in borrowed:
            self._allocator(entry.life_cycle).add_user(np.array([entry.slot], np.int32))
        return Parked(tokens, tokens, tokens, tuple(tables)), tuple(borrowed)

    # ---- private: changes of tables

    def _apply(self, change: TableChange) -> None:
        dropped = [self.tables.dropped_slots(change, group.id) for group in self.layout.life_cycles]
        scratch = self.scratch.changes(change)
        need = np.zeros(len(self.allocators), np.int64)
        for group, part in zip(self.layout.life_cycles, change.life_cycles, strict=True):
            need[group.pool_group] += len(part.taken)
        for (_, life_cycle), (_, more) in scratch.items():
            need[self._group(life_cycle)] += more
        given_back = by_pool_group(self.layout, dropped, [(lc, less) for (_, lc), (less, _) in scratch.items()])
        self.require_slots(change.rows, need, self._idle_after(given_back, need))
        if self.promises.total.any() and not self.tables.promised[change.rows].all():
            unpromised = self.promises.need_of(change, scratch, self.tables.promised)
            self.promises.require(self._names(change.rows), unpromised)
        # Nothing below fails.
        for allocator, ids in zip(self.allocators, given_back, strict=True):
            if len(ids):
                allocator.drop_users(ids)
        for index, count in enumerate(need.tolist()):
            self.published.make_room(index, count)
        slots = [
            self._allocator(group.id).acquire(len(part.taken))
            for group, part in zip(self.layout.life_cycles, change.life_cycles, strict=True)
        ]
        self.tables.apply(change, slots)
        self.scratch.apply(scratch)

    def _idle_after(self, given_back: Sequence[SlotList], need: Counts) -> Counts:
        """Slots that giving back makes available; looked into only where they are needed."""
        return np.array(
            [
                allocator.idle_after(ids) if len(ids) and count > allocator.num_free else 0
                for allocator, ids, count in zip(self.allocators, given_back, need.tolist(), strict=True)
            ],
            np.int64,
        )
