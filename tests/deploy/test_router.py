import itertools
from collections import Counter

import pytest

from kvferry.cache.errors import CapacityError, KVError, PeerLost, Unavailable
from kvferry.deploy.frontend import AVOID_SECONDS, Route, Router, routes
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


def test_two_workers_with_both_roles_never_serve_each_other() -> None:
    members = cluster(Role.BOTH, Role.BOTH, Role.PREFILL, Role.DECODE)
    assert names(members) == {
        *(("both-0", "both-0"), ("both-1", "both-1")),
        *(("both-0", "decode-3"), ("both-1", "decode-3")),
        *(("prefill-2", "both-0"), ("prefill-2", "both-1"), ("prefill-2", "decode-3")),
    }


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def fail(router: Router, error: KVError, *workers: WorkerId) -> None:
    with pytest.raises(type(error)), router.blaming((type(error),), *workers):
        raise error


def picks(router: Router, members: tuple[DirectoryEntry, ...], count: int = 8) -> set[tuple[str, str]]:
    def pair(route: Route) -> tuple[str, str]:
        return route.prefill.worker.name, route.decode.worker.name

    return {pair(router.pick(members)) for _ in range(count)}


def test_router_avoids_a_worker_that_failed_until_the_pause_is_over() -> None:
    clock = Clock()
    router, members = Router(clock), cluster(Role.PREFILL, Role.PREFILL, Role.DECODE)
    healthy = next(route for route in routes(members) if route.prefill is members[1])
    router.start(healthy)
    assert picks(router, members) == {("prefill-0", "decode-2")}
    fail(router, Unavailable("gone", peer="x"), members[0].worker)
    assert picks(router, members) == {("prefill-1", "decode-2")}
    clock.now += AVOID_SECONDS
    assert picks(router, members) == {("prefill-0", "decode-2")}


def test_router_avoids_a_pair_that_lost_each_other_and_no_other() -> None:
    router, members = Router(Clock()), cluster(Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE)
    lost = PeerLost("broken", transfer_id="t", peer="x", phase="wire")
    fail(router, lost, members[0].worker, members[2].worker)
    assert picks(router, members) == {("prefill-0", "decode-3"), ("prefill-1", "decode-2"), ("prefill-1", "decode-3")}


def test_router_avoids_a_worker_without_room_and_blames_nobody_for_a_request_that_never_fits() -> None:
    router, members = Router(Clock()), cluster(Role.PREFILL, Role.PREFILL, Role.DECODE)
    fail(router, CapacityError("too long", requested=(2,), available=(1,), permanent=True), members[0].worker)
    assert len(picks(router, members)) == 2
    fail(router, CapacityError("full", requested=(1,), available=(0,)), members[0].worker)
    assert picks(router, members) == {("prefill-1", "decode-2")}


def test_router_without_another_route_takes_the_one_that_failed() -> None:
    router, members = Router(Clock()), cluster(Role.PREFILL, Role.DECODE)
    fail(router, Unavailable("gone", peer="x"), members[1].worker)
    assert picks(router, members) == {("prefill-0", "decode-1")}


def test_router_blames_nobody_for_other_errors() -> None:
    router, members = Router(Clock()), cluster(Role.PREFILL, Role.PREFILL, Role.DECODE)
    with pytest.raises(KVError), router.blaming((Unavailable,), members[0].worker):
        raise KVError("a request that cannot be served")
    assert len(picks(router, members)) == 2


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
    fail(router, Unavailable("gone", peer="x"), members[0].worker)
    router.forget(())
    assert (router._last_used, router._failed) == ({}, {})
