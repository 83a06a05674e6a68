"""Every guard is needed: without it the simulator finds a failure."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from kvferry.transfer import fencing, receiving, sending
from kvferry.transfer.ended import EndedAttempts
from kvferry.transfer.session import PUSH_RECEIVER, Action, Event, Exposure, Outcome, State, Transition
from kvferry.transfer.transport import quiescence
from tests.simulation.failure import SimulationFailure
from tests.simulation.randomly import AGAIN, CALM, FORGETFUL, REBORN, SLOW, STORMY, RandomRun, Weather

MAX_WORLDS = 800
"""Several times what the rarest of these failures takes."""


@dataclass(frozen=True)
class Guard:
    """One guard.

    Attributes:
        remove: switches it off.
        weather: in which it is needed often.
        transfers: per world.
    """

    remove: Callable[[pytest.MonkeyPatch], None]
    weather: Weather
    transfers: int = 20


def accept_any_fence(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fencing, "check_fence", lambda fence, grant: None)


def accept_any_life(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fencing, "check_life", lambda incarnation, worker: None)


def reuse_without_proof(patch: pytest.MonkeyPatch) -> None:
    for module in (receiving, sending):
        patch.setattr(module, "may_reuse", lambda *states: all(state.outcome.terminal for state in states))


def finish_on_the_result_alone(patch: pytest.MonkeyPatch) -> None:
    done = Transition(State(Outcome.DONE, Exposure.QUIET), (Action.REPORT,))
    patch.setitem(PUSH_RECEIVER[State(Outcome.GRANTED, Exposure.EXPOSED)], Event.RESULT, done)


def take_death_for_silence(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(quiescence, "NEEDED", {**quiescence.NEEDED, "tcp": quiescence.NEEDED["cma"]})


def forget_what_ended(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EndedAttempts, "find", lambda self, key: None)


GUARDS = {
    "epochs": Guard(accept_any_fence, FORGETFUL),
    "quarantine": Guard(reuse_without_proof, STORMY),
    "notification": Guard(finish_on_the_result_alone, CALM),
    "incarnation": Guard(accept_any_life, REBORN, 30),
    "memory of ended attempts": Guard(forget_what_ended, AGAIN),
    "lane": Guard(take_death_for_silence, replace(SLOW, crash=0.6)),
}


def first_failure(guard: Guard) -> SimulationFailure | None:
    for seed in range(MAX_WORLDS):
        try:
            RandomRun(seed, guard.transfers, weather=guard.weather).run()
        except SimulationFailure as failure:
            return failure
    return None


@pytest.mark.parametrize("name", list(GUARDS))
def test_world_without_this_guard_fails(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    guard = GUARDS[name]
    guard.remove(monkeypatch)

    failure = first_failure(guard)

    assert failure is not None
    print(f"without {name}, seed {failure.seed}: {failure.broken}")
    assert any(word in failure.broken for word in ("wrong bytes", "touches it", "reads a page", "writes a page"))


@pytest.mark.parametrize("name", list(GUARDS))
def test_world_with_all_guards_holds_in_the_same_weather(name: str) -> None:
    guard = GUARDS[name]

    for seed in range(10):
        assert RandomRun(seed, guard.transfers, weather=guard.weather).run().transfers >= guard.transfers
