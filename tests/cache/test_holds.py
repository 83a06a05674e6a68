"""Pages that transfers read and write: kept, and kept apart from reuse, until released."""

from collections.abc import Callable

import numpy as np
import pytest

from kvferry.cache.errors import CapacityError, LocalProtocolError
from kvferry.cache.holds import Access
from kvferry.cache.ids import LifeCycleId
from kvferry.cache.page_table import BlockLists
from tests.cache.serving import books, free, manager_of, present, serve, started
from tests.cache.specs import attention

FULL = LifeCycleId(0)
TOKENS = list(range(24))


def test_hold_keeps_pages_after_close_until_release() -> None:
    manager = manager_of(attention(), slots=4)
    sequence = started(manager)
    sequence.resize(capacity=12)
    hold = manager.hold(sequence.pages(12), Access.READ)
    sequence.close()
    assert (free(manager), manager.usage()[0].transferring) == ([1], 3)
    manager.check_integrity()
    manager.release(hold)
    assert free(manager) == [4]
    with pytest.raises(LocalProtocolError, match="already released"):
        manager.release(hold)


def test_page_that_is_read_is_neither_evicted_nor_taken_over_nor_handed_out() -> None:
    manager = manager_of(attention(), slots=4)
    sequence = serve(manager, TOKENS[:6])
    hold = manager.hold(sequence.pages(6), Access.READ)
    sequence.close()
    other = started(manager)
    other.resize(capacity=8)
    with pytest.raises(CapacityError):
        other.resize(capacity=9)
    reuser = manager.create_sequence("b", token_ids=TOKENS[:6])
    with pytest.raises(CapacityError):  # its partial block would have to be copied, or taken over from the reader
        reuser.resume()
    manager.check_integrity()
    manager.release(hold)
    reuser.resume()
    assert present(reuser, FULL) == [0, 1]
    manager.check_integrity()


def test_page_that_is_read_may_be_published_and_matched() -> None:
    manager = manager_of(attention())
    sequence = started(manager)
    sequence.resize(capacity=8)
    hold = manager.hold(sequence.pages(8), Access.READ)
    sequence.commit(TOKENS[:8])
    assert started(manager, TOKENS[:8]).reused_tokens == 8
    manager.release(hold)
    manager.check_integrity()


@pytest.mark.parametrize("count", [1, 4, 8])
def test_page_that_is_written_cannot_be_committed_before_release(count: int) -> None:
    manager = manager_of(attention())
    sequence = started(manager)
    sequence.resize(capacity=8, history=8)
    hold = manager.hold(sequence.pages(8), Access.WRITE)
    before = books(manager, TOKENS)
    with pytest.raises(LocalProtocolError, match="while a transfer writes into their slots"):
        sequence.commit(TOKENS[:count])
    assert books(manager, TOKENS) == before
    manager.release(hold)
    sequence.commit(TOKENS[:count])
    sequence.close()
    assert manager.probe(TOKENS) == count


def test_page_that_is_written_is_not_published_by_stop_or_close() -> None:
    manager = manager_of(attention())
    sequence = started(manager)
    sequence.resize(capacity=8)
    sequence.commit(TOKENS[:6])
    hold = manager.hold(sequence.pages(8, skip_blocks=1), Access.WRITE)
    sequence.close()
    assert manager.probe(TOKENS) == 4
    assert (manager.usage()[0].held, manager.usage()[0].cached) == (1, 1)
    manager.release(hold)
    assert manager.usage()[0].held == 0
    manager.check_integrity()


def test_published_page_is_never_written() -> None:
    manager = manager_of(attention())
    sequence = serve(manager, TOKENS[:8])
    before = books(manager)
    with pytest.raises(LocalProtocolError, match="published: nothing may be written"):
        manager.hold(sequence.pages(8), Access.WRITE)
    assert books(manager) == before
    manager.hold(sequence.pages(8, skip_blocks=2), Access.WRITE)


def test_page_that_is_read_is_not_written_as_well() -> None:
    manager = manager_of(attention())
    sequence = started(manager)
    sequence.resize(capacity=8)
    hold = manager.hold(sequence.pages(8), Access.READ)
    with pytest.raises(LocalProtocolError, match="is read by a transfer"):
        manager.hold(sequence.pages(8), Access.WRITE)
    manager.release(hold)
    manager.hold(sequence.pages(8), Access.WRITE)
    manager.check_integrity()


def test_pages_carry_the_epoch_of_this_life() -> None:
    manager = manager_of(attention(), slots=2)
    lives = []
    for _ in range(2):
        sequence = started(manager)
        sequence.resize(capacity=5)
        lives.append(sequence.pages(5).epochs[0].tolist())
        sequence.close()
    assert lives[1] == [epoch + 1 for epoch in lives[0]]


def test_hold_of_pages_that_were_handed_out_again_is_refused() -> None:
    manager = manager_of(attention(), slots=2)
    sequence = started(manager)
    sequence.resize(capacity=8)
    pages = sequence.pages(8)
    sequence.close()
    with pytest.raises(LocalProtocolError, match="used by no sequence"):
        manager.hold(pages, Access.READ)
    started(manager).resize(capacity=8)
    with pytest.raises(LocalProtocolError, match="handed out again"):
        manager.hold(pages, Access.READ)


@pytest.mark.parametrize(
    "foreign",
    [
        lambda pages: BlockLists((*pages.slots, pages.slots[0]), (*pages.epochs, pages.epochs[0])),
        lambda pages: BlockLists((), ()),
        lambda pages: BlockLists((pages.slots[0] + 100,), pages.epochs),
        lambda pages: BlockLists(pages.slots, (pages.epochs[0] + 1,)),
    ],
    ids=["more life cycles", "none", "slots beyond the pools", "epochs of other pools"],
)
def test_pages_of_another_manager_are_refused(foreign: Callable[[BlockLists], BlockLists]) -> None:
    manager = manager_of(attention())
    sequence = started(manager)
    sequence.resize(capacity=8)
    before = books(manager)
    with pytest.raises(LocalProtocolError):
        manager.hold(foreign(sequence.pages(8)), Access.READ)
    assert books(manager) == before


def test_hold_of_another_manager_is_not_released() -> None:
    holds = []
    for _ in range(2):
        manager = manager_of(attention())
        sequence = started(manager)
        sequence.resize(capacity=4)
        holds.append(manager.hold(sequence.pages(4), Access.READ))
    with pytest.raises(LocalProtocolError, match="not made here"):
        manager.release(holds[0])
    manager.release(holds[1])


@pytest.mark.parametrize("access", list(Access))
def test_page_that_a_transfer_writes_is_given_to_no_other(access: Access) -> None:
    manager = manager_of(attention())
    sequence = started(manager)
    sequence.resize(capacity=8)
    hold = manager.hold(sequence.pages(8), Access.WRITE)
    with pytest.raises(LocalProtocolError, match="is being written by a transfer"):
        manager.hold(sequence.pages(8), access)
    manager.release(hold)
    manager.hold(sequence.pages(8), access)
    manager.check_integrity()


def test_pages_of_a_manager_beside_this_one_are_refused() -> None:
    """A draft model's pools, say: equally young, and with the same slots in use."""
    managers = [manager_of(attention()) for _ in range(2)]
    sequences = [started(manager) for manager in managers]
    for sequence in sequences:
        sequence.resize(capacity=8)
    with pytest.raises(LocalProtocolError, match="is not of these pools"):
        managers[0].hold(sequences[1].pages(8), Access.READ)
    with pytest.raises(LocalProtocolError, match=r"sequences \['s'\] are not active here"):
        managers[0].resize_many([sequences[1]], capacity=np.array([12]))
    assert [sequence.capacity for sequence in sequences] == [8, 8]
