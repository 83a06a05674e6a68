"""The life of one transfer as a literal table. No I/O, no threads, no clock.

Two coupled machines describe an attempt on each side. The *outcome* says how far it got; the *exposure* says whether
the pages may still be touched by the wire:

    outcome    NEW -> GRANTED -> POSTED -> DONE | FAILED | CANCELLED
    exposure   PRIVATE -> EXPOSED -> QUIET | IN_DOUBT,  IN_DOUBT -> QUIET on proof only

For the sender, exposed pages may still be read by its own posts. For the receiver, they may still be written by the
peer. A state that lacks an event does not allow it. `may_reuse` is the only judge of whether pages may be used again.
"""

import enum
from collections.abc import Mapping
from typing import NamedTuple

from kvferry.cache.errors import LocalProtocolError


class Side(enum.Enum):
    """Which end of the transfer a session is."""

    SENDER = "sender"
    RECEIVER = "receiver"


class Outcome(enum.Enum):
    """How far an attempt got."""

    NEW = "new"
    GRANTED = "granted"
    POSTED = "posted"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def terminal(self) -> bool:
        return self in (Outcome.DONE, Outcome.FAILED, Outcome.CANCELLED)


class Exposure(enum.Enum):
    """Whether the wire may still touch the pages."""

    PRIVATE = "private"
    EXPOSED = "exposed"
    QUIET = "quiet"
    IN_DOUBT = "in doubt"


class State(NamedTuple):
    """Both machines of one side."""

    outcome: Outcome
    exposure: Exposure

    def __str__(self) -> str:
        return f"{self.outcome.value}, {self.exposure.value}"


class Event(enum.Enum):
    """What can happen to an attempt.

    GRANT: sender: a valid grant arrived; receiver: the grant is about to leave.
    POST: the first write was handed to the transport (sender).
    WRITTEN: every write is done, or there was nothing to write (sender).
    RESULT: the sender says everything was posted, with the aux record (receiver).
    LANDED: a notification for every write arrived (receiver).
    FAIL, CANCEL: the attempt ends without success.
    SETTLE: proof that nothing touches the pages any more. DOUBT: no such proof can be had for now.
    """

    GRANT = enum.auto()
    POST = enum.auto()
    WRITTEN = enum.auto()
    RESULT = enum.auto()
    LANDED = enum.auto()
    FAIL = enum.auto()
    CANCEL = enum.auto()
    SETTLE = enum.auto()
    DOUBT = enum.auto()


class Action(enum.Enum):
    """What the shell does on entering a state by a transition.

    SEND_GRANT, SEND_RESULT, SEND_CANCEL: tell the peer. START_WRITES, ABORT_WRITES: drive the transport.
    REPORT: tell the engine the outcome.
    """

    SEND_GRANT = enum.auto()
    SEND_RESULT = enum.auto()
    SEND_CANCEL = enum.auto()
    START_WRITES = enum.auto()
    ABORT_WRITES = enum.auto()
    REPORT = enum.auto()


class Transition(NamedTuple):
    """Where an event leads and what is done on the way, in order."""

    state: State
    actions: tuple[Action, ...] = ()


Table = Mapping[State, Mapping[Event, Transition]]

_NEW, _GRANTED, _POSTED, _DONE = Outcome.NEW, Outcome.GRANTED, Outcome.POSTED, Outcome.DONE
_FAILED, _CANCELLED = Outcome.FAILED, Outcome.CANCELLED
_PRIVATE, _EXPOSED, _QUIET, _IN_DOUBT = Exposure.PRIVATE, Exposure.EXPOSED, Exposure.QUIET, Exposure.IN_DOUBT


def _to(outcome: Outcome, exposure: Exposure, *actions: Action) -> Transition:
    return Transition(State(outcome, exposure), actions)


def _over(outcome: Outcome, exposure: Exposure) -> Mapping[Event, Transition]:
    """A finished attempt: late failures and cancels race with its end and change nothing."""
    same = _to(outcome, exposure)
    return {Event.FAIL: same, Event.CANCEL: same}


SENDER: Table = {
    State(_NEW, _PRIVATE): {
        Event.GRANT: _to(_GRANTED, _PRIVATE, Action.START_WRITES),
        Event.FAIL: _to(_FAILED, _PRIVATE, Action.SEND_RESULT, Action.REPORT),
        Event.CANCEL: _to(_CANCELLED, _PRIVATE, Action.SEND_RESULT, Action.REPORT),
    },
    State(_GRANTED, _PRIVATE): {
        Event.POST: _to(_POSTED, _EXPOSED),
        Event.WRITTEN: _to(_DONE, _PRIVATE, Action.SEND_RESULT, Action.REPORT),
        Event.FAIL: _to(_FAILED, _PRIVATE, Action.ABORT_WRITES, Action.SEND_RESULT, Action.REPORT),
        Event.CANCEL: _to(_CANCELLED, _PRIVATE, Action.ABORT_WRITES, Action.SEND_RESULT, Action.REPORT),
    },
    State(_POSTED, _EXPOSED): {
        Event.WRITTEN: _to(_DONE, _QUIET, Action.SEND_RESULT, Action.REPORT),
        Event.FAIL: _to(_FAILED, _EXPOSED, Action.ABORT_WRITES),
        Event.CANCEL: _to(_CANCELLED, _EXPOSED, Action.ABORT_WRITES),
    },
    State(_FAILED, _EXPOSED): {
        **_over(_FAILED, _EXPOSED),
        Event.SETTLE: _to(_FAILED, _QUIET, Action.SEND_RESULT, Action.REPORT),
        Event.DOUBT: _to(_FAILED, _IN_DOUBT, Action.SEND_RESULT, Action.REPORT),
    },
    State(_CANCELLED, _EXPOSED): {
        **_over(_CANCELLED, _EXPOSED),
        Event.SETTLE: _to(_CANCELLED, _QUIET, Action.SEND_RESULT, Action.REPORT),
        Event.DOUBT: _to(_CANCELLED, _IN_DOUBT, Action.SEND_RESULT, Action.REPORT),
    },
    State(_FAILED, _IN_DOUBT): {
        **_over(_FAILED, _IN_DOUBT),
        Event.SETTLE: _to(_FAILED, _QUIET, Action.SEND_RESULT),
    },
    State(_CANCELLED, _IN_DOUBT): {
        **_over(_CANCELLED, _IN_DOUBT),
        Event.SETTLE: _to(_CANCELLED, _QUIET, Action.SEND_RESULT),
    },
    State(_DONE, _PRIVATE): _over(_DONE, _PRIVATE),
    State(_DONE, _QUIET): _over(_DONE, _QUIET),
    State(_FAILED, _PRIVATE): _over(_FAILED, _PRIVATE),
    State(_FAILED, _QUIET): _over(_FAILED, _QUIET),
    State(_CANCELLED, _PRIVATE): _over(_CANCELLED, _PRIVATE),
    State(_CANCELLED, _QUIET): _over(_CANCELLED, _QUIET),
}
"""The side whose pages are read."""


RECEIVER: Table = {
    State(_NEW, _PRIVATE): {
        Event.GRANT: _to(_GRANTED, _EXPOSED, Action.SEND_GRANT),
        Event.FAIL: _to(_FAILED, _PRIVATE, Action.REPORT),
        Event.CANCEL: _to(_CANCELLED, _PRIVATE, Action.REPORT),
    },
    State(_GRANTED, _EXPOSED): {
        Event.LANDED: _to(_GRANTED, _QUIET),
        Event.RESULT: _to(_POSTED, _EXPOSED),
        Event.FAIL: _to(_FAILED, _EXPOSED, Action.SEND_CANCEL, Action.REPORT),
        Event.CANCEL: _to(_CANCELLED, _EXPOSED, Action.SEND_CANCEL, Action.REPORT),
    },
    State(_GRANTED, _QUIET): {
        Event.RESULT: _to(_DONE, _QUIET, Action.REPORT),
        Event.FAIL: _to(_FAILED, _QUIET, Action.SEND_CANCEL, Action.REPORT),
        Event.CANCEL: _to(_CANCELLED, _QUIET, Action.SEND_CANCEL, Action.REPORT),
    },
    State(_POSTED, _EXPOSED): {
        Event.LANDED: _to(_DONE, _QUIET, Action.REPORT),
        Event.FAIL: _to(_FAILED, _EXPOSED, Action.SEND_CANCEL, Action.REPORT),
        Event.CANCEL: _to(_CANCELLED, _EXPOSED, Action.SEND_CANCEL, Action.REPORT),
    },
    State(_FAILED, _EXPOSED): {
        **_over(_FAILED, _EXPOSED),
        Event.LANDED: _to(_FAILED, _QUIET),
        Event.SETTLE: _to(_FAILED, _QUIET),
        Event.DOUBT: _to(_FAILED, _IN_DOUBT),
    },
    State(_CANCELLED, _EXPOSED): {
        **_over(_CANCELLED, _EXPOSED),
        Event.LANDED: _to(_CANCELLED, _QUIET),
        Event.SETTLE: _to(_CANCELLED, _QUIET),
        Event.DOUBT: _to(_CANCELLED, _IN_DOUBT),
    },
    State(_FAILED, _IN_DOUBT): {
        **_over(_FAILED, _IN_DOUBT),
        Event.LANDED: _to(_FAILED, _QUIET),
        Event.SETTLE: _to(_FAILED, _QUIET),
    },
    State(_CANCELLED, _IN_DOUBT): {
        **_over(_CANCELLED, _IN_DOUBT),
        Event.LANDED: _to(_CANCELLED, _QUIET),
        Event.SETTLE: _to(_CANCELLED, _QUIET),
    },
    State(_DONE, _QUIET): _over(_DONE, _QUIET),
    State(_FAILED, _PRIVATE): _over(_FAILED, _PRIVATE),
    State(_FAILED, _QUIET): _over(_FAILED, _QUIET),
    State(_CANCELLED, _PRIVATE): _over(_CANCELLED, _PRIVATE),
    State(_CANCELLED, _QUIET): _over(_CANCELLED, _QUIET),
}
"""The side whose pages are written."""

TABLES: Mapping[Side, Table] = {Side.SENDER: SENDER, Side.RECEIVER: RECEIVER}

INITIAL = State(Outcome.NEW, Exposure.PRIVATE)


def may_reuse(state: State) -> bool:
    """May the pages of this side be handed out, overwritten or read by the engine as free memory?

    Only when the attempt is over and nothing can touch them: never exposed, or proven quiet. A timer, an error or a
    cancel alone never makes it so.
    """
    return state.outcome.terminal and state.exposure in (Exposure.PRIVATE, Exposure.QUIET)


class Session:
    """One side of one attempt: a state that moves only as its table says."""

    def __init__(self, side: Side) -> None:
        self.side = side
        self.state = INITIAL

    def allows(self, event: Event) -> bool:
        return event in TABLES[self.side][self.state]

    def apply(self, event: Event) -> tuple[Action, ...]:
        """Move by one event and return what to do. Raises LocalProtocolError, unchanged, when it is not allowed."""
        transition = TABLES[self.side][self.state].get(event)
        if transition is None:
            raise LocalProtocolError(f"{self.side.value} session in state ({self.state}) does not allow {event.name}")
        self.state = transition.state
        return transition.actions
