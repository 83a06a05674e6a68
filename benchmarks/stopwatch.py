"""Measures two or more ways to do the same thing, turn by turn, so that a slow moment of the machine hits them all.

The clock is the processor time of the calling thread. What is measured here never waits, so on a quiet machine that is
the time that passes; on a shared one it leaves out what other programs take.
"""

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

clock_s = time.thread_time
"""Processor time of this thread, in seconds."""

Work = Callable[[], float]
"""Does one round of the work and returns the seconds its timed part took."""


@dataclass(frozen=True)
class Timing:
    """The times of one contender. Units: seconds."""

    rounds_s: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return median(self.rounds_s)

    @property
    def best_s(self) -> float:
        return min(self.rounds_s)

    @property
    def worst_s(self) -> float:
        return max(self.rounds_s)


def timed(work: Callable[[], object]) -> float:
    """Seconds one call takes."""
    start = clock_s()
    work()
    return clock_s() - start


@contextmanager
def steady_heap() -> Iterator[None]:
    """Keep what exists now out of the garbage collector's sight: its passes then cost what the measured code causes.

    Collection itself stays on, as in a server.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def interleave(contenders: Mapping[str, Work], num_rounds: int) -> dict[str, Timing]:
    """Run every contender once per round, in turn, after one round that is not counted."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    with steady_heap():
        for index in range(num_rounds + 1):
            for name, work in contenders.items():
                seconds = work()
                if index:
                    times[name].append(seconds)
    return {name: Timing(tuple(rounds)) for name, rounds in times.items()}
