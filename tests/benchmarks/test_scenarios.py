import numpy as np
import pytest

from benchmarks import scenarios
from benchmarks.kvferry_side import KvferrySide
from benchmarks.scenarios import Sizes
from benchmarks.side import Side
from benchmarks.workload import Attention, Prompts, Shape, layout_of
from tests.benchmarks.fakes import FakeSide

TINY = Sizes(
    num_rounds=2,
    num_requests=2,
    prompt_tokens=(200,),
    num_running=8,
    num_steps=40,
    running_tokens=(1, 300),
    match_tokens=500,
    hit_tokens=448,
    cached_blocks=320,
    scaling_tokens=(100, 700),
)
SHAPES = 4


def sides() -> list[Side]:
    return [KvferrySide(), KvferrySide(from_lists=True)]


def test_admission_compares_the_sides_on_every_pool() -> None:
    found = list(scenarios.admission(sides(), TINY))

    assert len(found) == 2 * SHAPES
    for entry in found:
        assert list(entry.timings) == ["kvferry", "kvferry, from lists"]
        assert all(len(timing.rounds_s) == TINY.num_rounds for timing in entry.timings.values())


def test_admission_evicts_in_one_pool_and_never_fills_the_other() -> None:
    side = FakeSide("kvferry")
    list(scenarios.admission([side], TINY))
    served = side.pools[0].served

    assert served == (TINY.num_rounds + 1) * TINY.num_requests
    for evicting, roomy in zip(side.shapes[::2], side.shapes[1::2], strict=True):
        assert evicting.num_blocks < roomy.num_blocks == served * roomy.blocks_of(TINY.prompt_tokens[0])


def test_growth_steps_all_sequences_over_block_boundaries() -> None:
    found = list(scenarios.growth([KvferrySide()], TINY))

    assert len(found) == 2 * SHAPES
    assert all(len(entry.timings["kvferry"].rounds_s) == TINY.num_steps for entry in found)


def test_matching_finds_exactly_what_is_cached() -> None:
    found = list(scenarios.matching(sides(), TINY))

    assert len(found) == 3 * SHAPES


def test_matching_refuses_to_compare_different_hits() -> None:
    with pytest.raises(RuntimeError, match="16 tokens matched where 448 are cached"):
        list(scenarios.matching([FakeSide("vllm", found=16)], TINY))


def test_bookkeeping_counts_pages_that_fill_the_pool() -> None:
    found = list(scenarios.bookkeeping([KvferrySide()], TINY))

    assert len(found) == SHAPES
    assert all(entry.cached_pages["kvferry"] == TINY.cached_blocks for entry in found)
    assert all(entry.bytes_per_page["kvferry"] > 0 for entry in found)


def test_scaling_has_a_row_per_length() -> None:
    found = list(scenarios.scaling(KvferrySide(), TINY))

    assert [entry.num_tokens for entry in found] == list(TINY.scaling_tokens) * SHAPES


def test_prompts_differ_and_come_again_with_the_seed() -> None:
    prompts = Prompts()
    first, second = prompts.take(50), prompts.take(50)

    assert not np.array_equal(first, second)
    assert np.array_equal(first, Prompts().take(50))
    assert {len(prompt) for prompt in prompts.take_some(100, 2, 3)} == {2, 3}


@pytest.mark.parametrize("attention, num_life_cycles", [("full", 1), ("hybrid", 2)])
def test_layout_has_one_pool_whose_pages_all_life_cycles_share(attention: Attention, num_life_cycles: int) -> None:
    shape = Shape(attention, 16, 100)
    layout = layout_of(shape)

    assert len(layout.pool_groups) == 1
    assert len(layout.life_cycles) == num_life_cycles
    assert shape.blocks_of(33) == 3 * num_life_cycles
