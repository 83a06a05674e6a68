"""Workers killed, or stopped and continued, at chosen moments of a transfer over real NIXL.

The pools are so small that pages in doubt would be needed by the requests that run meanwhile, and the engine checks
every byte it reads: a page handed out too early, or a late write into one, does not go unnoticed.
"""

import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from kvferry.cache.errors import CapacityError, DeadlineExceeded, KVError, PeerLost, TransferTimeout, Unavailable
from kvferry.transfer.inference import GenerateCall, GenerateSummary
from tests.end_to_end import direct
from tests.end_to_end.direct import Reply
from tests.end_to_end.faulty_worker import Moment
from tests.end_to_end.stage import NUM_SHORT, Stage, staged
from tests.helpers import wait_until

ERROR_SECONDS = 10.0
"""Bound on the time from a request to the error that says that its transfer failed."""
DOUBT_SECONDS = 15.0

pytestmark = pytest.mark.xdist_group("late_writers")

Tokens = tuple[int, ...]


@pytest.fixture(scope="module", params=["cma", "tcp"])
def stage(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with staged(tmp_path_factory.mktemp("stage"), request.param) as stage:
        yield stage


@dataclass(frozen=True)
class Alone:
    """What each request answers when nothing fails and nothing else runs."""

    long: Tokens
    short: list[Tokens]


@pytest.fixture(scope="module")
def alone(stage: Stage) -> Alone:
    replies = [stage.ask(call) for call in (stage.long_call(), *stage.short_calls())]
    assert [reply.error for reply in replies] == [None] * (1 + NUM_SHORT)
    long, *short = (reply.tokens for reply in replies)
    return Alone(long, short)


def check_answers(stage: Stage, expected: Tokens, prefill: str, decode: str) -> None:
    """The long request is answered over these workers as it was, on the lane the stage is for."""
    reply = stage.ask(stage.long_call(), prefill, decode)
    assert (reply.error, reply.tokens) == (None, expected)
    summary = reply.events[-1]
    assert isinstance(summary, GenerateSummary)
    assert summary.wire.lane == stage.lane
    assert summary.wire.num_slices >= 3


def check_failed(reply: Reply, kind: type[KVError], words: str) -> None:
    assert isinstance(reply.error, kind), reply.error
    assert words in str(reply.error)
    assert reply.events == []
    assert reply.seconds < ERROR_SECONDS


def in_background(pool: ThreadPoolExecutor, stage: Stage, calls: list[GenerateCall]) -> "list[Future[Reply]]":
    return [pool.submit(stage.ask, call) for call in calls]


def check_identical(replies: "list[Future[Reply]]", expected: list[Tokens]) -> None:
    for reply, tokens in zip([future.result() for future in replies], expected, strict=True):
        assert (reply.error, reply.tokens) == (None, tokens)


# ---- killed

long_run_on_tcp = pytest.mark.parametrize("stage", ["cma", pytest.param("tcp", marks=pytest.mark.full)], indirect=True)


@long_run_on_tcp
def test_writer_killed_midway_fails_its_request_and_its_pages_come_back(stage: Stage, alone: Alone) -> None:
    check_killed_writer(stage, alone, Moment.UNDER_WAY)


@long_run_on_tcp
@pytest.mark.parametrize("moment", [Moment.GRANTED, Moment.DONE])
def test_writer_killed_before_or_after_its_writes_fails_its_request_and_its_pages_come_back(
    stage: Stage, alone: Alone, moment: Moment
) -> None:
    check_killed_writer(stage, alone, moment)


def check_killed_writer(stage: Stage, alone: Alone, moment: Moment) -> None:
    """Kill one at this moment while other requests wait for the pages that it was granted."""
    with stage.victim("prefill") as victim, ThreadPoolExecutor(NUM_SHORT) as pool:
        check_answers(stage, alone.long, victim, "decode-0")
        stage.arm(victim, signal.SIGKILL, moment)
        call = stage.long_call()
        computed = direct.prefill(stage.service, victim, call)
        shorts = in_background(pool, stage, stage.short_calls())
        reply = direct.decode(stage.service, "decode-0", direct.decode_call(call, computed))
        stage.check_killed(victim)
        check_failed(reply, PeerLost, "went away")
        check_identical(shorts, alone.short)
    stage.wait_idle()
    check_answers(stage, alone.long, "prefill-0", "decode-0")


@long_run_on_tcp
def test_killed_reader_leaves_the_pages_it_read_until_it_is_gone(stage: Stage, alone: Alone) -> None:
    with stage.victim("decode", direction="pull") as victim, ThreadPoolExecutor(NUM_SHORT) as pool:
        check_answers(stage, alone.long, "prefill-0", victim)
        stage.arm(victim, signal.SIGKILL, Moment.UNDER_WAY)
        call = stage.long_call()
        computed = direct.prefill(stage.service, "prefill-0", call)
        shorts = in_background(pool, stage, stage.short_calls())
        reply = direct.decode(stage.service, victim, direct.decode_call(call, computed))
        stage.check_killed(victim)
        check_failed(reply, Unavailable, "went away")
        check_identical(shorts, alone.short)
    stage.wait_idle()
    check_answers(stage, alone.long, "prefill-0", "decode-0")


# ---- stopped past its lease, and continued


@long_run_on_tcp
def test_late_writer_finds_its_pages_in_quarantine_and_its_word_brings_them_back(stage: Stage, alone: Alone) -> None:
    check_answers(stage, alone.long, "late-writer", "decode-0")
    stage.arm("late-writer", signal.SIGSTOP, Moment.RENEWED)
    call = stage.long_call()
    computed = direct.prefill(stage.service, "late-writer", call)
    try:
        reply = direct.decode(stage.service, "decode-0", direct.decode_call(call, computed))
        stage.wait_stopped("late-writer")
        check_failed(reply, TransferTimeout, "the lease of late-writer#")
        granted = check_kept(stage, "decode-0")
        refused = stage.ask(stage.long_call())
        check_failed(refused, CapacityError, "in quarantine")
        with ThreadPoolExecutor(NUM_SHORT) as pool:
            shorts = in_background(pool, stage, stage.short_calls())
            wait_until(lambda: queued(stage, "decode-0") == (1, NUM_SHORT - 1), 10.0, "one request runs, others wait")
            assert stage.num_taken("decode-0")[1] == granted
            stage.resume("late-writer")
            check_identical(shorts, alone.short)
    finally:
        stage.resume("late-writer")
    stage.wait_idle()
    check_answers(stage, alone.long, "late-writer", "decode-0")


@long_run_on_tcp
def test_late_reader_finds_the_pages_unchanged_and_its_word_brings_them_back(stage: Stage, alone: Alone) -> None:
    check_answers(stage, alone.long, "prefill-0", "late-reader")
    stage.arm("late-reader", signal.SIGSTOP, Moment.RENEWED)
    call = stage.long_call()
    computed = direct.prefill(stage.service, "prefill-0", call)
    try:
        reply = direct.decode(stage.service, "late-reader", direct.decode_call(call, computed, timeout_seconds=4.0))
        stage.wait_stopped("late-reader")
        check_failed(reply, DeadlineExceeded, "deadline")
        permitted = check_kept(stage, "prefill-0")
        with pytest.raises(CapacityError, match="quarantine"):
            direct.prefill(stage.service, "prefill-0", stage.long_call())
        with ThreadPoolExecutor(NUM_SHORT) as pool:
            shorts = in_background(pool, stage, stage.short_calls())
            wait_until(lambda: queued(stage, "decode-0")[0] > 0, 10.0, "the first of the requests runs")
            assert stage.num_taken("prefill-0")[1] == permitted
            stage.resume("late-reader")
            check_identical(shorts, alone.short)
    finally:
        stage.resume("late-reader")
    stage.wait_idle()
    check_answers(stage, alone.long, "prefill-0", "late-reader")


def check_kept(stage: Stage, name: str) -> int:
    """The pages of the failed attempt are not free, and end up in quarantine. Returns how many they are."""
    in_use, quarantined = stage.num_taken(name)
    assert in_use + quarantined > 120
    wait_until(lambda: stage.num_taken(name)[1] > 0, DOUBT_SECONDS, f"pages of {name} are in quarantine")
    assert stage.num_taken(name) == (0, in_use + quarantined)
    return in_use + quarantined


def queued(stage: Stage, name: str) -> tuple[int, int]:
    status = stage.status(name)
    return status.running, status.waiting
