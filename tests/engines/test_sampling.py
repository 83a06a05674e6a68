"""The same (seed, position, logits) give the same token; the draw follows the distribution."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cache.errors import ComputeError, ConfigError
from kvferry.transfer.engines.sampling import check_sampling, finish_reason, sample
from kvferry.transfer.inference import SamplingParams

GREEDY = SamplingParams()
FLOATS = st.floats(-30, 30, width=32)


@given(st.lists(FLOATS, min_size=1, max_size=50), st.integers(0, 10_000))
def test_greedy_takes_the_first_of_the_largest(values: list[float], position: int) -> None:
    token, logprob = sample(torch.tensor(values), GREEDY, position)
    assert token == values.index(max(values))
    assert logprob == pytest.approx(torch.log_softmax(torch.tensor(values).double(), 0)[token].item(), abs=1e-12)


@given(
    st.lists(FLOATS, min_size=1, max_size=50),
    st.integers(-(2**63), 2**63),
    st.integers(0, 10_000),
    st.floats(0.01, 10),
)
def test_seeded_draw_is_repeatable_and_reports_the_untempered_logprob(
    values: list[float], seed: int, position: int, temperature: float
) -> None:
    logits, params = torch.tensor(values), SamplingParams(temperature=temperature, seed=seed)
    first = sample(logits, params, position)
    assert sample(logits.clone(), params, position) == first
    wanted = torch.log_softmax(logits.double(), 0)[first.token].item()
    assert first.logprob == pytest.approx(wanted, abs=1e-12)


def test_seeded_draw_follows_the_distribution() -> None:
    logits, num_draws = torch.tensor([0.0, 1.0, -1.0, 2.0, float("-inf")]), 20_000
    params = SamplingParams(temperature=1.5, seed=3)
    draws = [sample(logits, params, position).token for position in range(num_draws)]
    found = np.bincount(draws, minlength=5) / num_draws
    wanted = torch.softmax(logits.double() / 1.5, 0).numpy()
    assert np.abs(found - wanted).max() < 5 * math.sqrt(0.25 / num_draws)
    assert found[4] == 0


def test_seed_and_position_both_change_the_draws() -> None:
    logits = torch.zeros(1000)

    def draws(seed: int, start: int) -> list[int]:
        params = SamplingParams(temperature=1.0, seed=seed)
        return [sample(logits, params, start + i).token for i in range(8)]

    assert draws(0, 0) != draws(1, 0)
    assert draws(0, 0) != draws(0, 1)
    assert draws(0, 0)[1:] == draws(0, 1)[:-1]


def test_tiny_temperature_is_greedy_without_a_warning() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0])
    assert sample(logits, SamplingParams(temperature=5e-324, seed=1), 0) == sample(logits, GREEDY, 0)


def test_huge_temperature_is_uniform() -> None:
    logits = torch.tensor([1.0, 3.0])
    tokens = {sample(logits, SamplingParams(temperature=1e300, seed=1), position).token for position in range(64)}
    assert tokens == {0, 1}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_numbers_raise(bad: float) -> None:
    with pytest.raises(ComputeError, match="position 7"):
        sample(torch.tensor([0.0, bad, 1.0]), GREEDY, 7)


def test_logits_that_are_all_minus_infinity_raise() -> None:
    with pytest.raises(ComputeError):
        sample(torch.full((3,), float("-inf")), GREEDY, 0)


@pytest.mark.parametrize(
    "params, named",
    [
        (SamplingParams(max_new_tokens=0), "max_new_tokens is 0"),
        (SamplingParams(temperature=-0.5), "temperature is -0.5"),
        (SamplingParams(temperature=float("nan")), "temperature is nan"),
        (SamplingParams(temperature=float("inf")), "temperature is inf"),
    ],
)
def test_check_sampling_of_nonsense_names_the_value(params: SamplingParams, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        check_sampling(params)


@pytest.mark.parametrize(
    "tokens, ignore_eos, reason",
    [
        ([], False, None),
        ([5, 6], False, None),
        ([5, 1], False, "eos"),
        ([1, 5], False, None),
        ([5, 1], True, None),
        ([5, 6, 7], False, "length"),
        ([5, 6, 1], False, "eos"),
        ([5, 6, 1], True, "length"),
    ],
)
def test_finish_reason(tokens: list[int], ignore_eos: bool, reason: str | None) -> None:
    params = SamplingParams(max_new_tokens=3, ignore_eos=ignore_eos)
    assert finish_reason(tokens, params, frozenset({1})) == reason
