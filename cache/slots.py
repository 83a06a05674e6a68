"""Which slots of a pool group are free, held or cached, who uses them, and how often each was handed out.

    free     nobody uses it and it holds nothing of worth
    held     some sequence or transfer uses it
    cached   nobody uses it; its page is published in the prefix tree and may be matched or evicted

Free, held and cached slots together are all slots, always.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvferry.cache.errors import InvariantError
from kvferry.cache.eviction import EvictionQueue

SlotIds = npt.NDArray[np.int32]

NO_NODE = -1
_FIRST_SCAN = 4096
"""Slots that the first look for free ones reads; each further look reads four times as many."""


class Publication(NamedTuple):
    """Where published pages stand in the prefix tree. Shapes: [n] each.

    Attributes:
        nodes: node of the tree, NO_NODE for a page that is not published.
        coverage: leading tokens of the block that the page holds; of a recurrent state: its exact position.
    """

    nodes: npt.NDArray[np.int32]
    life_cycles: npt.NDArray[np.int16]
    coverage: npt.NDArray[np.int32]


class SlotAllocator:
    """Hands out the slots of one pool group.

    A slot is taken with one user; `add_user` adds more (sequences that share a page, transfers that read or write
    it), and only when the last user is gone is it free, or cached if its page is published. Every time a slot is
    handed out its epoch grows, so that a reference made for an earlier life of the slot can be told from one for its
    present life. Lowest ids go out first: neighbouring slots travel as one descriptor.

    Concurrency: one thread.
    """

    def __init__(self, num_slots: int, first_epoch: int = 0) -> None:
        self._is_free = np.ones(num_slots, np.bool_)
        self._users = np.zeros(num_slots, np.int32)
        self._readers = np.zeros(num_slots, np.int32)
        self._writers = np.zeros(num_slots, np.int32)
        self._epochs = np.full(num_slots, first_epoch, np.uint32)
        self._nodes = np.full(num_slots, NO_NODE, np.int32)
        self._life_cycles = np.zeros(num_slots, np.int16)
        self._coverage = np.zeros(num_slots, np.int32)
        self._priorities = np.zeros(num_slots, np.int16)
        self._order = np.zeros(num_slots, np.int32)  # scratch of `_distinct`
        self._queue = EvictionQueue(num_slots)
        self._num_free = num_slots
        self._lowest_free = 0

    # ---- counts

    @property
    def num_slots(self) -> int:
        return len(self._users)

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def num_cached(self) -> int:
        return self._queue.num_queued

    @property
    def num_available(self) -> int:
        """Slots that could be taken now, if need be by evicting."""
        return self._num_free + self._queue.num_queued

    @property
    def num_transferring(self) -> int:
        """Slots that a transfer reads or writes."""
        return int(np.count_nonzero(self._readers + self._writers))

    @property
    def num_kept(self) -> int:
        """Slots that transfers keep beside what sequences are promised.

        A page that is read may be given up by every sequence and stay; one that is written is its sequence's own, which
        closes, but does not move on, before that is over.
        """
        kept = (self._readers > 0) | ((self._writers > 0) & (self._users == self._writers))
        return int(np.count_nonzero(kept))

    # ---- use

    def acquire(self, count: int) -> SlotIds:
        """Take `count` free slots. The caller has made sure that they are free."""
        assert count <= self._num_free, f"{count} slots asked, {self._num_free} free: make room before acquiring"
        if not count:
            return np.empty(0, np.int32)
        ids = self._lowest(count)
        self._is_free[ids] = False
        self._num_free -= count
        self._users[ids] = 1
        self._epochs[ids] += 1
        return ids

    def add_user(self, ids: SlotIds) -> None:
        """Keep held or cached slots until `drop_user` is called once more for each. Shapes: [n], each once."""
        assert not self._is_free[ids].any(), "a free slot cannot gain a user"
        self._queue.discard(ids)
        self._users[ids] += 1

    def drop_user(self, ids: SlotIds) -> None:
        """One user of each slot is gone; slots without users become cached or free.

        Of slots with equal priority the last given is evicted first: what follows a block in a prompt goes before it.

        Shapes: [n], each once.
        """
        users = self._users[ids] - 1
        assert not len(users) or users.min() >= 0, "a slot without users has none to drop"
        self._users[ids] = users
        self._retire(ids[users == 0][::-1])

    def drop_users(self, ids: SlotIds) -> None:
        """`drop_user` of several sequences at once. Shapes: [n]; a slot appears once per user that goes."""
        np.subtract.at(self._users, ids, 1)
        users = self._users[ids]
        assert not len(users) or users.min() >= 0, "a slot without users has none to drop"
        self._retire(self._distinct(ids[users == 0][::-1]))

    def begin_transfer(self, ids: SlotIds, *, writes: bool) -> None:
        """A transfer becomes a user of held slots. Shapes: [n], each once."""
        self.add_user(ids)
        (self._writers if writes else self._readers)[ids] += 1

    def end_transfer(self, ids: SlotIds, *, writes: bool) -> None:
        """A transfer is over: its tickets end and it is a user no more. Shapes: [n], each once."""
        (self._writers if writes else self._readers)[ids] -= 1
        self.drop_user(ids)

    def idle_after(self, ids: SlotIds) -> int:
        """How many slots would become free or cached if `drop_user` were called. Shapes: [n], may repeat."""
        distinct, counts = np.unique(ids, return_counts=True)
        return int(np.count_nonzero(self._users[distinct] == counts))

    def sole_user(self, slot: int) -> bool:
        """Whether exactly one sequence and no transfer uses the slot."""
        return bool(self._users[slot] == 1 and self._readers[slot] + self._writers[slot] == 0)

    def in_use(self, ids: SlotIds) -> npt.NDArray[np.bool_]:
        """Whether a sequence or transfer uses each slot. Shapes: [n]."""
        return self._users[ids] > 0

    def shared(self, ids: SlotIds) -> npt.NDArray[np.bool_]:
        """Whether each slot has more than one sequence as its user, or is read by a transfer. Shapes: [n]."""
        readers = self._readers[ids]
        shared: npt.NDArray[np.bool_] = (readers > 0) | (self._users[ids] - readers - self._writers[ids] > 1)
        return shared

    def written(self, ids: SlotIds) -> SlotIds:
        """Those of the slots into which a transfer may still write."""
        return ids[self._writers[ids] > 0]

    # ---- publication

    def publish(
        self,
        ids: SlotIds,
        nodes: npt.NDArray[np.int32],
        life_cycle: int,
        coverage: int,
        priorities: npt.NDArray[np.int16],
    ) -> None:
        """Say which nodes of the tree the pages belong to. Shapes: [n], each once; no slot is free."""
        assert not self._is_free[ids].any(), "a free slot has no page to publish"
        self._nodes[ids], self._life_cycles[ids], self._coverage[ids] = nodes, life_cycle, coverage
        self._priorities[ids] = priorities

    def unpublish(self, ids: SlotIds) -> None:
        """The tree gives the pages up: cached ones become free, held ones stay with their users. Shapes: [n]."""
        self._queue.discard(ids)
        self._nodes[ids] = NO_NODE
        self._free(ids[self._users[ids] == 0])

    def move(self, ids: SlotIds, nodes: npt.NDArray[np.int32]) -> None:
        """Published pages change their node; nothing else about them does. Shapes: [n] both."""
        self._nodes[ids] = nodes

    def publication(self, ids: SlotIds) -> Publication:
        """Where the pages stand in the tree. Shapes: [n]."""
        return Publication(self._nodes[ids], self._life_cycles[ids], self._coverage[ids])

    def coverage(self, ids: SlotIds) -> npt.NDArray[np.int32]:
        """Leading tokens of its block that each page holds, 0 for the id -1. Shapes: [n]."""
        return np.where(ids >= 0, self._coverage[ids], 0)

    def is_cached(self, ids: SlotIds) -> npt.NDArray[np.bool_]:
        """Whether nobody uses each (published) slot. Shapes: [n]."""
        cached: npt.NDArray[np.bool_] = (self._users[ids] == 0) & (self._nodes[ids] != NO_NODE)
        return cached

    def next_victims(self, count: int) -> SlotIds:
        """Cached slots in the order in which they should be evicted; none of them is touched."""
        return self._queue.first(count)

    # ---- reading

    def epochs(self, ids: SlotIds) -> npt.NDArray[np.uint32]:
        """Epoch of each slot. Shapes: [n] -> [n]."""
        return self._epochs[ids]

    def users(self) -> npt.NDArray[np.int32]:
        """Users of every slot, a copy. Shapes: [num_slots]."""
        return self._users.copy()

    def transfers(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Transfers that read and that write every slot, copies. Shapes: [num_slots] both."""
        return self._readers.copy(), self._writers.copy()

    def published(self) -> tuple[SlotIds, Publication]:
        """Every published slot and where it stands."""
        ids = np.flatnonzero(self._nodes != NO_NODE).astype(np.int32)
        return ids, self.publication(ids)

    def check_integrity(self) -> None:
        """Raise InvariantError unless every slot is free, held or cached, and counted as what it is."""
        unused, published = self._users == 0, self._nodes != NO_NODE
        wrong = np.flatnonzero(self._is_free != (unused & ~published))
        if len(wrong):
            raise InvariantError(f"slots {wrong.tolist()} are marked free and used, or neither")
        cached = np.flatnonzero(unused & published)
        if not np.array_equal(cached, self._queue.queued()):
            raise InvariantError(f"cached slots {cached.tolist()}, queued for eviction {self._queue.queued().tolist()}")
        counts = (self._num_free, self._queue.num_queued)
        if counts != (int(self._is_free.sum()), len(cached)):
            raise InvariantError(
                f"{counts} slots counted free and cached, {int(self._is_free.sum())}, {len(cached)} are"
            )
        if not np.array_equal(np.sort(self._queue.entries()), cached):
            raise InvariantError(f"cached slots {cached.tolist()} are not each queued for eviction exactly once")
        if (self._users < self._readers + self._writers).any() or (self._writers[published] > 0).any():
            raise InvariantError("a transfer is not counted as a user, or writes into a published page")

    # ---- private

    def _lowest(self, count: int) -> SlotIds:
        found: list[SlotIds] = []
        start, missing, size = self._lowest_free, count, _FIRST_SCAN
        while missing:
            window = self._is_free[start : start + size]
            ids = (np.flatnonzero(window)[:missing] + start).astype(np.int32)
            found.append(ids)
            missing -= len(ids)
            start, size = start + size, 4 * size
        ids = np.concatenate(found) if len(found) > 1 else found[0]
        self._lowest_free = int(ids[-1]) + 1
        return ids

    def _retire(self, idle: SlotIds) -> None:
        if not len(idle):
            return
        published = self._nodes[idle] != NO_NODE
        if not published.any():
            self._free(idle)
            return
        cached = idle[published]
        self._queue.push(cached, self._priorities[cached])
        self._free(idle[~published])

    def _free(self, ids: SlotIds) -> None:
        if len(ids):
            self._is_free[ids] = True
            self._num_free += len(ids)
            self._lowest_free = min(self._lowest_free, int(ids.min()))

    def _distinct(self, ids: SlotIds) -> SlotIds:
        """The ids without repetitions, in the order of their last appearance."""
        order = np.arange(len(ids), dtype=np.int32)
        self._order[ids] = order
        last: npt.NDArray[np.bool_] = self._order[ids] == order
        return ids if last.all() else ids[last]
