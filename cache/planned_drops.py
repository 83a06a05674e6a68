"""Pages by which one state of a conversation can be taken up again; once it has moved on they can go."""

from collections import OrderedDict
from collections.abc import Callable
from weakref import WeakSet

import numpy as np

from kvferry.cache.block_keys import BlockKey
from kvferry.cache.errors import LocalProtocolError
from kvferry.cache.ids import LifeCycleId
from kvferry.cache.layout import CacheLayout
from kvferry.cache.page_table import SlotList
from kvferry.cache.prefix_tree import NodeIds, PrefixTree
from kvferry.cache.slots import NO_NODE, SlotAllocator

_NOTES_PER_SLOT = 4
"""Bound on the pages that the turns of conversations note, together; the oldest turn goes when it is passed."""

Page = tuple[LifeCycleId, int]
"""Life cycle and slot of a published page."""


class DropPlan:
    """A note of the pages that one state of a sequence alone needs."""

    def __init__(self, drops: "PlannedDrops", pages: tuple[Page, ...]) -> None:
        self.pages = pages
        self._drops: PlannedDrops | None = drops

    def drop(self) -> None:
        """Give the pages up, once. Those in use, or noted by another plan, stay.

        Raises: LocalProtocolError when called twice.
        """
        if self._drops is None:
            raise LocalProtocolError("a planned drop is done once: it was dropped before")
        self._drops.drop(self)
        self._drops = None


class PlannedDrops:
    """All plans of one manager, and the turns of conversations that have one.

    Args:
        allocator_of: of a life cycle.
        drop_pages: drops the pages of a life cycle at some nodes.
    """

    def __init__(
        self,
        layout: CacheLayout,
        tree: PrefixTree,
        allocator_of: Callable[[LifeCycleId], SlotAllocator],
        drop_pages: Callable[[LifeCycleId, NodeIds], None],
        num_slots: int,
    ) -> None:
        self._layout = layout
        self._tree = tree
        self._allocator_of = allocator_of
        self._drop_pages = drop_pages
        self._notes: dict[Page, WeakSet[DropPlan]] = {}
        self._turns: OrderedDict[BlockKey, DropPlan] = OrderedDict()
        self._noted_by_turns = 0
        self._most_noted = _NOTES_PER_SLOT * num_slots

    def plan(self, end: int, num_tokens: int) -> DropPlan:
        """Note the pages that only serve a match of exactly the first `num_tokens` tokens, which end in node `end`."""
        pages: list[Page] = []
        for group in self._layout.life_cycles if self._tree.alive(end) else ():
            if not group.life_cycle.full:
                first = group.life_cycle.stale_range(num_tokens, self._layout.tokens_per_block).end
                pages += [(group.id, slot) for slot in self._back_to(first, end, group.id)]
        plan = DropPlan(self, tuple(pages))
        for page in pages:
            self._notes.setdefault(page, WeakSet()).add(plan)
        return plan

    def drop(self, plan: DropPlan) -> None:
        """See `DropPlan.drop`."""
        for page in plan.pages:
            noted = self._notes.get(page)
            if noted is not None and plan in noted:
                noted.remove(plan)
                if not noted:
                    del self._notes[page]
                    self._drop_if_cached(*page)

    def forget(self, life_cycle: LifeCycleId, slots: SlotList) -> None:
        """Published pages are gone, and with them what plans noted of them."""
        if self._notes:
            for slot in slots.tolist():
                self._notes.pop((life_cycle, slot), None)

    # ---- conversations

    def turn_on(self, nodes: NodeIds, num_tokens: int) -> BlockKey | None:
        """The last turn that ends on a matched path, if any.

        Args:
            num_tokens: tokens in common with the path: the last node counts only where these are all of its block.
        """
        if not self._turns or not len(nodes):
            return None
        end = int(self._tree.ordinals[nodes[-1]]) * self._layout.tokens_per_block + int(self._tree.lengths[nodes[-1]])
        used = nodes if end <= num_tokens else nodes[:-1]
        keys = (self._tree.key(node) for node in reversed(used.tolist()))
        return next((key for key in keys if key in self._turns), None)

    def take_turn(self, earlier: BlockKey | None, end: int, plan: DropPlan) -> None:
        """A turn has ended in node `end`: what was kept to go on from an earlier turn goes."""
        key = self._tree.key(end)
        for ended in dict.fromkeys((key, earlier)):
            if ended is not None and ended in self._turns:
                self._end_turn(self._turns.pop(ended))
        if not plan.pages:
            return
        self._turns[key] = plan
        self._noted_by_turns += len(plan.pages)
        while self._noted_by_turns > self._most_noted and len(self._turns) > 1:
            self._end_turn(self._turns.popitem(last=False)[1])

    def _end_turn(self, plan: DropPlan) -> None:
        self._noted_by_turns -= len(plan.pages)
        plan.drop()

    def _drop_if_cached(self, life_cycle: LifeCycleId, slot: int) -> None:
        allocator, ids = self._allocator_of(life_cycle), np.array([slot], np.int32)
        if allocator.is_cached(ids)[0]:
            self._drop_pages(life_cycle, allocator.publication(ids).nodes.copy())

    def _back_to(self, first_ordinal: int, end: int, life_cycle: LifeCycleId) -> list[int]:
        """Slots of a life cycle from block `first_ordinal` to the one of node `end`."""
        slots, node = [], end
        while node != NO_NODE and self._tree.ordinals[node] >= max(0, first_ordinal):
            slots.append(int(self._tree.pages[node, life_cycle]))
            node = self._tree.parent(node)
        return [slot for slot in slots if slot >= 0]
