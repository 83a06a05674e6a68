"""How many decoding requests fit: the figures of the capacity table, asked of the managers."""

import pytest

from benchmarks.capacity import MODELS, POOLS, Capacity, capacity, table
from benchmarks.load import Load


def counted(model: str, num_tokens: int) -> Capacity:
    return capacity(MODELS / f"{model}.json", num_tokens, POOLS)


@pytest.mark.parametrize(
    "model, num_tokens, at_least",
    [("gpt-oss-120b", 8192, 1.9), ("gemma-3-27b", 8192, 1.15), ("gemma-3-27b", 32768, 1.65)],
)
def test_shared_pools_hold_more_than_equal_shares(model: str, num_tokens: int, at_least: float) -> None:
    found = counted(model, num_tokens)

    assert found.ratio("V1, equal shares") >= at_least
    assert found.requests["V2"] >= found.requests["V1, best shares"] >= found.requests["V1, equal shares"]
    assert found.requests["V2"] > found.requests["no windows"]


def test_model_without_windows_fits_the_same_in_every_pool() -> None:
    assert len(set(counted("llama-3-70b", 8192).requests.values())) == 1


def test_load_passes_through_every_alignment_of_a_block() -> None:
    steps = Load(64, 32).steps

    assert steps.history.tolist() == list(range(32, 64))
    assert (steps.capacity - steps.history).tolist() == [1] * 32


def test_table_has_a_row_per_model_and_length() -> None:
    found = [Capacity("m", 8192, {"V2": 30, "V1, equal shares": 20})]
    lines = table(found).splitlines()

    assert [cell.strip() for cell in lines[0].strip("|").split("|")][2:] == [
        "V2",
        "V1, equal shares",
        "V2 / V1, equal shares",
    ]
    assert [cell.strip() for cell in lines[2].strip("|").split("|")] == ["m", "8192", "30", "20", "1.500"]
