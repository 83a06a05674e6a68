"""Which window pages serve nothing: against the definition, tried out over every match there could be."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cache.block_keys import ReuseScope
from kvferry.cache.broken_windows import WindowRuns
from kvferry.cache.lifecycle import LifeCycle, ceil_div
from kvferry.cache.prefix_tree import PrefixTree

BLOCK = 3


class Branches:
    """A tree of blocks, and how much of each one's page is there."""

    def __init__(self, parents: list[int], lengths: list[int]) -> None:
        self.tree = PrefixTree(BLOCK, 1, max_nodes=1000)
        self.nodes = [self.tree.open_root(ReuseScope())]
        for number, (parent, length) in enumerate(zip(parents, lengths, strict=True)):
            above = self.nodes[parent % len(self.nodes)]
            if above != self.nodes[0] and self.tree.lengths[above] < BLOCK:
                above = self.tree.parent(above)  # a partial block is a leaf
            tokens = np.array([[number, *[0] * (length - 1)]], np.uint32)
            self.nodes.append(int(self.tree.extend(above, [number.to_bytes(32, "little")], tokens)[0]))
        self.coverage = {node: int(self.tree.lengths[node]) for node in self.nodes}

    def path(self, node: int) -> list[int]:
        found = [node]
        while self.tree.parent(found[-1]) != self.nodes[0]:
            found.append(self.tree.parent(found[-1]))
        return found[::-1]

    def useful(self, rule: LifeCycle) -> set[int]:
        """Nodes whose page some match reads: one at whatever length, whose pages are all there."""
        found: set[int] = set()
        for end in self.nodes[1:]:
            path = self.path(end)
            first = (len(path) - 1) * BLOCK
            for tokens in range(first + 1, first + int(self.tree.lengths[end]) + 1):
                stale = rule.stale_range(tokens, BLOCK)
                read = [o for o in range(rule.sink_blocks, ceil_div(tokens, BLOCK)) if not stale.start <= o < stale.end]
                if all(self.coverage[path[o]] >= min(BLOCK, tokens - o * BLOCK) for o in read):
                    found |= {path[o] for o in read}
        return found

    def drop_useless(self, rule: LifeCycle) -> None:
        useful = self.useful(rule)
        for node in self.nodes[1:]:
            if node not in useful:
                self.coverage[node] = 0

    def runs(self, rule: LifeCycle) -> WindowRuns:
        assert rule.window is not None
        return WindowRuns(
            self.tree,
            lambda node: self.coverage[node],
            window=rule.window,
            first_ordinal=rule.sink_blocks,
            tokens_per_block=BLOCK,
        )

    def above_and_below(self, lost: list[int], rule: LifeCycle) -> tuple[list[int], list[int]]:
        above = {self.tree.parent(node) for node in lost} - {self.nodes[0]}
        below = {child for node in lost for child in self.tree.children(node)}
        kept = [
            {n for n in nodes if self.coverage[n] and self.tree.ordinals[n] >= rule.sink_blocks}
            for nodes in (above, below)
        ]
        return sorted(kept[0]), sorted(kept[1])


@given(
    blocks=st.lists(st.tuples(st.integers(0, 30), st.integers(1, BLOCK)), min_size=1, max_size=14),
    weak=st.sets(st.integers(0, 13)),
    lost=st.sets(st.integers(0, 13), min_size=1, max_size=4),
    window=st.integers(1, 12),
    sink_blocks=st.integers(0, 2),
)
def test_pages_called_useless_are_those_that_no_match_reads(
    blocks: list[tuple[int, int]], weak: set[int], lost: set[int], window: int, sink_blocks: int
) -> None:
    rule = LifeCycle(window, sink_blocks)
    branches = Branches([parent for parent, _ in blocks], [length for _, length in blocks])
    for number in weak & set(range(len(blocks))):
        branches.coverage[branches.nodes[number + 1]] -= 1
    branches.drop_useless(rule)
    gone = [branches.nodes[number + 1] for number in lost if number < len(blocks)]
    gone = [node for node in gone if branches.coverage[node] and branches.tree.ordinals[node] >= sink_blocks]
    for node in gone:
        branches.coverage[node] = 0
    found = branches.runs(rule).useless(*branches.above_and_below(gone, rule))
    assert len(found) == len(set(found))
    there = {node for node in branches.nodes[1:] if branches.coverage[node]}
    there = {node for node in there if branches.tree.ordinals[node] >= sink_blocks}
    assert set(found) == there - branches.useful(rule)


@pytest.mark.parametrize(
    "window, lost, useless",
    [
        (1, 3, []),  # every page serves the match that ends inside it
        (4, 3, []),  # the 3 tokens before a query are one block
        (5, 4, [5]),  # 4 tokens are two blocks; blocks 0 to 3 are more than that
        (8, 0, []),  # 7 tokens are three blocks, five follow
        (8, 2, []),  # the first two reach back to the start, the last three are enough
        (8, 3, [4, 5]),
        (11, 4, [5]),
    ],
)
def test_line_of_six_blocks_with_one_lost(window: int, lost: int, useless: list[int]) -> None:
    branches = Branches(list(range(6)), [BLOCK] * 6)
    nodes, rule = branches.nodes[1:], LifeCycle(window)
    branches.coverage[nodes[lost]] = 0
    found = branches.runs(rule).useless(*branches.above_and_below([nodes[lost]], rule))
    assert sorted(nodes.index(node) for node in found) == useless
