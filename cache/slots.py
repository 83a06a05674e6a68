"""Which slots of a pool are free, who uses the others, and how often each was handed out."""

import heapq

import numpy as np
import numpy.typing as npt

from kvferry.cache.errors import InvariantError

SlotIds = npt.NDArray[np.int32]


class SlotAllocator:
    """Hands out the slots of one pool group.

    A slot is taken with one user; `add_user` adds more (a transfer that reads or writes it), and only when the last
    user is gone is it free again. Every time a slot is handed out its epoch grows, so that a reference made for an
    earlier life of the slot can be told from one for its present life. Lowest ids go out first: neighbouring slots
    travel as one descriptor.

    Concurrency: one thread.
    """

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots))
        self._users = np.zeros(num_slots, np.int32)
        self._epochs = np.zeros(num_slots, np.uint32)

    @property
    def num_slots(self) -> int:
        return len(self._users)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def acquire(self, count: int) -> SlotIds:
        """Take `count` slots. The caller has checked that they are free."""
        assert count <= self.num_free, f"{count} slots asked, {self.num_free} free: check before acquiring"
        ids = np.fromiter((heapq.heappop(self._free) for _ in range(count)), np.int32, count)
        self._users[ids] = 1
        self._epochs[ids] += 1
        return ids

    def add_user(self, ids: SlotIds) -> None:
        """Keep used slots from becoming free until `drop_user` is called once more for each."""
        assert (self._users[ids] > 0).all(), "a free slot cannot gain a user"
        self._users[ids] += 1

    def drop_user(self, ids: SlotIds) -> None:
        """One user of each slot is gone; slots without users become free."""
        assert (self._users[ids] > 0).all(), "a free slot has no user to drop"
        self._users[ids] -= 1
        for slot in ids[self._users[ids] == 0]:
            heapq.heappush(self._free, int(slot))

    def epochs(self, ids: SlotIds) -> npt.NDArray[np.uint32]:
        """Epoch of each slot. Shapes: [n] -> [n]."""
        return self._epochs[ids]

    def last_users(self, ids: SlotIds) -> int:
        """How many of these slots would be free after one `drop_user`."""
        return int((self._users[ids] == 1).sum())

    def users(self) -> npt.NDArray[np.int32]:
        """Users of every slot, a copy. Shapes: [num_slots]."""
        return self._users.copy()

    def check_integrity(self) -> None:
        """Raise InvariantError unless exactly the slots without users are free, each once."""
        free = np.sort(np.asarray(self._free, np.int64))
        unused = np.flatnonzero(self._users == 0)
        if not np.array_equal(free, unused):
            raise InvariantError(f"free list holds {free.tolist()}, slots without users are {unused.tolist()}")
