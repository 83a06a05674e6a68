import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cache.errors import RemoteProtocolError
from kvferry.cache.page_table import PageTable
from kvferry.cache.spec import ModelSpec
from kvferry.transfer.plan import PairPlanner, TransferPlan, run_list
from tests.cache.specs import spec
from tests.transfer.tables import HYBRID, MIXED, PLAIN, SCALED, lists, page_table


def planner(model: ModelSpec = PLAIN) -> PairPlanner:
    return PairPlanner(page_table(model, 16), page_table(model, 32))


def pairs_of(plan: TransferPlan) -> list[tuple[int, int]]:
    return list(zip(plan.local.tolist(), plan.remote.tolist(), strict=True))


def test_run_list_has_one_run_per_slot_of_every_pool() -> None:
    pools = page_table(spec([8, 8, None]), 5).pools
    runs = run_list(pools, device_index=3)
    assert runs.shape == (10, 3)
    assert runs[:, 1].tolist() == [pools[0].slot_bytes] * 5 + [pools[1].slot_bytes] * 5
    assert runs[0, 0] == pools[0].base
    assert runs[6, 0] == pools[1].base + pools[1].slot_bytes
    assert set(runs[:, 2].tolist()) == {3}


def test_plan_moves_exactly_the_ordinals_the_receiver_wants() -> None:
    plan = planner().plan(lists([-1, 4, 5], [0, 1, 2]), lists([-1, -1, 9], [7, -1, 8]))
    assert pairs_of(plan) == [(5, 9), (0, 7), (2, 8)]
    assert plan.num_bytes == 3 * page_table().pools[0].slot_bytes
    assert plan.num_pages == plan.num_runs == 3


def test_plan_second_pool_starts_after_the_first() -> None:
    plan = planner(spec([8, 8, None])).plan(lists([3], [3]), lists([4], [4]))
    assert pairs_of(plan) == [(3, 4), (16 + 3, 32 + 4)]


def test_plan_page_is_one_run_in_each_pool_of_its_group() -> None:
    plan = planner(SCALED).plan(lists([3, -1], [1, 2]), lists([4, -1], [-1, 9]))
    assert pairs_of(plan) == [(3, 4), (16 + 3, 32 + 4), (2, 9), (16 + 2, 32 + 9)]
    assert plan.run_bytes.tolist() == [512, 32, 512, 32]
    assert (plan.num_pages, plan.num_runs, plan.num_bytes) == (2, 4, 2 * 544)


def test_plan_runs_of_one_pool_follow_each_other() -> None:
    """Otherwise no two neighbouring slots could be merged into one descriptor."""
    plan = planner(SCALED).plan(lists([-1] * 3, [5, 6, 7]), lists([-1] * 3, [1, 2, 3]))
    assert plan.local.tolist() == [5, 6, 7, 21, 22, 23]


def test_plan_recurrent_state_moves_as_the_page_of_its_last_block() -> None:
    plan = planner(HYBRID).plan(lists([-1, 1], [2, 3], [-1, 9]), lists([-1, 4], [5, 6], [-1, 7]))
    assert pairs_of(plan)[-1] == (16 + 9, 32 + 7)
    assert plan.run_bytes.tolist() == [512] * 3 + [192]


@pytest.mark.parametrize("model", [PLAIN, SCALED, HYBRID, MIXED])
def test_plan_with_nothing_wanted_is_empty(model: ModelSpec) -> None:
    groups = len(page_table(model).layer_groups)
    ours, theirs = lists(*[[0, 1]] * groups), lists(*[[-1, -1]] * groups)
    planner(model).check_pages(8, theirs)
    plan = planner(model).plan(ours, theirs)
    assert (plan.num_pages, plan.num_runs, plan.num_bytes, list(plan.slices(8))) == (0, 0, 0, [])
    assert plan.local.dtype == plan.remote.dtype == np.int32


@given(st.data())
def test_plan_moves_every_wanted_page_once_in_each_of_its_pools(data: st.DataObject) -> None:
    model = data.draw(st.sampled_from([PLAIN, SCALED, HYBRID, MIXED]))
    local, remote = page_table(model, 40), page_table(model, 50)
    blocks = data.draw(st.integers(0, 5))
    rows = st.permutations(range(40)).map(lambda slots: np.array(slots[:blocks], np.int32))
    ours = [data.draw(rows).tolist() for _ in local.layer_groups]
    wanted = [data.draw(st.lists(st.booleans(), min_size=blocks, max_size=blocks)) for _ in ours]
    theirs = [[10 * group + at if want else -1 for at, want in enumerate(line)] for group, line in enumerate(wanted)]
    planner = PairPlanner(local, remote)
    planner.check_pages(4 * blocks, lists(*theirs))
    plan = planner.plan(lists(*ours), lists(*theirs))

    def address(table: PageTable, group: int, pool: int, slot: int) -> tuple[int, int]:
        entry = table.pools[table.layer_groups[group].pools[pool]]
        return entry.base + slot * entry.slot_stride, entry.slot_bytes

    expected = [
        (*address(local, group, pool, ours[group][at]), *address(remote, group, pool, slot))
        for group, line in enumerate(theirs)
        for pool in range(len(local.layer_groups[group].pools))
        for at, slot in enumerate(line)
        if slot >= 0
    ]
    sources, targets = run_list(local.pools)[plan.local], run_list(remote.pools)[plan.remote]
    assert [tuple(pair) for pair in np.hstack([sources[:, :2], targets[:, :2]]).tolist()] == expected
    assert plan.run_bytes.tolist() == sources[:, 1].tolist() == targets[:, 1].tolist()
    assert plan.num_pages == sum(map(sum, wanted))


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
def test_check_pages_refuses_lists_that_do_not_fit(pages: object, story: str) -> None:
    with pytest.raises(RemoteProtocolError, match=story):
        planner().check_pages(8, pages)  # type: ignore[arg-type]


def test_check_pages_accepts_absent_pages() -> None:
    planner().check_pages(8, lists([-1, 1], [2, -1]))
    assert planner().plan(lists([-1, 1], [2, -1]), lists([-1, 1], [2, -1])).num_runs == 2


def test_check_pages_bounds_a_slot_by_the_smallest_pool_of_its_group() -> None:
    table = page_table(SCALED, 32)
    short = dataclasses.replace(table, pools=(table.pools[0], dataclasses.replace(table.pools[1], num_slots=8)))
    with pytest.raises(RemoteProtocolError, match=r"slots 8\.\.9 of 8"):
        PairPlanner(table, short).check_pages(8, lists([-1, -1], [8, 9]))


def test_check_pages_sees_groups_that_share_only_one_of_their_pools() -> None:
    table = page_table(SCALED, 32)
    first, second = table.layer_groups
    pools = (*table.pools, table.pools[0])
    groups = (first, dataclasses.replace(second, pools=(2, 1)))
    bent = dataclasses.replace(table, pools=pools, layer_groups=groups)
    with pytest.raises(RemoteProtocolError, match="named twice"):
        PairPlanner(table, bent).check_pages(4, lists([3], [3]))


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 120))
def test_slices_cover_everything_once_in_order_within_the_bound(sizes: list[int], bound: int) -> None:
    count = np.arange(len(sizes), dtype=np.int32)
    plan = TransferPlan(count, count + 100, np.array(sizes, np.int64), len(sizes))
    parts = list(plan.slices(bound))
    assert [index for part in parts for index in part.local.tolist()] == list(range(len(sizes)))
    assert [index for part in parts for index in part.remote.tolist()] == list(range(100, 100 + len(sizes)))
    assert sum(part.num_bytes for part in parts) == sum(sizes)
    assert all(part.num_bytes <= bound or len(part.local) == 1 for part in parts)
