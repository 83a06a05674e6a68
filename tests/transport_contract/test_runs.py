"""Runs, their pairs and their regions, checked against the plainest way to compute them."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cache.errors import TransportError
from kvferry.transfer.transport.memory import MAX_METADATA_BYTES, AgentCard, Region, RegionTable, region_of
from kvferry.transfer.transport.processes import own_life
from kvferry.transfer.transport.runs import RunList, checked_rows, pair_runs

SLOT = 64
REGIONS = (Region(4096, 16 * SLOT, 0, "DRAM"), Region(4096 + 16 * SLOT, 16 * SLOT, 0, "DRAM"))
TABLE = RegionTable("test", REGIONS)
NUM_SLOTS = 32

index_pairs = st.lists(st.tuples(st.integers(0, NUM_SLOTS - 1), st.integers(0, NUM_SLOTS - 1)), min_size=1, max_size=40)


def slots() -> RunList:
    rows = np.zeros((NUM_SLOTS, 3), np.uint64)
    rows[:, 0] = 4096 + np.arange(NUM_SLOTS) * SLOT
    rows[:, 1] = SLOT
    return RunList(set(), None, checked_rows("test", TABLE, rows), "DRAM")


def merged_one_by_one(pairs: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """(local slot, remote slot, slots) of maximal stretches that step together inside a region."""
    merged: list[tuple[int, int, int]] = []
    for local, remote in pairs:
        if merged:
            first_local, first_remote, length = merged[-1]
            steps = (local, remote) == (first_local + length, first_remote + length)
            if steps and local != NUM_SLOTS // 2 and remote != NUM_SLOTS // 2:
                merged[-1] = (first_local, first_remote, length + 1)
                continue
        merged.append((local, remote, 1))
    return merged


@given(index_pairs)
def test_pair_runs_merges_maximal_stretches(pairs: list[tuple[int, int]]) -> None:
    local, remote = (np.array(column, np.int32) for column in zip(*pairs, strict=True))
    found = pair_runs("test", slots(), local, slots(), remote)
    expected = merged_one_by_one(pairs)
    assert found.num_bytes == len(pairs) * SLOT
    assert [(row[0], row[1]) for row in found.local.tolist()] == [(4096 + a * SLOT, n * SLOT) for a, _, n in expected]
    assert [(row[0], row[1]) for row in found.remote.tolist()] == [(4096 + b * SLOT, n * SLOT) for _, b, n in expected]


@given(st.integers(4000, 4096 + 34 * SLOT), st.integers(1, 40 * SLOT))
def test_locate_accepts_exactly_runs_inside_one_region(address: int, num_bytes: int) -> None:
    inside = [
        index
        for index, region in enumerate(REGIONS)
        if region.address <= address and address + num_bytes <= region.address + region.num_bytes
    ]
    row = np.array([[address, num_bytes, 0]], np.uint64)
    if inside:
        assert TABLE.locate(row).tolist() == inside
    else:
        with pytest.raises(TransportError):
            TABLE.locate(row)


def test_locate_mixed_kinds_of_memory_raises() -> None:
    table = RegionTable("test", [Region(4096, 64, 0, "DRAM"), Region(8192, 64, 0, "VRAM")])
    with pytest.raises(TransportError, match="host and in device"):
        table.locate(np.array([[4096, 8, 0], [8192, 8, 0]], np.uint64))
    assert table.kind(1) == "VRAM"


def test_region_of_tensor_is_its_memory() -> None:
    tensor = torch.zeros(100, dtype=torch.uint8)
    assert region_of("test", tensor[10:20]) == Region(tensor.data_ptr() + 10, 10, 0, "DRAM")


def test_card_survives_encoding() -> None:
    card = AgentCard("nixl", "prefill-0 (å)", REGIONS, "abcd", bytes(range(256)), own_life())
    assert card.life is not None
    assert AgentCard.decode("nixl", card.encode()) == card
    assert AgentCard.decode("nixl", AgentCard("nixl", "a", REGIONS).encode()).life is None


def test_card_of_another_transport_is_refused() -> None:
    with pytest.raises(TransportError, match="uses transport 'nixl'"):
        AgentCard.decode("loopback", AgentCard("nixl", "a", REGIONS).encode())


@pytest.mark.parametrize(
    "regions",
    [
        [[4096, 64, 0]],
        [[4096, 64, 0, "FILE"]],
        [[0, 64, 0, "DRAM"]],
        [[4096, 0, 0, "DRAM"]],
        [[4096, 64, -1, "DRAM"]],
        [[2**64 - 1, 64, 0, "DRAM"]],
        [["4096", 64, 0, "DRAM"]],
        [[4096, 64, 0, "DRAM"]] * 4097,
        {"0": [4096, 64, 0, "DRAM"]},
    ],
)
def test_card_with_unfit_regions_is_refused(regions: object) -> None:
    header = json.dumps({"transport": "nixl", "agent": "a", "regions": regions, "wire": ""}).encode()
    with pytest.raises(TransportError, match="cannot be read"):
        AgentCard.decode("nixl", len(header).to_bytes(4, "big") + header)


@pytest.mark.parametrize("name", ["", "n" * 256, 7, None])
def test_card_with_unfit_name_is_refused(name: object) -> None:
    header = json.dumps({"transport": "nixl", "agent": name, "regions": [], "wire": ""}).encode()
    with pytest.raises(TransportError, match="cannot be read"):
        AgentCard.decode("nixl", len(header).to_bytes(4, "big") + header)


BOOT, PID, NET, TIME = "01234567-89ab-cdef-0123-456789abcdef", "pid:[1]", "net:[2]", "time:[3]"


def encoded_with(life: object) -> bytes:
    header = json.dumps({"transport": "nixl", "agent": "a", "regions": [], "wire": "", "life": life}).encode()
    return len(header).to_bytes(4, "big") + header


@pytest.mark.parametrize(
    "life",
    [
        [],
        {},
        7,
        "life",
        [BOOT, PID, NET, TIME, 1],
        [BOOT, PID, NET, TIME, 1, 2, 3],
        [BOOT, PID, NET, TIME, 0, 2],
        [BOOT, PID, NET, TIME, -1, 2],
        [BOOT, PID, NET, TIME, (1 << 22) + 1, 2],
        [BOOT, PID, NET, TIME, "1", 2],
        [BOOT, PID, NET, TIME, 1.0, 2],
        [BOOT, PID, NET, TIME, True, 2],
        [BOOT, PID, NET, TIME, 1, -1],
        [BOOT, PID, NET, TIME, 1, 1 << 63],
        ["../../etc", PID, NET, TIME, 1, 2],
        [BOOT, "pid:[" + "1" * 21 + "]", NET, TIME, 1, 2],
        [BOOT, PID, "net:[2]\n", TIME, 1, 2],
        [BOOT, PID, NET, None, 1, 2],
    ],
)
def test_card_with_unfit_life_is_refused(life: object) -> None:
    assert AgentCard.decode("nixl", encoded_with([BOOT, PID, NET, TIME, 1, 2])).life is not None
    with pytest.raises(TransportError, match="cannot be read"):
        AgentCard.decode("nixl", encoded_with(life))


def test_card_too_long_is_refused() -> None:
    with pytest.raises(TransportError, match="limit"):
        AgentCard.decode("nixl", bytes(MAX_METADATA_BYTES + 1))
