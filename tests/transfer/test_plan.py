import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cache.errors import RemoteProtocolError
from kvferry.transfer.plan import PairPlanner, TransferPlan, run_list
from tests.transfer.tables import lists, manager


def planner() -> PairPlanner:
    return PairPlanner(manager(16).page_table(), manager(32).page_table())


def test_run_list_with_equal_layouts_has_one_run_per_slot() -> None:
    pools = manager(5, [8, 8, None]).page_table().pools
    runs = run_list(pools, device_index=3)
    assert runs.shape == (10, 3)
    assert runs[:, 1].tolist() == [pools[0].slot_bytes] * 5 + [pools[1].slot_bytes] * 5
    assert runs[0, 0] == pools[0].base
    assert runs[6, 0] == pools[1].base + pools[1].slot_bytes
    assert set(runs[:, 2].tolist()) == {3}


def test_plan_moves_exactly_the_ordinals_the_receiver_wants() -> None:
    plan = planner().plan(lists([-1, 4, 5], [0, 1, 2]), lists([-1, -1, 9], [7, -1, 8]))
    assert list(zip(plan.local.tolist(), plan.remote.tolist(), strict=True)) == [(5, 9), (0, 7), (2, 8)]
    assert plan.num_bytes == 3 * manager().page_table().pools[0].slot_bytes


def test_plan_second_pool_starts_after_the_first() -> None:
    planner = PairPlanner(manager(16, [8, 8, None]).page_table(), manager(32, [8, 8, None]).page_table())
    plan = planner.plan(lists([3], [3]), lists([4], [4]))
    assert plan.local.tolist() == [3, 16 + 3]
    assert plan.remote.tolist() == [4, 32 + 4]


def test_plan_page_missing_at_the_sender_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match=r"window 8.*no page for blocks \[0\]"):
        planner().plan(lists([-1, 4], [0, 1]), lists([3, 9], [7, 8]))


@pytest.mark.parametrize(
    "pages, story",
    [
        (lists([0, 1]), "1 block lists for 2 groups"),
        (lists([0], [1, 2]), "1 entries, 8 tokens need 2"),
        (lists([0, 32], [1, 2]), "slots 0..32 of 32"),
        (lists([0, -2], [1, 2]), "slots -2..0 of 32"),
        (lists([0, 1], [1, 2]), "named twice"),
    ],
)
def test_check_grant_refuses_lists_that_do_not_fit(pages: object, story: str) -> None:
    with pytest.raises(RemoteProtocolError, match=story):
        planner().check_grant(8, pages)  # type: ignore[arg-type]


def test_check_grant_accepts_absent_pages() -> None:
    planner().check_grant(8, lists([-1, 1], [2, -1]))
    assert planner().plan(lists([-1, 1], [2, -1]), lists([-1, 1], [2, -1])).num_runs == 2


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 120))
def test_slices_cover_everything_once_in_order_within_the_bound(sizes: list[int], bound: int) -> None:
    count = np.arange(len(sizes), dtype=np.int32)
    plan = TransferPlan(count, count + 100, np.array(sizes, np.int64))
    parts = list(plan.slices(bound))
    assert [index for part in parts for index in part.local.tolist()] == list(range(len(sizes)))
    assert [index for part in parts for index in part.remote.tolist()] == list(range(100, 100 + len(sizes)))
    assert sum(part.num_bytes for part in parts) == sum(sizes)
    assert all(part.num_bytes <= bound or len(part.local) == 1 for part in parts)
