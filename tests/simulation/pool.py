"""The pools of a simulated worker: a tiny allocator over real bytes that reuses at once whatever is free."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvferry.cache.errors import LocalProtocolError
from kvferry.cache.holds import Access, Hold
from kvferry.cache.lifecycle import LifeCycle
from kvferry.cache.page_table import BlockLists, LayerGroupEntry, PageTable, PoolEntry, SlotList
from kvferry.transfer.types import TransferKey, fence_of
from tests.simulation.content import FREE, FRESH, SLOT_BYTES, TOKENS_PER_BLOCK, page_bytes


@dataclass(frozen=True)
class Owner:
    """Who a slot was handed out to: one attempt's pages, named by the fence of their slots and epochs."""

    key: TransferKey
    fence: int


@dataclass(frozen=True)
class SimLayout:
    """As much of a cache layout as the transceiver looks at."""

    pool_groups: tuple[int, ...]


class SimStorage:
    """One uint8 tensor per pool group. Shapes: pools[group] is [num_slots * SLOT_BYTES]."""

    def __init__(self, num_slots: Sequence[int]) -> None:
        self.pools = tuple(torch.zeros(count * SLOT_BYTES, dtype=torch.uint8) for count in num_slots)

    def record_event(self) -> Callable[[], bool]:
        return _always

    def read(self, group: int, offset: int, num_bytes: int) -> bytes:
        return self.pools[group].numpy()[offset : offset + num_bytes].tobytes()

    def write(self, group: int, offset: int, content: bytes) -> None:
        self.pools[group].numpy()[offset : offset + len(content)] = np.frombuffer(content, np.uint8)


class SimPool:
    """As much of a cache manager as the transceiver asks for.

    Every layer group has a pool group of its own. The slot that became free last is handed out first, and epochs start
    at 1 in every life, so that a new life repeats the slots and epochs of the one before.

    Attributes:
        owners: per pool group, by slot; None while it is free.
        on_free: told about every slot that becomes free, before it is overwritten.
    """

    version = "V2"

    def __init__(self, base: int, num_slots: Sequence[int], on_free: Callable[[int, int], None]) -> None:
        self.storage = SimStorage(num_slots)
        self.layout = SimLayout(tuple(range(len(num_slots))))
        self.num_slots = tuple(num_slots)
        self.owners: list[list[Owner | None]] = [[None] * count for count in num_slots]
        self.on_free = on_free
        self._base = base
        self._epochs = [[0] * count for count in num_slots]
        self._uses = [[0] * count for count in num_slots]
        self._free = [list(reversed(range(count))) for count in num_slots]
        self._holds: dict[int, Hold] = {}
        self._next_hold = 0
        for group, count in enumerate(num_slots):
            self.storage.write(group, 0, FREE * count)

    # ---- what the transceiver asks for

    def page_table(self) -> PageTable:
        groups = tuple(LayerGroupEntry(_LIFE_CYCLES[group], (group,), ()) for group in self.layout.pool_groups)
        pools = tuple(
            PoolEntry(pool_address(self._base, group), SLOT_BYTES, SLOT_BYTES, count)
            for group, count in enumerate(self.num_slots)
        )
        return PageTable("simulated", "uint8", TOKENS_PER_BLOCK, "cpu", pools, groups)

    def hold(self, pages: BlockLists, access: Access) -> Hold:
        slots = tuple(table[table >= 0] for table in pages.slots)
        for group, (ids, epochs) in enumerate(zip(slots, pages.epochs, strict=True)):
            if [self._epochs[group][slot] for slot in ids.tolist()] != epochs[pages.slots[group] >= 0].tolist():
                raise LocalProtocolError("a page was handed out again")
            self._use(group, ids.tolist(), +1)
        hold = Hold(self._next_hold, access, slots)
        self._holds[hold.number] = hold
        self._next_hold += 1
        return hold

    def release(self, hold: Hold) -> None:
        if self._holds.pop(hold.number, None) is not hold:
            raise LocalProtocolError(f"hold {hold.number} was already released, or was not made here")
        for group, ids in enumerate(hold.slots):
            self._use(group, ids.tolist(), -1)

    # ---- what a simulated engine does

    def allocate(self, key: TransferKey, num_blocks: int, skip_blocks: int = 0) -> BlockLists | None:
        """Pages for a prompt in every group, none for its first `skip_blocks`; None when there is no room."""
        if any(len(free) < num_blocks - skip_blocks for free in self._free):
            return None
        slots, epochs = [], []
        for group, free in enumerate(self._free):
            taken = [free.pop() for _ in range(num_blocks - skip_blocks)]
            for slot in taken:
                self._epochs[group][slot] += 1
                self.storage.write(group, slot * SLOT_BYTES, FRESH)
            self._use(group, taken, +1)
            slots.append(np.array([-1] * skip_blocks + taken, np.int32))
            epochs.append(np.array([0] * skip_blocks + [self._epochs[group][slot] for slot in taken], np.uint32))
        pages = BlockLists(tuple(slots), tuple(epochs))
        self._own(pages, Owner(key, fence_of(pages)))
        return pages

    def close(self, pages: BlockLists) -> None:
        """The engine is done with these pages; they are free when no transfer holds them."""
        for group, slots in enumerate(pages.slots):
            self._use(group, _present(slots), -1)

    def fill(self, key: TransferKey, pages: BlockLists) -> None:
        for group, slots in enumerate(pages.slots):
            for block, slot in enumerate(slots.tolist()):
                self.storage.write(group, slot * SLOT_BYTES, page_bytes(key, group, block))

    def wrong_pages(self, key: TransferKey, pages: BlockLists) -> list[str]:
        """Every page that does not hold what its prompt says."""
        return [
            f"group {group} block {block} slot {slot}: {found.hex()} instead of {page_bytes(key, group, block).hex()}"
            for group, slots in enumerate(pages.slots)
            for block, slot in enumerate(slots.tolist())
            if slot >= 0
            and (found := self.storage.read(group, slot * SLOT_BYTES, SLOT_BYTES)) != page_bytes(key, group, block)
        ]

    @property
    def num_free(self) -> tuple[int, ...]:
        return tuple(len(free) for free in self._free)

    @property
    def all_free(self) -> bool:
        return self.num_free == self.num_slots

    def check_books(self) -> None:
        """free + held == total, and only what is free has no owner."""
        for group, count in enumerate(self.num_slots):
            free = set(self._free[group])
            held = {slot for slot in range(count) if self._uses[group][slot] > 0}
            assert len(free) == len(self._free[group]), "a slot is free twice"
            assert not free & held, "a slot is free and held"
            assert len(free) + len(held) == count, "a slot is neither free nor held"
            assert all((self.owners[group][slot] is None) == (slot in free) for slot in range(count))

    def _use(self, group: int, slots: Sequence[int], change: int) -> None:
        uses = self._uses[group]
        for slot in slots:
            uses[slot] += change
            if uses[slot] == 0:
                self._set_free(group, slot)

    def _set_free(self, group: int, slot: int) -> None:
        self.on_free(group, slot)
        self.owners[group][slot] = None
        self._free[group].append(slot)
        self.storage.write(group, slot * SLOT_BYTES, FREE)

    def _own(self, pages: BlockLists, owner: Owner) -> None:
        for group, slots in enumerate(pages.slots):
            for slot in _present(slots):
                self.owners[group][slot] = owner


_LIFE_CYCLES = (LifeCycle(), LifeCycle(window=64))
_GROUP_STRIDE = 1 << 20


def pool_address(base: int, group: int) -> int:
    """Simulated addresses: the same in every life of a worker."""
    return base + group * _GROUP_STRIDE


def place_of(base: int, address: int) -> tuple[int, int]:
    """Pool group and offset in bytes of a simulated address."""
    return divmod(address - base, _GROUP_STRIDE)


def _present(slots: SlotList) -> list[int]:
    return [slot for slot in slots.tolist() if slot >= 0]


def _always() -> bool:
    return True


def as_manager(pool: SimPool) -> Any:
    """The transceiver asks for less than a whole cache manager."""
    return pool
