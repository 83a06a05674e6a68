"""The order in which cached pages go: lowest priority first, among equals the least recently used."""

from collections import deque

import numpy as np
import numpy.typing as npt

SlotIds = npt.NDArray[np.int32]
Priorities = npt.NDArray[np.int16]

_BATCH = 1024
"""Most slots of one batch: what one look at the front of the queue reads."""


class EvictionQueue:
    """Slots of one pool group that may be evicted.

    Slots enter in batches; an entry counts only while its slot still carries the stamp of that batch, so leaving the
    queue costs nothing but a new stamp. Entries that no longer count are dropped when they come to the front, or all
    together once they outnumber the slots.
    """

    def __init__(self, num_slots: int) -> None:
        self._stamps = np.zeros(num_slots, np.int64)
        self._batches: dict[int, deque[tuple[int, SlotIds]]] = {}
        self._num_entries = 0
        self._next_stamp = 1
        self.num_queued = 0

    def push(self, slots: SlotIds, priorities: Priorities) -> None:
        """Append slots that are not queued; among equal priorities the first given goes first. Shapes: [n] both."""
        if not len(slots):
            return
        assert (self._stamps[slots] == 0).all(), "a slot is queued at most once"
        for priority in [priorities[0]] if (priorities == priorities[0]).all() else np.unique(priorities):
            self._append(slots[priorities == priority], int(priority))
        self.num_queued += len(slots)
        if self._num_entries > 2 * len(self._stamps) + _BATCH:
            self._compact()

    def discard(self, slots: SlotIds) -> None:
        """Take out those of the slots that are queued. Shapes: [n], each once."""
        queued = slots[self._stamps[slots] > 0]
        self.num_queued -= len(queued)
        self._stamps[queued] = 0

    def first(self, count: int) -> SlotIds:
        """The next `count` slots to go, in order; fewer when fewer are queued. They stay queued."""
        found: list[SlotIds] = []
        missing = min(count, self.num_queued)
        for priority in sorted(self._batches):
            batches = self._batches[priority]
            self._trim(batches)
            for batch in batches:
                if missing <= 0:
                    return np.concatenate([*found, np.empty(0, np.int32)])
                found.append(self._live(batch)[:missing])
                missing -= len(found[-1])
        return np.concatenate([*found, np.empty(0, np.int32)])

    def queued(self) -> SlotIds:
        """All queued slots, lowest first."""
        return np.flatnonzero(self._stamps > 0).astype(np.int32)

    def entries(self) -> SlotIds:
        """The slot of every entry that counts: each queued slot once, or the queue is broken."""
        live = [self._live(batch) for batches in self._batches.values() for batch in batches]
        return np.concatenate([*live, np.empty(0, np.int32)])

    def _append(self, slots: SlotIds, priority: int) -> None:
        batches = self._batches.setdefault(priority, deque())
        for start in range(0, len(slots), _BATCH):
            batch = slots[start : start + _BATCH]
            self._stamps[batch] = self._next_stamp
            batches.append((self._next_stamp, batch))
            self._next_stamp += 1
        self._num_entries += len(slots)

    def _live(self, batch: tuple[int, SlotIds]) -> SlotIds:
        stamp, slots = batch
        live: SlotIds = slots[self._stamps[slots] == stamp]
        return live

    def _trim(self, batches: deque[tuple[int, SlotIds]]) -> None:
        """Drop the dead entries of the first batch that has a live one, and all batches before it."""
        while batches:
            stamp, slots = batches[0]
            live = self._live(batches[0])
            self._num_entries -= len(slots) - len(live)
            if len(live):
                batches[0] = (stamp, live)
                return
            batches.popleft()

    def _compact(self) -> None:
        for priority, batches in self._batches.items():
            live = [(batch[0], self._live(batch)) for batch in batches]
            self._batches[priority] = deque(batch for batch in live if len(batch[1]))
        self._num_entries = self.num_queued
