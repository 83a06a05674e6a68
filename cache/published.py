"""Pages kept for reuse: publishing, matching and evicting them, over the prefix tree and the allocators."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvferry.cache.block_keys import BlockKey, KeyChain, ReuseScope, TokenIds, partial_key
from kvferry.cache.broken_windows import WindowRuns
from kvferry.cache.errors import InvariantError
from kvferry.cache.ids import NO_SLOT, LifeCycleId
from kvferry.cache.layout import CacheLayout, LifeCycleLayout
from kvferry.cache.lifecycle import ceil_div
from kvferry.cache.page_table import SlotList
from kvferry.cache.planned_drops import PlannedDrops
from kvferry.cache.prefix_tree import NodeIds, PrefixTree
from kvferry.cache.slots import NO_NODE, SlotAllocator

Priorities = npt.NDArray[np.int16]
PriorityOf = Callable[[npt.NDArray[np.int32], LifeCycleId], Priorities]
"""Eviction priority of the pages of some block ordinals of a life cycle; lower goes first."""

_LOOK_AHEAD_BLOCKS = 64
_NODE_VICTIMS = 16

NODES_PER_SLOT = 4
SPARE_NODES = 1 << 16
"""Bound on nodes of the tree: blocks without a page, before the pages of a window, are worth only so much memory."""


@dataclass(frozen=True)
class ReuseRules:
    """What a manager reuses.

    Attributes:
        partial_blocks: the leading tokens of a block, copied; otherwise whole blocks only.
        window_aware: pages outside the window may be missing; otherwise every page of every block is needed.
        snapshots: recurrent states at the exact position; otherwise sequences with a recurrent state reuse nothing.
    """

    partial_blocks: bool = True
    window_aware: bool = True
    snapshots: bool = True


class Match(NamedTuple):
    """A reusable prefix.

    Attributes:
        nodes: node of every block the prefix touches; the last may hold more than is used of it.
        tip: node of the last block used in full, NO_NODE when there is none.
    """

    num_tokens: int
    nodes: NodeIds
    tip: int


NO_MATCH = Match(0, np.empty(0, np.int32), NO_NODE)


class PublishedPages:
    """All published pages of one manager.

    Concurrency: the manager's thread.
    """

    def __init__(
        self, layout: CacheLayout, allocators: Sequence[SlotAllocator], rules: ReuseRules, match_backoff_tokens: int
    ) -> None:
        self._layout = layout
        self._allocators = allocators
        self._rules = rules
        self._backoff = match_backoff_tokens
        self._p = layout.tokens_per_block
        slots = sum(allocator.num_slots for allocator in allocators)
        self.tree = PrefixTree(self._p, len(layout.life_cycles), max_nodes=NODES_PER_SLOT * slots + SPARE_NODES)
        self.drops = PlannedDrops(layout, self.tree, self._allocator, self.drop, slots)
        self.num_dropped = 0

    # ---- matching

    def match(self, scope: ReuseScope, prompt: KeyChain, *, whole_blocks: bool) -> Match:
        """The longest prefix of a prompt whose pages are all there. Nothing changes.

        Args:
            whole_blocks: full blocks only, and recurrent states do not matter: the rest will be received.

        Source: pools specification 3.11.
        """
        root = self.tree.root(scope)
        if root == NO_NODE or not len(prompt.token_ids):
            return NO_MATCH
        path = self._walk(prompt)
        tokens = len(path) * self._p
        if self._rules.partial_blocks and not whole_blocks:
            parent = int(path[-1]) if len(path) else root
            sibling = self.tree.best_sibling(parent, prompt.token_ids[tokens : tokens + self._p])
            if sibling is not None:
                path = np.append(path, np.int32(sibling.node))
                tokens += sibling.common_tokens
        if tokens <= self._backoff:
            return NO_MATCH
        tokens = self._supported(path, tokens - self._backoff, whole_blocks)
        full = tokens // self._p
        tip = int(path[full - 1]) if full else NO_NODE
        return Match(tokens, path[: ceil_div(tokens, self._p)], tip) if tokens else NO_MATCH

    def _walk(self, prompt: KeyChain) -> NodeIds:
        """Nodes of the leading full blocks of a prompt that are in the tree; few more are named than are there."""
        path: list[NodeIds] = [np.empty(0, np.int32)]
        for first in range(0, prompt.num_blocks, _LOOK_AHEAD_BLOCKS):
            keys = prompt.keys(first, min(first + _LOOK_AHEAD_BLOCKS, prompt.num_blocks))
            path.append(self.tree.find(keys))
            if len(path[-1]) < len(keys):
                break
        return np.concatenate(path)

    def _supported(self, path: NodeIds, num_tokens: int, whole_blocks: bool) -> int:
        """Cut a match, life cycle by life cycle, to what its pages cover, until all agree."""
        pages = self.tree.pages[path]
        groups = [g for g in self._layout.life_cycles if not (whole_blocks and g.life_cycle.recurrent)]
        groups.sort(key=lambda group: not group.life_cycle.recurrent)
        coverage = {group.id: self._allocator(group.id).coverage(pages[:, group.id]) for group in groups}
        while True:
            if whole_blocks or not self._rules.partial_blocks:
                num_tokens -= num_tokens % self._p
            cuts = (self._covered(group, coverage[group.id], num_tokens) for group in groups)
            shorter = next((cut for cut in cuts if cut < num_tokens), None)
            if shorter is None:
                return num_tokens
            num_tokens = shorter

    def _covered(self, group: LifeCycleLayout, coverage: npt.NDArray[np.int32], num_tokens: int) -> int:
        """The longest part of a match that the pages of one life cycle allow, as far as one look tells."""
        num_blocks = ceil_div(num_tokens, self._p)
        if group.life_cycle.recurrent:
            if not self._rules.snapshots:
                return 0
            positions = np.arange(num_blocks) * self._p + coverage[:num_blocks]
            fitting = positions[(coverage[:num_blocks] > 0) & (positions <= num_tokens)]
            return int(fitting.max(initial=0))
        needed = np.full(num_blocks, self._p)
        needed[-1:] = num_tokens - (num_blocks - 1) * self._p
        if self._rules.window_aware:
            stale = group.life_cycle.stale_range(num_tokens, self._p)
            needed[stale.start : stale.end] = 0
        failing = np.flatnonzero(coverage[:num_blocks] < needed)
        return int(failing[0]) * self._p + int(coverage[failing[0]]) if len(failing) else num_tokens

    # ---- publishing

    def publish_blocks(
        self,
        parent: int,
        keys: Sequence[BlockKey],
        token_ids: npt.NDArray[np.uint32],
        slots: Sequence[SlotList],
        priority_of: PriorityOf,
    ) -> tuple[int, list[SlotList]] | None:
        """Publish full blocks below `parent`, whose pages are in use by the caller.

        Where the tree has a page of equal worth already, that one is to be used: the result names, per life cycle, the
        slots the blocks have afterwards; the users of both have been changed accordingly. None: the tree is full.

        Shapes: token_ids [n, tokens_per_block]; slots[life cycle] is [n], NO_SLOT for no page.
        Returns: the node of the last block, and the slots.
        """
        ordinals = self.tree.ordinals[parent] + 1 + np.arange(len(keys), dtype=np.int32)
        priorities = [priority_of(ordinals, group.id) for group in self._layout.life_cycles]
        if not self._room_for_nodes(parent, keys):
            return None
        # Nothing below fails.
        nodes = self.tree.find(keys)
        num_known = len(nodes)
        shorter: list[int] = []
        if num_known < len(keys):
            tip = int(nodes[-1]) if num_known else parent
            shorter = self.tree.relatives(tip, token_ids[num_known]).shorter
            nodes = np.concatenate([nodes, self.tree.extend(tip, keys[num_known:], token_ids[num_known:])])
        after = []
        for group, given, wanted in zip(self._layout.life_cycles, slots, priorities, strict=True):
            after.append(self._rebase(group.id, nodes, given, wanted))
        for sibling in shorter:
            self._absorb(sibling, int(nodes[num_known]))
        return int(nodes[-1]), after

    def _room_for_nodes(self, parent: int, keys: Sequence[BlockKey]) -> bool:
        """Whether the tree may have nodes for all the keys; cached pages are evicted for that, oldest first."""
        while not (self.tree.room_for(len(keys)) or self.tree.room_for(len(keys) - len(self.tree.find(keys)))):
            victims = [
                (index, allocator.next_victims(_NODE_VICTIMS)) for index, allocator in enumerate(self._allocators)
            ]
            if len(keys) > self.tree.max_nodes or not any(len(slots) for _, slots in victims):
                return False
            self.evict(*max(victims, key=lambda group: len(group[1])))
        return self.tree.alive(parent)

    def _rebase(self, life_cycle: LifeCycleId, nodes: NodeIds, given: SlotList, priorities: Priorities) -> SlotList:
        """Give pages to the nodes that have none as good; elsewhere swap the given page for the node's."""
        allocator = self._allocator(life_cycle)
        present = self.tree.pages[nodes, life_cycle]
        complete = allocator.coverage(present) == self._p
        donated = (given >= 0) & ~complete
        self._attach(life_cycle, nodes[donated], given[donated], self._p, priorities[donated])
        adopted = (given >= 0) & complete & (given != present)
        if not adopted.any():
            return given
        allocator.add_user(present[adopted])
        allocator.drop_user(given[adopted])
        return np.where(adopted, present, given)

    def publish_partial(self, parent: int, token_ids: TokenIds, slots: Sequence[int], priority_of: PriorityOf) -> int:
        """Publish a last block that is not full. Shapes: token_ids [fewer than tokens_per_block]; slots [life cycles].

        A block that begins with these tokens already takes the pages in which it is weaker; shorter ones are replaced.
        Returns the node that has the tokens now, NO_NODE when the tree is full.
        """
        num_tokens = len(token_ids)
        ordinal = self.tree.ordinals[[parent]] + 1
        priorities = [priority_of(ordinal, group.id) for group in self._layout.life_cycles]
        key = partial_key(self.tree.key(parent), token_ids)
        if not self.tree.relatives(parent, token_ids).longer and not self._room_for_nodes(parent, [key]):
            return NO_NODE
        longer, shorter = self.tree.relatives(parent, token_ids)
        node = longer[0] if longer else int(self.tree.extend(parent, [key], token_ids[None])[0])
        for group, slot, priority in zip(self._layout.life_cycles, slots, priorities, strict=True):
            if slot >= 0 and self._coverage_at(node, group.id) < num_tokens:
                where, given = np.array([node], np.int32), np.array([slot], np.int32)
                self._attach(group.id, where, given, num_tokens, priority)
        for sibling in shorter if not longer else ():
            self._absorb(sibling, node)
        self.tree.prune(node)
        return node if self.tree.alive(node) else NO_NODE

    def publish_snapshot(self, node: int, slot: int, position_in_block: int, priorities: Priorities) -> None:
        """Publish a copy of the recurrent state that stands `position_in_block` tokens into the node's block."""
        recurrent = self._layout.recurrent
        assert recurrent is not None, "only layouts with a recurrent life cycle have snapshots"
        where, given = np.array([node], np.int32), np.array([slot], np.int32)
        self._attach(recurrent.id, where, given, position_in_block, priorities)

    def has_snapshot(self, node: int, position_in_block: int) -> bool:
        """Whether a recurrent state at or after this position of the node's block is published."""
        recurrent = self._layout.recurrent
        return recurrent is None or self._coverage_at(node, recurrent.id) >= position_in_block

    def withdraw(self, life_cycle: LifeCycleId, slot: int) -> None:
        """Take a page that is in use out of the tree, so that its user may write into it."""
        node = self._allocator(life_cycle).publication(np.array([slot], np.int32)).nodes
        if node[0] != NO_NODE:
            self.drop(life_cycle, node.copy())

    def touch(self, life_cycle: LifeCycleId, slots: SlotList) -> None:
        """Published pages were of use: they are evicted later. Shapes: [n], each once."""
        allocator = self._allocator(life_cycle)
        allocator.add_user(slots)
        allocator.drop_user(slots)

    # ---- evicting

    def make_room(self, pool_group: int, num_free: int) -> None:
        """Evict cached pages of a group until `num_free` slots are free; the caller has checked that they suffice."""
        allocator = self._allocators[pool_group]
        while allocator.num_free < num_free:
            self.evict(pool_group, allocator.next_victims(num_free - allocator.num_free))

    def evict(self, pool_group: int, victims: SlotList) -> None:
        """Drop cached pages, with all that serves no match without them. Shapes: [n], at least one."""
        assert len(victims), "the caller knows what is cached"
        nodes, life_cycles, _ = self._allocators[pool_group].publication(victims)
        members = self._layout.pool_groups[pool_group].life_cycles
        # What falls with its block need not be looked at on its own.
        for life_cycle in sorted(members, key=lambda index: not self._layout.life_cycles[index].life_cycle.full):
            chosen = nodes[life_cycles == life_cycle]
            if len(chosen):
                self.drop(life_cycle, chosen)

    def drop(self, life_cycle: LifeCycleId, nodes: NodeIds) -> None:
        """Drop the pages that one life cycle has at these nodes, with all that serves no match without them."""
        nodes = nodes[self.tree.pages[nodes, life_cycle] >= 0]  # an earlier life cycle may have taken nodes along
        rule = self._layout.life_cycles[life_cycle].life_cycle
        lasting = nodes if rule.full else nodes[self.tree.ordinals[nodes] < rule.sink_blocks]
        if len(lasting):
            self._drop_subtrees(lasting)
            nodes = nodes[self.tree.pages[nodes, life_cycle] >= 0]
        if len(nodes):
            self._drop_window_pages(life_cycle, nodes)

    def clear(self) -> None:
        """Drop everything that is published."""
        nodes = self.tree.nodes()
        self._drop_subtrees(nodes[self.tree.parents_of(nodes) == NO_NODE])

    def _drop_subtrees(self, tops: NodeIds) -> None:
        """Without these blocks nothing after them can match: the subtrees go. Pages in use stay with their users."""
        found = self.tree.subtrees(tops)
        nodes = np.fromiter(found, np.int32, len(found))
        for group in self._layout.life_cycles:
            pages = self.tree.pages[nodes, group.id]
            self._withdraw(group.id, pages[pages >= 0])
        self.tree.pages[nodes] = NO_SLOT
        parents = self.tree.parents_of(tops)
        self.tree.remove(found)
        self.tree.prune_all(parents[parents != NO_NODE])

    def _drop_window_pages(self, life_cycle: LifeCycleId, nodes: NodeIds) -> None:
        rule = self._layout.life_cycles[life_cycle].life_cycle
        self._detach(life_cycle, self.tree.pages[nodes, life_cycle])
        if rule.window is not None:
            useless = self._broken(life_cycle, nodes)
            pages = self.tree.pages[useless, life_cycle]
            cached = pages[self._allocator(life_cycle).is_cached(pages)]
            nodes = np.concatenate([nodes, self._detach(life_cycle, cached)])
        self.tree.prune_all(nodes)

    def _broken(self, life_cycle: LifeCycleId, lost: NodeIds) -> NodeIds:
        """Nodes next to lost pages, and beyond, whose window page serves nothing now."""
        rule = self._layout.life_cycles[life_cycle].life_cycle
        assert rule.window is not None
        runs = WindowRuns(
            self.tree,
            lambda node: self._coverage_at(node, life_cycle),
            window=rule.window,
            first_ordinal=rule.sink_blocks,
            tokens_per_block=self._p,
        )
        above, below = self.tree.parents_of(lost), self.tree.children_of(lost)
        above = above[(above >= 0) & (self.tree.ordinals[above] >= rule.sink_blocks)]
        beside = [set(nodes[self.tree.pages[nodes, life_cycle] >= 0].tolist()) for nodes in (above, below)]
        return np.array(runs.useless(*beside), np.int32)

    # ---- books

    def check_integrity(self) -> None:
        """Raise InvariantError unless tree and allocators name the same pages."""
        self.tree.check_integrity()
        nodes = self.tree.nodes()
        for index, allocator in enumerate(self._allocators):
            slots, publication = allocator.published()
            listed = self.tree.pages[publication.nodes, publication.life_cycles]
            groups = {self._layout.life_cycles[lc].pool_group for lc in publication.life_cycles.tolist()}
            wrong = slots[listed != slots]
            if len(wrong) or groups - {index}:
                raise InvariantError(
                    f"pool group {index}: slots {wrong.tolist()} are published where the tree has others"
                )
            members = [g.id for g in self._layout.life_cycles if g.pool_group == index]
            if int((self.tree.pages[nodes][:, members] >= 0).sum()) != len(slots):
                raise InvariantError(f"pool group {index}: the tree lists pages that are not published")
            if (publication.coverage > self.tree.lengths[publication.nodes]).any():
                raise InvariantError(f"pool group {index}: a page covers more tokens than its block has")

    # ---- private

    def _allocator(self, life_cycle: LifeCycleId) -> SlotAllocator:
        return self._allocators[self._layout.life_cycles[life_cycle].pool_group]

    def _coverage_at(self, node: int, life_cycle: LifeCycleId) -> int:
        slot = self.tree.pages[node, life_cycle]
        return int(self._allocator(life_cycle).publication(slot).coverage) if slot >= 0 else 0

    def _attach(
        self, life_cycle: LifeCycleId, nodes: NodeIds, slots: SlotList, coverage: int, priorities: Priorities
    ) -> None:
        """Make pages those of the nodes, withdrawing the ones they replace."""
        if not len(nodes):
            return
        replaced = self.tree.pages[nodes, life_cycle]
        self._withdraw(life_cycle, replaced[replaced >= 0])
        self.tree.pages[nodes, life_cycle] = slots
        self._allocator(life_cycle).publish(slots, nodes, life_cycle, coverage, priorities)

    def _absorb(self, shorter: int, node: int) -> None:
        """A longer block replaces a partial one that it begins with, and takes its pages where it has none as good."""
        for group in self._layout.life_cycles:
            slot = int(self.tree.pages[shorter, group.id])
            if slot < 0:
                continue
            allocator, ids = self._allocator(group.id), np.array([slot], np.int32)
            publication = allocator.publication(ids)
            if self._coverage_at(node, group.id) >= int(publication.coverage[0]):
                self._detach(group.id, ids)
                continue
            self.tree.pages[shorter, group.id] = NO_SLOT
            self.tree.pages[node, group.id] = slot
            allocator.move(ids, np.array([node], np.int32))
        self.tree.remove({shorter: None})

    def _detach(self, life_cycle: LifeCycleId, slots: SlotList) -> NodeIds:
        """Take pages from their nodes, which are returned and stay, maybe with nothing left. Shapes: [n] -> [n]."""
        nodes = self._allocator(life_cycle).publication(slots).nodes.copy()
        self.tree.pages[nodes, life_cycle] = NO_SLOT
        self._withdraw(life_cycle, slots)
        return nodes

    def _withdraw(self, life_cycle: LifeCycleId, slots: SlotList) -> None:
        if len(slots):
            allocator = self._allocator(life_cycle)
            self.num_dropped += int(allocator.is_cached(slots).sum())
            allocator.unpublish(slots)
            self.drops.forget(life_cycle, slots)
