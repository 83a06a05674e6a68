import itertools
from collections import Counter

import pytest

from kvferry.cache.errors import Unavailable
from kvferry.deploy.frontend import Router, routes
from kvferry.transfer.inference import DirectoryEntry
from kvferry.transfer.types import Role, WorkerId


def cluster(*roles: Role, paired: bool = True) -> tuple[DirectoryEntry, ...]:
    """Members that are paired with every other member that complements them."""
    workers = [WorkerId(f"{role.value}-{index}", index) for index, role in enumerate(roles)]
    members = []
    for worker, role in zip(workers, roles, strict=True):
        others = [
            other
            for other, theirs in zip(workers, roles, strict=True)
            if other != worker and ((role.prefills and theirs.decodes) or (role.decodes and theirs.prefills))
        ]
        members.append(DirectoryEntry(worker, role, "127.0.0.1:1", "m", tuple(others) if paired else ()))
    return tuple(members)


def names(members: tuple[DirectoryEntry, ...]) -> set[tuple[str, str]]:
    return {(route.prefill.worker.name, route.decode.worker.name) for route in routes(members)}


def test_routes_are_the_paired_complements() -> None:
    members = cluster(Role.PREFILL, Role.PREFILL, Role.DECODE)
    assert names(members) == {("prefill-0", "decode-2"), ("prefill-1", "decode-2")}


def test_routes_need_both_sides_to_know_the_pair() -> None:
    prefill, decode = cluster(Role.PREFILL, Role.DECODE)
    unaware = DirectoryEntry(prefill.worker, prefill.role, prefill.endpoint, prefill.model)
    assert names((unaware, decode)) == set()


def test_worker_with_both_roles_serves_alone_and_for_others() -> None:
    assert names(cluster(Role.BOTH, paired=False)) == {("both-0", "both-0")}
    assert names(cluster(Role.BOTH, Role.DECODE)) == {("both-0", "both-0"), ("both-0", "decode-1")}


def test_router_without_a_route_names_the_members() -> None:
    with pytest.raises(Unavailable, match=r"members: prefill-0 \(prefill\)"):
        Router().pick(cluster(Role.PREFILL))
    with pytest.raises(Unavailable, match="members: none"):
        Router().pick(())


def test_router_idle_cluster_visits_every_pair_in_turn() -> None:
    router, members = Router(), cluster(Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE)
    picked: Counter[tuple[str, str]] = Counter()
    for _ in range(8):
        route = router.pick(members)
        picked[route.prefill.worker.name, route.decode.worker.name] += 1
    pairs = itertools.product(("prefill-0", "prefill-1"), ("decode-2", "decode-3"))
    assert picked == dict.fromkeys(pairs, 2)


def test_router_avoids_loaded_workers_until_their_requests_end() -> None:
    router, members = Router(), cluster(Role.PREFILL, Role.PREFILL, Role.DECODE)
    busy = router.pick(members)
    router.start(busy)
    other = router.pick(members)
    assert other.prefill != busy.prefill
    router.start(other)
    router.end(busy)
    assert router.pick(members).prefill == busy.prefill
    assert not router.is_loaded(busy.prefill.worker)
    assert router.is_loaded(other.prefill.worker)


def test_router_forgets_pairs_that_are_gone() -> None:
    router, members = Router(), cluster(Role.PREFILL, Role.DECODE)
    router.pick(members)
    router.forget(())
    assert router._last_used == {}
