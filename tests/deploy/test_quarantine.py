"""Pages in doubt stop a loop from taking on more, visibly, until proof brings them back."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvferry.cache.errors import CapacityError, TransferError
from kvferry.deploy.quarantine import QuarantineBound
from kvferry.transfer.types import Grant, Message, TransferResult
from tests.deploy.loops import WAIT_SECONDS, Node, nodes, synthetic_engine
from tests.helpers import wait_until
from tests.transfer.pairs import v1_manager

TOKENS = 30
LIMIT = {"num_slots": 64, "quarantine_limit": 0.1}
"""Six slots of 64: the pages of one prompt are more."""


def lose_grants(message: Message) -> Message | None:
    return None if isinstance(message, Grant) else message


def lose_results(message: Message) -> Message | None:
    return None if isinstance(message, TransferResult) else message


@contextmanager
def in_doubt(prefill: Node, decode: Node) -> Iterator[None]:
    """Pages granted over a channel that broke before anybody answered; at the end the channel comes back."""
    decode.end.bend, prefill.end.bend = lose_grants, lose_results
    request = prefill.request(TOKENS, hand_over=True)
    sink = decode.submit(decode.fetch(request, prefill.submit(request).wait().reply))
    wait_until(lambda: any(isinstance(m, Grant) for m in decode.end.sent), WAIT_SECONDS, "the grant left")
    decode.end.transceiver.on_channel_lost(prefill.end.worker, "the wire was cut")
    assert isinstance(sink.wait().error, TransferError)
    wait_until(lambda: decode.loop.condition != "ok", WAIT_SECONDS, "the loop says that it takes nothing")
    yield
    prove(prefill, decode)
    wait_until(lambda: decode.loop.condition == "ok", WAIT_SECONDS, "proof brought the pages back")


def prove(prefill: Node, decode: Node) -> None:
    decode.end.bend = prefill.end.bend = lambda message: message
    decode.end.transceiver.on_channel_up(prefill.end.worker)


def test_new_request_is_refused_above_the_limit_and_served_after_proof() -> None:
    with nodes(**LIMIT) as (prefill, decode):
        with in_doubt(prefill, decode):
            error = decode.submit(decode.request(8)).wait().error
            assert isinstance(error, CapacityError)
            assert not error.permanent
            for part in ("pool group 0 (window 8, full)", "of 64 slots in quarantine", "the 6 that", "0.1", "restart"):
                assert part in str(error)
        assert decode.submit(decode.request(8)).wait().error is None


def test_condition_changes_without_any_request() -> None:
    with nodes(**LIMIT) as (prefill, decode):
        with in_doubt(prefill, decode):
            assert "in quarantine" in decode.conditions[-1]
        assert decode.conditions[-1] == "ok"
        assert prefill.conditions == []


def test_waiting_requests_wait_and_running_ones_go_on_above_the_limit() -> None:
    with nodes(num_slots=200, quarantine_limit=0.04, max_running=2, stall_seconds=60.0) as (prefill, decode):
        running = decode.submit(decode.request(8, 100))
        wait_until(lambda: running.tokens, WAIT_SECONDS, "it runs")
        decode.engine.gate.clear()
        wait_until(lambda: decode.engine.at_gate, WAIT_SECONDS, "it stands")
        request = prefill.request(TOKENS, hand_over=True)
        reply = prefill.submit(request).wait().reply
        decode.end.transceiver.quarantined_slots, real = lambda: (9,), decode.end.transceiver.quarantined_slots  # type: ignore[method-assign]
        waiting = [decode.submit(decode.fetch(request, reply)), decode.submit(decode.request(5))]
        decode.engine.gate.set()
        assert running.wait().error is None
        assert decode.loop.call(lambda: decode.loop.num_waiting).result(WAIT_SECONDS) == 2
        assert [sink.num_finished for sink in waiting] == [0, 0]
        decode.end.transceiver.quarantined_slots = real  # type: ignore[method-assign]
        decode.loop.wake()
        assert [sink.wait().error for sink in waiting] == [None, None]


def test_waiting_request_ends_by_the_stall_rule_with_the_reason() -> None:
    with nodes(**LIMIT, stall_seconds=0.2) as (_, decode):
        decode.engine.gate.clear()
        computing = decode.submit(decode.request(8, 1))
        wait_until(lambda: decode.engine.at_gate, WAIT_SECONDS, "it computes")
        waiting = decode.submit(decode.request(8))
        decode.end.transceiver.quarantined_slots, real = lambda: (7,), decode.end.transceiver.quarantined_slots  # type: ignore[method-assign]
        decode.engine.gate.set()
        assert computing.wait().error is None
        error = waiting.wait().error
        assert isinstance(error, CapacityError)
        assert "nothing moves: pool group 0" in str(error)
        decode.end.transceiver.quarantined_slots = real  # type: ignore[method-assign]
        wait_until(lambda: decode.loop.condition == "ok", WAIT_SECONDS, "the pages are back")


@pytest.mark.parametrize(
    "limit, quarantined, group",
    [
        (0.25, (16, 16), None),
        (0.25, (17, 0), 0),
        (0.25, (0, 17), 1),
        (1.0, (64, 64), None),
        (0.001, (1, 0), 0),
        (0.001, (0, 0), None),
    ],
)
def test_bound_holds_for_each_pool_group(limit: float, quarantined: tuple[int, int], group: int | None) -> None:
    story = QuarantineBound(v1_manager(synthetic_engine().spec, 64), limit).story(quarantined)
    assert bool(story) == (group is not None)
    assert f"pool group {group} " in story or group is None
