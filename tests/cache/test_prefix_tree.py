"""The tree of published blocks."""

import hashlib

import numpy as np
import pytest

from kvferry.cache.block_keys import ReuseScope
from kvferry.cache.errors import InvariantError
from kvferry.cache.prefix_tree import PrefixTree
from kvferry.cache.slots import NO_NODE

BLOCK = 4


def key(*words: object) -> bytes:
    return hashlib.sha256(repr(words).encode()).digest()


def ids(*tokens: int) -> "np.ndarray[tuple[int], np.dtype[np.uint32]]":
    return np.array(tokens, np.uint32)


def tree(max_nodes: int = 100) -> PrefixTree:
    return PrefixTree(BLOCK, 2, max_nodes)


def grow(grown: PrefixTree, parent: int, *tokens: int, page: int = 0) -> int:
    """One block below `parent`, with a page of the first life cycle."""
    node = int(grown.extend(parent, [key(parent, tokens)], ids(*tokens)[None])[0])
    grown.pages[node, 0] = page
    return node


def test_find_stops_at_the_first_block_that_is_not_there() -> None:
    grown = tree()
    root = grown.open_root(ReuseScope())
    nodes = grown.extend(root, [key(1), key(2)], np.zeros((2, BLOCK), np.uint32))
    assert grown.find([key(1), key(2), key(3)]).tolist() == nodes.tolist()
    assert grown.find([key(1), key(9), key(2)]).tolist() == nodes[:1].tolist()
    assert grown.find([]).tolist() == []
    assert (grown.ordinals[nodes].tolist(), grown.parent(int(nodes[1]))) == ([0, 1], nodes[0])


def test_root_of_a_scope_is_made_once_and_found() -> None:
    grown = tree()
    assert grown.root(ReuseScope()) == NO_NODE
    root = grown.open_root(ReuseScope())
    assert grown.open_root(ReuseScope()) == grown.root(ReuseScope()) == root
    assert grown.open_root(ReuseScope(salt=1)) != root


@pytest.mark.parametrize("num_siblings", [2, 15, 16, 17, 200])
def test_best_sibling_is_found_among_any_number_of_children(num_siblings: int) -> None:
    """Also beyond the 32 children at which upstream gives up, and where children are indexed."""
    grown = tree(max_nodes=1000)
    root = grown.open_root(ReuseScope())
    nodes = [grow(grown, root, n, 7, 7, n) for n in range(num_siblings)]
    for n in (0, num_siblings // 2, num_siblings - 1):
        assert grown.best_sibling(root, ids(n, 7, 9, 9)) == (nodes[n], 2)
    assert grown.best_sibling(root, ids(num_siblings, 7, 7)) is None
    assert grown.best_sibling(root, ids()) is None
    grown.pages[nodes[0]] = -1
    grown.prune(nodes[0])
    assert grown.best_sibling(root, ids(0, 7, 7, 0)) is None
    grown.check_integrity()


def test_best_sibling_has_most_common_tokens_then_most_pages() -> None:
    grown = tree()
    root = grown.open_root(ReuseScope())
    grow(grown, root, 1, 2)
    fewer, more = grow(grown, root, 1, 2, 3, 8), grow(grown, root, 1, 2, 3, 9)
    assert grown.best_sibling(root, ids(1, 2, 3, 4)) in [(fewer, 3), (more, 3)]
    grown.pages[more, 1] = 5
    assert grown.best_sibling(root, ids(1, 2, 3, 4)) == (more, 3)
    assert grown.best_sibling(root, ids(1, 2)) in [(fewer, 2), (more, 2)]


def test_partial_block_is_a_prefix_of_longer_ones_and_these_are_its_extensions() -> None:
    grown = tree()
    root = grown.open_root(ReuseScope())
    short, long = grow(grown, root, 1, 2), grow(grown, root, 1, 2, 3, 4)
    grow(grown, root, 1, 9, 9, 9)
    assert grown.relatives(root, ids(1, 2, 3)) == ([long], [short])
    longer, shorter = grown.relatives(root, ids(1, 2))
    assert (sorted(longer), shorter) == (sorted([short, long]), [])


def test_pruning_takes_empty_ancestors_along() -> None:
    grown = tree()
    root = grown.open_root(ReuseScope())
    first = grow(grown, root, 1, 1, 1, 1, page=-1)
    second = grow(grown, first, 2, 2, 2, 2, page=-1)
    third = grow(grown, second, 3, 3, 3, 3)
    grown.pages[second, 0] = 4
    grown.pages[third, 0] = -1
    grown.prune(third)
    assert len(grown) == 3
    grown.pages[second, 0] = -1
    grown.prune(second)
    assert len(grown) == 0


def test_referenced_node_outlives_its_pages_and_its_id_is_not_given_out() -> None:
    grown = tree()
    root = grown.open_root(ReuseScope())
    node = grow(grown, root, 1, 1, 1, 1, page=-1)
    grown.refer(node)
    grown.prune(node)
    assert grown.alive(node)
    grown.pages[node] = -1
    grown.remove({node: None})
    assert not grown.alive(node)
    assert grow(grown, root, 2, 2, 2, 2) != node
    grown.unrefer(node)
    assert grow(grown, root, 3, 3, 3, 3) == node


def test_removing_a_subtree_keeps_its_siblings() -> None:
    grown = tree()
    root = grown.open_root(ReuseScope())
    children = [grow(grown, root, n, 0, 0, 0) for n in range(3)]
    below = [grow(grown, children[1], n, 1, 1, 1) for n in range(20)]
    gone = grown.subtrees(np.array([below[3], children[1]], np.int32))
    assert sorted(gone) == sorted([children[1], *below])
    grown.pages[list(gone)] = -1
    grown.remove(gone)
    assert sorted(grown.children(root)) == sorted([children[0], children[2]])
    grown.check_integrity()


def test_children_of_several_nodes_are_all_there() -> None:
    grown = tree()
    root = grown.open_root(ReuseScope())
    one, two = grow(grown, root, 1, 0, 0, 0), grow(grown, root, 2, 0, 0, 0)
    below = [grow(grown, one, 5, 0, 0, 0), grow(grown, two, 6, 0, 0, 0), grow(grown, two, 7, 0, 0, 0)]
    assert sorted(grown.children_of(np.array([one, two], np.int32)).tolist()) == sorted(below)
    assert grown.children_of(np.array([below[0]], np.int32)).tolist() == []


def test_tree_says_when_it_is_full() -> None:
    grown = tree(max_nodes=3)
    root = grown.open_root(ReuseScope())
    grow(grown, root, 1, 1, 1, 1)
    assert grown.room_for(1)
    assert not grown.room_for(2)


def test_tree_of_many_nodes_grows_its_arrays() -> None:
    grown = tree(max_nodes=5000)
    parent = grown.open_root(ReuseScope())
    for step in range(10):
        nodes = grown.extend(parent, [key(step, n) for n in range(300)], np.ones((300, BLOCK), np.uint32))
        grown.pages[nodes, 0] = 1
        parent = int(nodes[-1])
    assert (len(grown), int(grown.ordinals[parent])) == (3001, 2999)
    grown.check_integrity()


# ---- check_integrity tells what is wrong


def three() -> tuple[PrefixTree, list[int]]:
    grown = tree()
    root = grown.open_root(ReuseScope())
    first = grow(grown, root, 1, 1, 1, 1)
    nodes = [root, first, grow(grown, first, 2, 2, 2, 2)]
    grown.check_integrity()
    return grown, nodes


def test_integrity_children_are_counted() -> None:
    grown, nodes = three()
    grown._num_children[nodes[1]] = 2
    with pytest.raises(InvariantError, match="1 children, 2 counted"):
        grown.check_integrity()


def test_integrity_children_know_their_parent() -> None:
    grown, nodes = three()
    grown._parents[nodes[2]] = nodes[0]
    with pytest.raises(InvariantError, match="another parent"):
        grown.check_integrity()


def test_integrity_a_node_serves_something() -> None:
    grown, nodes = three()
    grown.pages[nodes[2]] = -1
    with pytest.raises(InvariantError, match="neither pages nor children"):
        grown.check_integrity()


def test_integrity_a_partial_block_is_a_leaf() -> None:
    grown, nodes = three()
    grown.lengths[nodes[1]] = 3
    with pytest.raises(InvariantError, match="partial and has children"):
        grown.check_integrity()
