"""Prompt blocks that leave their window within one chunk share pages between the layers."""

import numpy as np
import pytest

from kvferry.cache.errors import CapacityError, ConfigError
from kvferry.cache.ids import LayerId, LifeCycleId
from kvferry.cache.layout import build_layout
from kvferry.cache.manager import KVCacheManager
from kvferry.cache.spec import LayerSpec, ModelSpec
from tests.cache.serving import free, manager_of, present, started
from tests.cache.specs import attention, model

WINDOWED = LifeCycleId(0)


def scratch_manager(
    window: int, *, layers: int = 32, slots: int = 64, sinks: int = 0, rewind: int = 0
) -> KVCacheManager:
    kinds: list[LayerSpec] = [attention(window, heads=1, sink_tokens=sinks)] * layers
    return manager_of(*kinds, tokens_per_block=32, slots=slots, window_scratch=True, max_rewind_tokens=rewind)


def test_scratch_1_and_4_normal_slots_instead_of_32() -> None:
    """Window 128, 1,024 tokens, 32 layers: blocks 0 to 27 are out of the window, and share one slot."""
    manager = scratch_manager(128)
    sequence = started(manager)
    sequence.resize(capacity=1024)
    assert present(sequence, WINDOWED) == [28, 29, 30, 31]
    assert len(manager.scratch.of(sequence.row, WINDOWED)) == 1
    assert free(manager) == [64 - 5]
    manager.check_integrity()
    sequence.commit([1] * 1024)
    assert free(manager) == [64 - 4]
    assert not len(manager.scratch.of(sequence.row, WINDOWED))


def test_scratch_with_a_sink_of_window_128_at_512_takes_1_slot_of_16_layers() -> None:
    manager = scratch_manager(128, layers=16, sinks=1)
    sequence = started(manager)
    sequence.resize(capacity=512)
    assert manager.scratch.blocks(sequence.row, WINDOWED) == (1, 12)
    assert (present(sequence, WINDOWED), free(manager)) == ([0, 12, 13, 14, 15], [64 - 6])


@pytest.mark.parametrize(
    "window, history, capacity, rewind, expected",
    [(32, 0, 256, 0, (0, 7)), (32, 0, 256, 64, (0, 5)), (64, 0, 256, 0, (0, 6)), (64, 0, 256, 32, (0, 5)),
     (64, 256, 352, 0, (8, 9)), (64, 256, 352, 32, (8, 8))],
)  # fmt: skip
def test_scratch_range_of_a_running_sequence(
    window: int, history: int, capacity: int, rewind: int, expected: tuple[int, int]
) -> None:
    manager = scratch_manager(window, rewind=rewind)
    sequence = started(manager)
    if history:
        sequence.resize(capacity=history, history=history)
    sequence.resize(capacity=capacity)
    assert manager.scratch.blocks(sequence.row, WINDOWED) == expected
    first, last = expected
    assert all(ordinal not in present(sequence, WINDOWED) for ordinal in range(first, last))
    manager.check_integrity()


def test_every_layer_has_a_place_of_its_own_for_every_scratch_block_of_a_step() -> None:
    manager = scratch_manager(8, layers=3)
    sequence = started(manager)
    sequence.resize(capacity=320)
    for layer in range(3):
        indices = sequence.page_indices(WINDOWED, LayerId(layer))
        assert (indices >= 0).all()
        assert len(np.unique(indices)) == len(indices) == 10
    assert len(manager.scratch.of(sequence.row, WINDOWED)) == 3


def test_scratch_layers_of_unequal_size_take_a_slot_per_block() -> None:
    kinds = [attention(8, heads=1), attention(8, heads=2)]
    manager = manager_of(*kinds, tokens_per_block=32, window_scratch=True)
    sequence = started(manager)
    sequence.resize(capacity=320)
    assert len(manager.scratch.of(sequence.row, WINDOWED)) == 9


def test_scratch_blocks_are_never_published() -> None:
    manager = scratch_manager(32)
    sequence = started(manager)
    sequence.resize(capacity=256)
    sequence.commit(list(range(256)))
    sequence.close()
    assert manager.usage()[0].cached == 1
    assert (manager.probe(list(range(256))), manager.probe(list(range(224)))) == (256, 0)


def test_suspending_gives_scratch_slots_back_and_resuming_takes_them_again() -> None:
    manager = scratch_manager(128)
    sequence = started(manager)
    sequence.resize(capacity=1024)
    sequence.suspend()
    assert free(manager) == [64 - 4]
    sequence.resume()
    assert free(manager) == [64 - 5]
    manager.check_integrity()


def test_resume_without_room_for_scratch_slots_changes_nothing() -> None:
    manager = scratch_manager(128, slots=5)
    sequence = started(manager)
    sequence.resize(capacity=1024)
    sequence.suspend()
    other = started(manager)
    other.resize(capacity=32)
    with pytest.raises(CapacityError) as caught:
        sequence.resume()
    assert (caught.value.requested, caught.value.available) == ((1,), (0,))
    assert (free(manager), sequence.row) == ([0], -1)
    manager.check_integrity()


@pytest.mark.parametrize(
    "capacity, history", [(1056, 0), (1056, 1023), (512, 0), (1024, 500)], ids=["grow", "grow early", "shrink", "half"]
)
def test_cursors_that_would_make_scratch_bytes_history_are_refused(capacity: int, history: int) -> None:
    manager = scratch_manager(128)
    sequence = started(manager)
    sequence.resize(capacity=1024)
    with pytest.raises(ConfigError, match="scratch pages"):
        sequence.resize(capacity=capacity, history=history)
    assert (sequence.capacity, sequence.history, free(manager)) == (1024, 0, [59])


def test_growing_onto_scratch_pages_before_the_last_chunk_is_history_is_refused() -> None:
    """No block is on a scratch page yet; the next chunk would put the old one's blocks there, which hold its tokens."""
    manager = scratch_manager(128)
    sequence = started(manager)
    sequence.resize(capacity=128)
    with pytest.raises(ConfigError, match="scratch pages"):
        sequence.resize(capacity=512)
    assert present(sequence, WINDOWED) == [0, 1, 2, 3]
    sequence.resize(capacity=512, history=128)
    assert manager.scratch.blocks(sequence.row, WINDOWED) == (4, 12)
    manager.check_integrity()


def test_blocks_of_rejected_tokens_may_go_onto_scratch_pages() -> None:
    """64 tokens of the old capacity may still be rewound: they are computed again, and their pages are given up."""
    manager = scratch_manager(32, rewind=64)
    sequence = started(manager)
    sequence.resize(capacity=96)
    sequence.resize(capacity=320, history=40)
    assert manager.scratch.blocks(sequence.row, WINDOWED) == (2, 7)
    assert present(sequence, WINDOWED) == [0, 1, 7, 8, 9]
    manager.check_integrity()


def test_pages_of_rejected_tokens_that_go_onto_scratch_pages_are_free_again() -> None:
    manager = scratch_manager(8, rewind=64)
    sequence = started(manager)
    sequence.resize(capacity=96)
    before = free(manager)[0]
    sequence.resize(capacity=320, history=32)
    # Blocks 1 to 7 are on one scratch slot now; block 0 is out of the window, blocks 1 and 2 had pages.
    assert (manager.scratch.blocks(sequence.row, WINDOWED), present(sequence, WINDOWED)) == ((1, 7), [0, 7, 8, 9])
    assert (before, free(manager)[0]) == (61, 59)
    manager.check_integrity()


def test_window_scratch_needs_layer_major_slots() -> None:
    layout = build_layout(ModelSpec("t", "float32", model(attention(8)).layers), order="head_major")
    from_options = manager_of(attention(8), window_scratch=True).options
    with pytest.raises(ConfigError, match="layer_major"):
        KVCacheManager(layout, [4], options=from_options)
