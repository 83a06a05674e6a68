"""Random worlds: whatever happens in them, no byte is wrong, no page is lost and nobody waits for ever."""

import random
import time

import pytest

from kvferry.transfer.types import Side
from tests.simulation.randomly import WEATHERS, RandomRun, Report, Weather, run_many

TRANSFERS_PER_WORLD = 25
RUNS = 10
WORLDS_PER_RUN = 20
FULL_RUNS = 20
FULL_WORLDS_PER_RUN = 400


def check_report(report: Report, transfers: int) -> None:
    """Enough was tried, and enough of it went well and badly for the run to mean something."""
    assert report.transfers >= transfers
    for side in Side:
        assert report.tally.done[side] > transfers / 8
        assert report.tally.failed[side] > transfers / 8


@pytest.mark.parametrize("run", range(RUNS))
def test_random_transfers_keep_every_promise(run: int) -> None:
    seeds = range(run * WORLDS_PER_RUN, (run + 1) * WORLDS_PER_RUN)

    report = run_many(seeds, TRANSFERS_PER_WORLD)

    print(report)
    check_report(report, WORLDS_PER_RUN * TRANSFERS_PER_WORLD)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("run", range(FULL_RUNS))
def test_many_random_transfers_keep_every_promise(run: int) -> None:
    start = 1_000_000 + run * FULL_WORLDS_PER_RUN

    report = run_many(range(start, start + FULL_WORLDS_PER_RUN), TRANSFERS_PER_WORLD)

    print(report)
    check_report(report, FULL_WORLDS_PER_RUN * TRANSFERS_PER_WORLD)


def test_same_seed_gives_the_same_transcript() -> None:
    transcripts = []
    for _ in range(2):
        run = RandomRun(3, TRANSFERS_PER_WORLD)
        run.run()
        transcripts.append(run.world.transcript)

    assert len(transcripts[0]) > 5 * TRANSFERS_PER_WORLD
    assert transcripts[0] == transcripts[1]


def test_run_uses_neither_the_real_clock_nor_shared_dice(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden() -> float:
        raise AssertionError("a simulated world asked for something real")

    monkeypatch.setattr(time, "monotonic", forbidden)
    monkeypatch.setattr(random, "random", forbidden)

    assert RandomRun(4, 5).run().transfers == 5


@pytest.mark.parametrize("weather", sorted(set(WEATHERS), key=WEATHERS.index))
def test_every_weather_lets_some_transfers_through(weather: Weather) -> None:
    runs = [RandomRun(seed, 20, weather=weather).run() for seed in range(5)]

    assert sum(report.tally.done[Side.RECEIVER] for report in runs) > 0


def test_transfers_that_nothing_disturbs_fail_only_for_want_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """No faults, no cancels, all letters in order: what fails was too slow in the end, on one side at least."""
    monkeypatch.setattr(RandomRun, "_is_exact", lambda self, letter: True)
    heard: list[str] = []

    for seed in range(60):
        run = RandomRun(seed, 20, weather=Weather(in_order=True))
        run.run()
        heard += [line for line in run.world.transcript if " hears " in line]

    failed = [line for line in heard if " failed in phase " in line]
    assert len(failed) < len(heard) / 4
    assert [line for line in failed if "[timeout]" not in line and "[lease_expired]" not in line] == []
