"""Pages that a transfer reads or writes, whatever becomes of their sequence."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from kvferry.cache.block_tables import by_pool_group
from kvferry.cache.errors import LocalProtocolError
from kvferry.cache.layout import CacheLayout
from kvferry.cache.page_table import BlockLists, EpochList, SlotList
from kvferry.cache.slots import NO_NODE, SlotAllocator


class Access(Enum):
    """What a transfer does with the pages it holds.

    READ: the bytes leave; the pages may be published and matched meanwhile, and are not handed out. Their sequence
        must not go on if it has a recurrent state, which every step overwrites: close it.
    WRITE: bytes arrive; the pages may be neither published nor matched before the hold is released.
    """

    READ = "read"
    WRITE = "write"


@dataclass(frozen=True)
class Hold:
    """A ticket: its pages cannot become free before `release`. Shapes: slots[pool group] is [n], ids of that group."""

    number: int
    access: Access
    slots: tuple[SlotList, ...]


class Holds:
    """All holds on the pools of one manager.

    Attributes:
        open: by number.
    """

    def __init__(self, layout: CacheLayout, allocators: Sequence[SlotAllocator]) -> None:
        self.open: dict[int, Hold] = {}
        self._layout = layout
        self._allocators = allocators
        self._next = 0

    def hold(self, pages: BlockLists, access: Access) -> Hold:
        """See `KVCacheManager.hold`."""
        self._check(pages, access)
        slots = by_pool_group(self._layout, [table[table >= 0] for table in pages.slots])
        for allocator, ids in zip(self._allocators, slots, strict=True):
            allocator.begin_transfer(ids, writes=access is Access.WRITE)
        hold = Hold(self._next, access, slots)
        self._next += 1
        self.open[hold.number] = hold
        return hold

    def release(self, hold: Hold) -> None:
        """See `KVCacheManager.release`."""
        if self.open.get(hold.number) is not hold:
            raise LocalProtocolError(f"hold {hold.number} was already released, or was not made here")
        del self.open[hold.number]
        for allocator, ids in zip(self._allocators, hold.slots, strict=True):
            allocator.end_transfer(ids, writes=hold.access is Access.WRITE)

    def _check(self, pages: BlockLists, access: Access) -> None:
        if len(pages.slots) != len(self._layout.life_cycles):
            raise LocalProtocolError(
                f"pages of {len(pages.slots)} life cycles, these pools have {len(self._layout.life_cycles)}"
            )
        for group, slots, epochs in zip(self._layout.life_cycles, pages.slots, pages.epochs, strict=True):
            allocator, present = self._allocators[group.pool_group], slots >= 0
            problem = _problem(allocator, slots[present], epochs[present], access)
            if problem:
                raise LocalProtocolError(f"a page of {group.life_cycle} {problem}")


def _problem(allocator: SlotAllocator, ids: SlotList, epochs: EpochList, access: Access) -> str:
    """Why a transfer must not have these pages; empty when it may."""
    if len(ids) and (int(ids.max()) >= allocator.num_slots or (allocator.epochs(ids) != epochs).any()):
        return "was handed out again, or is not of these pools"
    if not allocator.in_use(ids).all():
        return "is used by no sequence: hold it before closing"
    if len(allocator.written(ids)):
        return "is being written by a transfer: hold it when that is over"
    if access is Access.WRITE and (allocator.publication(ids).nodes != NO_NODE).any():
        return "is published: nothing may be written into it"
    if access is Access.WRITE and allocator.shared(ids).any():
        return "is read by a transfer, or is another sequence's as well: nothing may be written into it"
    return ""
