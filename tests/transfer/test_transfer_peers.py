"""Peers that come, go, come back, or live again."""

import dataclasses

import pytest

from kvferry.cache.errors import KVError, RemoteProtocolError
from kvferry.transfer.peers import FORGET_SECONDS
from kvferry.transfer.types import RankInfo, WorkerId
from tests.helpers import wait_until
from tests.transfer.bending import (
    LetsGo,
    Stuck,
    paired_names,
    start_transfer,
    sweep,
)
from tests.transfer.pairs import PROMPT_TOKENS, WAIT_SECONDS, pair


def test_peer_whose_channels_are_all_lost_is_forgotten_and_can_pair_again() -> None:
    with pair() as running:
        transceiver, peer = running.sender.transceiver, running.receiver.transceiver.info
        for _ in range(2):
            transceiver.on_channel_up(peer.worker)
        transceiver.on_channel_lost(peer.worker, "one of two")
        running.clock.now += 1.0
        assert paired_names(running, running.sender) == {"d"}
        transceiver.on_channel_lost(peer.worker, "the other")
        sweep(running)
        running.clock.now += FORGET_SECONDS - 1.0
        sweep(running)
        assert paired_names(running, running.sender) == {"d"}
        running.clock.now += 2.0
        wait_until(lambda: not paired_names(running, running.sender), WAIT_SECONDS, "the peer is forgotten")
        transceiver.pair(peer).result(WAIT_SECONDS)
        source, target, key = running.sender.fill(PROMPT_TOKENS), running.receiver.room(PROMPT_TOKENS), running.key()
        running.offer(key, source)
        running.request(key, target)
        assert running.wait_outcome(running.receiver).error is None


def test_peer_that_pairs_again_before_an_old_loss_is_noticed_is_not_forgotten() -> None:
    with pair() as running:
        transceiver, peer = running.sender.transceiver, running.receiver.transceiver.info
        transceiver.on_channel_up(peer.worker)
        transceiver.on_channel_lost(peer.worker, "broke")
        transceiver.pair(peer).result(WAIT_SECONDS)
        transceiver.on_channel_up(peer.worker)
        running.clock.now += 10 * FORGET_SECONDS
        sweep(running)
        assert paired_names(running, running.sender) == {"d"}


def test_new_incarnation_replaces_the_old_even_while_a_write_to_it_is_stuck() -> None:
    Stuck.gives_up = False
    with pair(Stuck) as running:
        source, target, key = running.sender.fill(PROMPT_TOKENS), running.receiver.room(PROMPT_TOKENS), running.key()
        running.offer(key, source)
        running.request(key, target)
        running.wait_outcome(running.sender)
        old = running.receiver.transceiver.info
        reborn = Stuck("d-reborn")
        reborn.register(running.receiver.manager.storage.pools)
        info = dataclasses.replace(
            old,
            worker=dataclasses.replace(old.worker, incarnation=999),
            agent_name="d-reborn",
            agent_metadata=reborn.metadata(),
        )
        running.sender.transceiver.pair(info).result(WAIT_SECONDS)
        Stuck.gives_up = True
        running.clock.now += 1.0
        source.close()
        wait_until(running.sender.is_empty, WAIT_SECONDS, "the old write was let go")
        assert running.sender.transceiver.failure is None
        reborn.close()


def test_failed_write_hangs_up_and_the_next_pairing_wires_the_lane_again() -> None:
    LetsGo.failing = True
    with pair(LetsGo) as running:
        start_transfer(running)
        running.wait_outcome(running.sender)
        wait_until(lambda: running.sender.hung_up, WAIT_SECONDS, "the control plane is asked to close the channel")
        assert running.sender.hung_up[0][0] == running.receiver.worker
        LetsGo.failing = False
        running.sender.transceiver.pair(running.receiver.transceiver.info).result(WAIT_SECONDS)
        key, _, _ = start_transfer(running)
        wait_until(
            lambda: any(o.key == key and o.error is None for o in running.receiver.poll()),
            WAIT_SECONDS,
            "it works again",
        )
        running.clock.now += 1.0


def test_second_worker_with_the_agent_of_another_is_refused() -> None:
    with pair() as running:
        info = running.receiver.transceiver.info
        twin = dataclasses.replace(info, worker=WorkerId("twin", 7))
        with pytest.raises(RemoteProtocolError, match=f"which is that of {info.worker}"):
            running.sender.transceiver.pair(twin).result(WAIT_SECONDS)
        assert paired_names(running, running.sender) == {"d"}
        start_transfer(running)
        assert running.wait_outcome(running.receiver).error is None


def misnamed(info: RankInfo) -> RankInfo:
    return dataclasses.replace(info, agent_name="other")


def misplaced(info: RankInfo) -> RankInfo:
    pools = tuple(dataclasses.replace(pool, base=pool.base + (1 << 30)) for pool in info.page_table.pools)
    return dataclasses.replace(info, page_table=dataclasses.replace(info.page_table, pools=pools))


@pytest.mark.parametrize("lie", [misnamed, misplaced])
def test_pairing_that_fails_leaves_no_connection_behind(lie: object) -> None:
    with pair() as running:
        transceiver, info = running.sender.transceiver, running.receiver.transceiver.info
        transceiver._reactor.call(lambda: transceiver._peers.forget(info.worker)).result(WAIT_SECONDS)
        with pytest.raises(KVError):
            transceiver.pair(lie(info)).result(WAIT_SECONDS)  # type: ignore[operator]
        assert not transceiver._transport._peers  # type: ignore[attr-defined]
        transceiver.pair(info).result(WAIT_SECONDS)
        start_transfer(running)
        assert running.wait_outcome(running.receiver).error is None


def test_peer_that_never_opens_a_channel_is_forgotten() -> None:
    with pair() as running:
        sweep(running)
        running.clock.now += 1.0
        sweep(running)
        assert paired_names(running, running.sender) == {"d"}
        running.clock.now += FORGET_SECONDS
        wait_until(lambda: not paired_names(running, running.sender), WAIT_SECONDS, "the peer is forgotten")
        assert running.sender.transceiver.failure is None
