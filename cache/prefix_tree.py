"""The tree of published blocks: a node per block, named by its key, with the page of every life cycle.

    root (reuse scope) -> full block -> full block -> partial block (always a leaf)

The tree knows names, order and pages; whether a page is used is the allocator's business, and what may be evicted the
publisher's.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvferry.cache.block_keys import BlockKey, ReuseScope, TokenIds
from kvferry.cache.errors import InvariantError
from kvferry.cache.ids import NO_SLOT
from kvferry.cache.slots import NO_NODE

NodeIds = npt.NDArray[np.int32]

_FIRST_NODES = 64
_INDEX_AT = 16
"""Children from which on a node's children are indexed by their first token."""


class Sibling(NamedTuple):
    """A child of a node that begins like the tokens asked for."""

    node: int
    common_tokens: int


class Relatives(NamedTuple):
    """Children of a node: those that begin with some tokens, and partial ones that the tokens begin with."""

    longer: list[int]
    shorter: list[int]


class PrefixTree:
    """Nodes as arrays, found by key.

    Shapes: pages is [num_nodes, num_life_cycles], slot ids or NO_SLOT; lengths is [num_nodes], tokens of each block, 0
    for a root; ordinals is [num_nodes], -1 for a root.
    """

    def __init__(self, tokens_per_block: int, num_life_cycles: int, max_nodes: int) -> None:
        self._tokens_per_block = tokens_per_block
        self.max_nodes = max_nodes
        self._by_key: dict[BlockKey, int] = {}
        self._keys: list[BlockKey | None] = []
        self._first_tokens: dict[int, dict[int, dict[int, None]]] = {}
        self._unused: list[int] = []
        self.pages = np.full((_FIRST_NODES, num_life_cycles), NO_SLOT, np.int32)
        self.lengths = np.zeros(_FIRST_NODES, np.int32)
        self.ordinals = np.zeros(_FIRST_NODES, np.int32)
        self._parents = np.full(_FIRST_NODES, NO_NODE, np.int32)
        self._first_child = np.full(_FIRST_NODES, NO_NODE, np.int32)
        self._next = np.full(_FIRST_NODES, NO_NODE, np.int32)
        self._previous = np.full(_FIRST_NODES, NO_NODE, np.int32)
        self._num_children = np.zeros(_FIRST_NODES, np.int32)
        self._references = np.zeros(_FIRST_NODES, np.int32)
        self._marks = np.zeros(_FIRST_NODES, np.bool_)
        self._tokens = np.zeros((_FIRST_NODES, tokens_per_block), np.uint32)

    def __len__(self) -> int:
        return len(self._by_key)

    # ---- finding

    def find(self, keys: Sequence[BlockKey]) -> NodeIds:
        """Nodes of the leading keys that are there: a block is only there with all blocks before it."""
        found = list(map(self._by_key.get, keys))
        present = found.index(None) if None in found else len(found)
        return np.array(found[:present], np.int32)

    def root(self, scope: ReuseScope) -> int:
        """Node of a scope, NO_NODE when nothing of it is published."""
        return self._by_key.get(scope.key, NO_NODE)

    def key(self, node: int) -> BlockKey:
        key = self._keys[node]
        assert key is not None, "the node is in the tree"
        return key

    def alive(self, node: int) -> bool:
        """Whether a node that was referenced is still in the tree."""
        return self._keys[node] is not None

    def parent(self, node: int) -> int:
        return int(self._parents[node])

    def children(self, node: int) -> Iterator[int]:
        child = int(self._first_child[node])
        while child != NO_NODE:
            yield child
            child = int(self._next[child])

    def best_sibling(self, parent: int, token_ids: TokenIds) -> Sibling | None:
        """The child of `parent` that shares most leading tokens, of several the one with most pages; None: no child."""
        siblings, common = self._siblings(parent, token_ids[: self._tokens_per_block])
        if not len(siblings):
            return None
        pages = (self.pages[siblings] >= 0).sum(axis=1)
        best = int(np.lexsort((pages, common))[-1])
        return Sibling(int(siblings[best]), int(common[best]))

    def relatives(self, parent: int, token_ids: TokenIds) -> "Relatives":
        """Children of `parent` that begin with all of `token_ids`, and those that these tokens begin with."""
        siblings, common = self._siblings(parent, token_ids)
        lengths = self.lengths[siblings]
        longer = (common == len(token_ids)) & (lengths >= len(token_ids))
        shorter = (common == lengths) & (lengths < len(token_ids))
        return Relatives(siblings[longer].tolist(), siblings[shorter].tolist())

    def parents_of(self, nodes: NodeIds) -> NodeIds:
        """Parent of each node. Shapes: [n] -> [n]."""
        return self._parents[nodes]

    def children_of(self, nodes: NodeIds) -> NodeIds:
        """Children of all the nodes together. Shapes: [n] -> [m]."""
        counts = self._num_children[nodes]
        only = self._first_child[nodes[counts == 1]]
        several = [child for node in nodes[counts > 1].tolist() for child in self.children(node)]
        return np.concatenate([only, np.array(several, np.int32)])

    # ---- growing

    def room_for(self, num_nodes: int) -> bool:
        """Whether the bound on nodes allows so many more."""
        return len(self._by_key) + num_nodes <= self.max_nodes

    def open_root(self, scope: ReuseScope) -> int:
        """Node of a scope, made if need be."""
        node = self.root(scope)
        if node == NO_NODE:
            node = int(self._new_nodes([scope.key])[0])
            self._parents[node], self.lengths[node], self.ordinals[node] = NO_NODE, 0, -1
        return node

    def extend(self, parent: int, keys: Sequence[BlockKey], token_ids: npt.NDArray[np.uint32]) -> NodeIds:
        """Append a chain of new nodes below `parent`. Shapes: token_ids [len(keys), tokens of each block]."""
        nodes = self._new_nodes(keys)
        parents = np.concatenate([[parent], nodes[:-1]]).astype(np.int32)
        self._parents[nodes] = parents
        self.lengths[nodes] = token_ids.shape[1]
        self.ordinals[nodes] = self.ordinals[parent] + 1 + np.arange(len(nodes))
        self._tokens[nodes, : token_ids.shape[1]] = token_ids
        # Only the first new node can have siblings: the parents of the others are new.
        self._first_child[parents[1:]], self._num_children[parents[1:]] = nodes[1:], 1
        self._link(parent, int(nodes[0]))
        return nodes

    def refer(self, node: int) -> None:
        """Keep a node although it may lose its pages and children."""
        self._references[node] += 1

    def unrefer(self, node: int) -> None:
        """End a reference; the node goes if nothing else keeps it."""
        self._references[node] -= 1
        if self._keys[node] is not None:
            self.prune(node)
        elif not self._references[node]:
            self._unused.append(node)

    # ---- shrinking

    def subtrees(self, tops: NodeIds) -> dict[int, None]:
        """The nodes and everything below them, each once."""
        found: dict[int, None] = dict.fromkeys(tops.tolist())
        if not self._marked(tops, self.children_of(tops)).all():
            for top in tops.tolist():
                below = list(self.children(top))
                while below:
                    node = below.pop()
                    if node not in found:
                        found[node] = None
                        below += self.children(node)
        return found

    def remove(self, nodes: Mapping[int, None]) -> None:
        """Take out nodes that have no pages; with a node go all below it (see `subtrees`), named here, too."""
        gone = np.fromiter(nodes, np.int32, len(nodes))
        tops = gone[~self._marked(gone, self._parents[gone])]
        for node in tops.tolist():
            self._unlink(node)
        self._forget(gone)

    def prune(self, node: int) -> None:
        """Take out a node, then its ancestors, as long as they have no page, no child and no reference."""
        while node != NO_NODE and not (
            self._num_children[node] or self._references[node] or (self.pages[node] >= 0).any()
        ):
            parent = int(self._parents[node])
            self._unlink(node)
            self._forget(np.array([node], np.int32))
            node = parent

    def prune_all(self, nodes: NodeIds) -> None:
        """`prune` each of the nodes that is still there. Shapes: [n], may repeat."""
        bare = (self._num_children[nodes] == 0) & (self._references[nodes] == 0) & (self.pages[nodes] < 0).all(axis=1)
        for node in nodes[bare].tolist():
            if self.alive(node):
                self.prune(node)

    # ---- books

    def nodes(self) -> NodeIds:
        """Every node in the tree."""
        return np.fromiter(self._by_key.values(), np.int32, len(self._by_key))

    def check_integrity(self) -> None:
        """Raise InvariantError unless names, links and counts agree."""
        for key, node in self._by_key.items():
            children = list(self.children(node))
            if self._keys[node] != key or len(children) != self._num_children[node]:
                raise InvariantError(f"node {node}: {len(children)} children, {self._num_children[node]} counted")
            if any(self._parents[child] != node for child in children):
                raise InvariantError(f"node {node}: a child has another parent")
            if not (children or self._references[node] or (self.pages[node] >= 0).any()):
                raise InvariantError(f"node {node} has neither pages nor children nor a reference")
            if children and 0 < self.lengths[node] < self._tokens_per_block:
                raise InvariantError(f"node {node} of {self.lengths[node]} tokens is partial and has children")

    # ---- private

    def _siblings(self, parent: int, token_ids: TokenIds) -> tuple[NodeIds, npt.NDArray[np.int32]]:
        """Children of `parent` with the same first token, and how many leading tokens agree. Shapes: [n] both."""
        found = np.array(self._beginning_with(parent, int(token_ids[0])) if len(token_ids) else [], np.int32)
        same = self._tokens[found, : len(token_ids)] == token_ids
        common = np.where(same.all(axis=1), len(token_ids), same.argmin(axis=1)) if len(found) else found
        return found, np.minimum(common, self.lengths[found]).astype(np.int32)

    def _beginning_with(self, parent: int, first_token: int) -> list[int]:
        index = self._first_tokens.get(parent)
        if index is not None:
            return list(index.get(first_token, ()))
        return [child for child in self.children(parent) if self._tokens[child, 0] == first_token]

    def _marked(self, marked: NodeIds, asked: NodeIds) -> npt.NDArray[np.bool_]:
        """Which of the nodes asked for are among the marked ones; NO_NODE is not. Shapes: [n], [m] -> [m]."""
        self._marks[marked] = True
        found: npt.NDArray[np.bool_] = self._marks[asked] & (asked != NO_NODE)
        self._marks[marked] = False
        return found

    def _new_nodes(self, keys: Sequence[BlockKey]) -> NodeIds:
        fresh = max(0, len(keys) - len(self._unused))
        again = len(keys) - fresh
        nodes = self._unused[len(self._unused) - again :]
        del self._unused[len(self._unused) - again :]
        nodes += range(len(self._keys), len(self._keys) + fresh)
        self._keys += [None] * fresh
        self._grow(len(self._keys))
        for node, key in zip(nodes, keys, strict=True):
            self._keys[node] = key
        self._by_key.update(zip(keys, nodes, strict=True))
        made = np.array(nodes, np.int32)
        for links in (self._first_child, self._next, self._previous):
            links[made] = NO_NODE
        self._num_children[made] = self._references[made] = 0
        self.pages[made] = NO_SLOT
        return made

    def _grow(self, num_nodes: int) -> None:
        size = len(self.lengths)
        if num_nodes <= size:
            return
        more = max(num_nodes, 2 * size) - size
        for name in ("lengths", "ordinals", "_parents", "_first_child", "_next", "_previous", "_num_children"):
            setattr(self, name, np.concatenate([getattr(self, name), np.zeros(more, np.int32)]))
        self._references = np.concatenate([self._references, np.zeros(more, np.int32)])
        self._marks = np.concatenate([self._marks, np.zeros(more, np.bool_)])
        self.pages = np.concatenate([self.pages, np.full((more, self.pages.shape[1]), NO_SLOT, np.int32)])
        self._tokens = np.concatenate([self._tokens, np.zeros((more, self._tokens_per_block), np.uint32)])

    def _link(self, parent: int, child: int) -> None:
        follower = int(self._first_child[parent])
        self._next[child], self._previous[child] = follower, NO_NODE
        if follower != NO_NODE:
            self._previous[follower] = child
        self._first_child[parent] = child
        self._num_children[parent] += 1
        if parent in self._first_tokens:
            self._first_tokens[parent].setdefault(int(self._tokens[child, 0]), {})[child] = None
        elif self._num_children[parent] >= _INDEX_AT:
            self._build_index(parent)

    def _build_index(self, parent: int) -> None:
        index: dict[int, dict[int, None]] = {}
        for child in self.children(parent):
            index.setdefault(int(self._tokens[child, 0]), {})[child] = None
        self._first_tokens[parent] = index

    def _unlink(self, node: int) -> None:
        parent = int(self._parents[node])
        if parent == NO_NODE:
            return
        before, after = int(self._previous[node]), int(self._next[node])
        if before == NO_NODE:
            self._first_child[parent] = after
        else:
            self._next[before] = after
        if after != NO_NODE:
            self._previous[after] = before
        self._num_children[parent] -= 1
        index = self._first_tokens.get(parent)
        if index is not None:
            first_token = int(self._tokens[node, 0])
            del index[first_token][node]
            if not index[first_token]:
                del index[first_token]

    def _forget(self, nodes: NodeIds) -> None:
        """Free the nodes' names; a referenced id is not given out before its last reference ends."""
        ids = nodes.tolist()
        for key in [self._keys[node] for node in ids]:
            assert key is not None, "a node is forgotten once"
            del self._by_key[key]
        for node in ids:
            self._keys[node] = None
        if self._first_tokens:
            for node in ids:
                self._first_tokens.pop(node, None)
        self._unused += nodes[self._references[nodes] == 0].tolist()
