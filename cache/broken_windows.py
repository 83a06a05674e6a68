"""Which window pages serve no match any more once some of their neighbours are gone.

Under a window a match needs the pages of the last window - 1 tokens before it, in one unbroken run along a branch
of the tree, or all pages back to the first block that can go stale. A page whose longest run is shorter, and does not
reach back to that block, can serve nothing: it goes together with the page whose loss broke the run.
"""

from collections.abc import Callable, Iterable

from kvferry.cache.prefix_tree import PrefixTree

Coverage = Callable[[int], int]
"""Tokens of its block that a node's page of the life cycle in question holds; 0 without a page."""


class WindowRuns:
    """Runs of pages of one windowed life cycle.

    Args:
        coverage: of pages that are still there; those already lost count as 0.
        window: tokens, the query included.
        first_ordinal: the first block that can go stale: the number of sink blocks.
    """

    def __init__(
        self, tree: PrefixTree, coverage: Coverage, *, window: int, first_ordinal: int, tokens_per_block: int
    ) -> None:
        self._tree = tree
        self._coverage = coverage
        self._needed = window - 1
        self._first_ordinal = first_ordinal
        self._tokens_per_block = tokens_per_block

    def useless(self, above: Iterable[int], below: Iterable[int]) -> list[int]:
        """Nodes whose pages can serve no match.

        Args:
            above: nodes right before a lost page. below: nodes right after one.
        """
        found: dict[int, None] = {}
        for node in below:
            if self._coverage(node):
                found |= dict.fromkeys(self._useless_below(node))
        for node in above:
            found |= dict.fromkeys(self._useless_above(node))
        return list(found)

    def _useless_below(self, start: int) -> list[int]:
        """Pages at and after `start`, before which a page is lost, that no long enough run goes through."""
        found: list[int] = []
        open_nodes = [(start, 0)]
        while open_nodes:
            node, before = open_nodes.pop()
            if before + self._longest(node, self._needed - before) < self._needed:
                found += self._reachable(node)
                continue
            open_nodes += self._forks_after(node, before)
        return found

    def _forks_after(self, node: int, before: int) -> list[tuple[int, int]]:
        """Where branches part after a useful page, with the tokens before each; until the run is long enough."""
        while True:
            before += self._coverage(node)
            followers = self._followers(node)
            if before >= self._needed or not followers:
                return []
            if len(followers) > 1:
                return [(follower, before) for follower in followers]
            node = followers[0]

    def _useless_above(self, start: int) -> list[int]:
        """Pages at and before `start`, after which a page is lost, that no long enough run goes through."""
        run: list[int] = []
        tokens, node = 0, start
        while node >= 0 and self._coverage(node) and (not run or self._is_full(node)):
            run.append(node)
            tokens += self._coverage(node)
            if tokens >= self._needed or self._tree.ordinals[node] <= self._first_ordinal:
                return []
            node = self._tree.parent(node)
        found = []
        for node in run:
            tokens -= self._coverage(node)
            if tokens + self._longest(node, self._needed - tokens) < self._needed:
                found.append(node)
        return found

    def _longest(self, node: int, enough: int) -> int:
        """Tokens of the longest run from `node` downwards; no longer than `enough` is searched."""
        best = 0
        open_nodes = [(node, 0)]
        while open_nodes:
            node, before = open_nodes.pop()
            tokens = before + self._coverage(node)
            best = max(best, tokens)
            if best >= enough:
                break
            open_nodes += [(follower, tokens) for follower in self._followers(node)]
        return best

    def _reachable(self, node: int) -> list[int]:
        found = [node]
        for each in found:
            found += self._followers(each)
        return found

    def _followers(self, node: int) -> list[int]:
        """Children that continue the run of `node`."""
        if not self._is_full(node):
            return []
        return [child for child in self._tree.children(node) if self._coverage(child)]

    def _is_full(self, node: int) -> bool:
        return self._coverage(node) == self._tokens_per_block
