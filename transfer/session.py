"""The life of one transfer as literal tables. No I/O, no threads, no clock.

Two coupled machines describe an attempt on each side. The *outcome* says how far it got; the *exposure* says whether
the pages may still be touched by the wire:

    outcome    NEW -> OFFERED, GRANTED -> READY -> POSTED -> ANSWERED -> DONE | FAILED | CANCELLED
    exposure   PRIVATE -> EXPOSED -> QUIET | IN_DOUBT,  IN_DOUBT -> QUIET on proof only

Four tables: two sides, two directions. With push the sender writes into granted pages: its own are exposed to its own
posts, the receiver's to the peer's. With pull the receiver reads under a permit, and it is the other way round. Both
schedules are the same tables: context-first the offer comes before the grant, generation-first after it.

A session belongs to one attempt and one rank at the other end. A state that lacks an event does not allow it.
`may_reuse` is the only judge of whether pages may be used again.
"""

import enum
from collections.abc import Mapping
from typing import NamedTuple

from kvferry.cache.errors import LocalProtocolError
from kvferry.transfer.types import Direction, Side


class Outcome(enum.Enum):
    """How far an attempt got.

    NEW: known. OFFERED: the pages to send are computed, nobody asked for them yet. GRANTED: the receiver asked, and the
    next word is the sender's. READY: both are there. POSTED: a post of this side was handed to the transport. ANSWERED:
    the sender's last word came before the data.
    """

    NEW = "new"
    OFFERED = "offered"
    GRANTED = "granted"
    READY = "ready"
    POSTED = "posted"
    ANSWERED = "answered"
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

    OFFER: the pages to send are computed. GRANT: a valid grant arrived, or is about to leave. PERMIT: a valid permit
    arrived. POST: the first post of this side is about to be handed to the transport. MOVED: every post of this side is
    done, or there was nothing to post. LANDED: a notification for every post of the other side arrived. RESULT: the
    sender says that all went well. FAIL, CANCEL: the attempt ends without success. SETTLE: proof that nothing touches
    the pages any more. DOUBT: no such proof can be had for now.
    """

    OFFER = enum.auto()
    GRANT = enum.auto()
    PERMIT = enum.auto()
    POST = enum.auto()
    MOVED = enum.auto()
    LANDED = enum.auto()
    RESULT = enum.auto()
    FAIL = enum.auto()
    CANCEL = enum.auto()
    SETTLE = enum.auto()
    DOUBT = enum.auto()


class Action(enum.Enum):
    """What the shell does on the way, in order.

    SEND_GRANT, SEND_PERMIT, SEND_RESULT, SEND_CANCEL: tell the peer. START, ABORT: the posts of this side. REPORT: tell
    the engine the outcome.
    """

    SEND_GRANT = enum.auto()
    SEND_PERMIT = enum.auto()
    SEND_RESULT = enum.auto()
    SEND_CANCEL = enum.auto()
    START = enum.auto()
    ABORT = enum.auto()
    REPORT = enum.auto()


class Transition(NamedTuple):
    """Where an event leads and what is done on the way, in order."""

    state: State
    actions: tuple[Action, ...] = ()


Row = Mapping[Event, Transition]
Table = Mapping[State, Row]

_NEW, _OFFERED, _GRANTED, _READY = Outcome.NEW, Outcome.OFFERED, Outcome.GRANTED, Outcome.READY
_POSTED, _ANSWERED, _DONE = Outcome.POSTED, Outcome.ANSWERED, Outcome.DONE
_PRIVATE, _EXPOSED, _QUIET, _IN_DOUBT = Exposure.PRIVATE, Exposure.EXPOSED, Exposure.QUIET, Exposure.IN_DOUBT
_RESULT, _CANCEL, _REPORT = Action.SEND_RESULT, Action.SEND_CANCEL, Action.REPORT


def _to(outcome: Outcome, exposure: Exposure, *actions: Action) -> Transition:
    return Transition(State(outcome, exposure), actions)


def _stops(exposure: Exposure, *actions: Action) -> Row:
    """An attempt that is under way can fail and be cancelled alike."""
    return {
        Event.FAIL: _to(Outcome.FAILED, exposure, *actions),
        Event.CANCEL: _to(Outcome.CANCELLED, exposure, *actions),
    }


def _over(outcome: Outcome, exposure: Exposure) -> Row:
    """A finished attempt: late failures and cancels race with its end and change nothing."""
    same = _to(outcome, exposure)
    return {Event.FAIL: same, Event.CANCEL: same}


def _aftermath(proofs: tuple[Event, ...], told: tuple[Action, ...], told_later: tuple[Action, ...]) -> Table:
    """What follows a failure or a cancel: the wait for proof.

    Args:
        proofs: events that prove quiet.
        told: what is done once it is known, or known to be unknown for now, whether the pages are quiet.
        told_later: what is done when proof comes after doubt.
    """
    rows: dict[State, Row] = {}
    for outcome in (Outcome.FAILED, Outcome.CANCELLED):
        rows[State(outcome, _PRIVATE)] = _over(outcome, _PRIVATE)
        rows[State(outcome, _EXPOSED)] = {
            **_over(outcome, _EXPOSED),
            **{proof: _to(outcome, _QUIET, *told) for proof in proofs},
            Event.DOUBT: _to(outcome, _IN_DOUBT, *told),
        }
        rows[State(outcome, _IN_DOUBT)] = {
            **_over(outcome, _IN_DOUBT),
            **{proof: _to(outcome, _QUIET, *told_later) for proof in proofs},
        }
        rows[State(outcome, _QUIET)] = _over(outcome, _QUIET)
    return rows


PUSH_SENDER: Table = {
    State(_NEW, _PRIVATE): {
        Event.OFFER: _to(_OFFERED, _PRIVATE),
        Event.GRANT: _to(_GRANTED, _PRIVATE),
        **_stops(_PRIVATE, _RESULT, _REPORT),
    },
    State(_OFFERED, _PRIVATE): {
        Event.GRANT: _to(_READY, _PRIVATE, Action.START),
        **_stops(_PRIVATE, _RESULT, _REPORT),
    },
    State(_GRANTED, _PRIVATE): {
        Event.OFFER: _to(_READY, _PRIVATE, Action.START),
        **_stops(_PRIVATE, _RESULT, _REPORT),
    },
    State(_READY, _PRIVATE): {
        Event.POST: _to(_POSTED, _EXPOSED),
        Event.MOVED: _to(_DONE, _PRIVATE, _RESULT, _REPORT),
        **_stops(_PRIVATE, Action.ABORT, _RESULT, _REPORT),
    },
    State(_POSTED, _EXPOSED): {
        Event.MOVED: _to(_DONE, _QUIET, _RESULT, _REPORT),
        **_stops(_EXPOSED, Action.ABORT),
    },
    State(_DONE, _PRIVATE): _over(_DONE, _PRIVATE),
    State(_DONE, _QUIET): _over(_DONE, _QUIET),
    **_aftermath((Event.SETTLE,), (_RESULT, _REPORT), (_RESULT,)),
}
"""The side whose pages are read, by its own writes to the peer."""


PUSH_RECEIVER: Table = {
    State(_NEW, _PRIVATE): {
        Event.GRANT: _to(_GRANTED, _EXPOSED, Action.SEND_GRANT),
        **_stops(_PRIVATE, _CANCEL, _REPORT),
    },
    State(_GRANTED, _EXPOSED): {
        Event.LANDED: _to(_GRANTED, _QUIET),
        Event.RESULT: _to(_ANSWERED, _EXPOSED),
        **_stops(_EXPOSED, _CANCEL, _REPORT),
    },
    State(_GRANTED, _QUIET): {
        Event.RESULT: _to(_DONE, _QUIET, _REPORT),
        **_stops(_QUIET, _CANCEL, _REPORT),
    },
    State(_ANSWERED, _EXPOSED): {
        Event.LANDED: _to(_DONE, _QUIET, _REPORT),
        **_stops(_EXPOSED, _CANCEL, _REPORT),
    },
    State(_DONE, _QUIET): _over(_DONE, _QUIET),
    **_aftermath((Event.LANDED, Event.SETTLE), (), ()),
}
"""The side whose pages are written, by the peer."""


PULL_SENDER: Table = {
    State(_NEW, _PRIVATE): {
        Event.OFFER: _to(_OFFERED, _PRIVATE),
        Event.GRANT: _to(_GRANTED, _PRIVATE),
        **_stops(_PRIVATE, _RESULT, _REPORT),
    },
    State(_OFFERED, _PRIVATE): {
        Event.GRANT: _to(_READY, _EXPOSED, Action.SEND_PERMIT),
        **_stops(_PRIVATE, _RESULT, _REPORT),
    },
    State(_GRANTED, _PRIVATE): {
        Event.OFFER: _to(_READY, _EXPOSED, Action.SEND_PERMIT),
        **_stops(_PRIVATE, _RESULT, _REPORT),
    },
    State(_READY, _EXPOSED): {
        Event.LANDED: _to(_DONE, _QUIET, _RESULT, _REPORT),
        **_stops(_EXPOSED, _RESULT, _REPORT),
    },
    State(_DONE, _QUIET): _over(_DONE, _QUIET),
    **_aftermath((Event.LANDED, Event.SETTLE), (), ()),
}
"""The side whose pages are read, by the peer."""


PULL_RECEIVER: Table = {
    State(_NEW, _PRIVATE): {
        Event.GRANT: _to(_GRANTED, _PRIVATE, Action.SEND_GRANT),
        **_stops(_PRIVATE, _CANCEL, _REPORT),
    },
    State(_GRANTED, _PRIVATE): {
        Event.PERMIT: _to(_READY, _PRIVATE, Action.START),
        **_stops(_PRIVATE, _CANCEL, _REPORT),
    },
    State(_READY, _PRIVATE): {
        Event.POST: _to(_POSTED, _EXPOSED),
        Event.MOVED: _to(_POSTED, _QUIET),
        **_stops(_PRIVATE, Action.ABORT, _CANCEL, _REPORT),
    },
    State(_POSTED, _EXPOSED): {
        Event.MOVED: _to(_POSTED, _QUIET),
        Event.RESULT: _to(_ANSWERED, _EXPOSED),
        **_stops(_EXPOSED, Action.ABORT),
    },
    State(_POSTED, _QUIET): {
        Event.RESULT: _to(_DONE, _QUIET, _REPORT),
        **_stops(_QUIET, _CANCEL, _REPORT),
    },
    State(_ANSWERED, _EXPOSED): {
        Event.MOVED: _to(_DONE, _QUIET, _REPORT),
        **_stops(_EXPOSED, Action.ABORT),
    },
    State(_DONE, _QUIET): _over(_DONE, _QUIET),
    **_aftermath((Event.SETTLE,), (_CANCEL, _REPORT), (_CANCEL,)),
}
"""The side whose pages are written, by its own reads from the peer."""

TABLES: Mapping[tuple[Direction, Side], Table] = {
    (Direction.PUSH, Side.SENDER): PUSH_SENDER,
    (Direction.PUSH, Side.RECEIVER): PUSH_RECEIVER,
    (Direction.PULL, Side.SENDER): PULL_SENDER,
    (Direction.PULL, Side.RECEIVER): PULL_RECEIVER,
}

INITIAL = State(Outcome.NEW, Exposure.PRIVATE)


def may_reuse(*states: State) -> bool:
    """May these pages be handed out, overwritten or read by the engine as free memory?

    Only when every attempt to touch them is over and none can touch them any more: never exposed, or proven quiet. A
    timer, an error or a cancel alone never makes it so.

    Args:
        states: of every session of the grant, one per rank at the other end.
    """
    return all(state.outcome.terminal and state.exposure in (Exposure.PRIVATE, Exposure.QUIET) for state in states)


class Session:
    """One side of one attempt with one rank: a state that moves only as its table says."""

    def __init__(self, side: Side, direction: Direction = Direction.PUSH) -> None:
        self.side = side
        self.direction = direction
        self.state = INITIAL

    @property
    def drives(self) -> bool:
        """Whether the posts are this side's."""
        return (self.side is Side.SENDER) == (self.direction is Direction.PUSH)

    def allows(self, event: Event) -> bool:
        return event in TABLES[self.direction, self.side][self.state]

    def apply(self, event: Event) -> tuple[Action, ...]:
        """Move by one event and return what to do. Raises LocalProtocolError, unchanged, when it is not allowed."""
        transition = TABLES[self.direction, self.side][self.state].get(event)
        if transition is None:
            raise LocalProtocolError(
                f"{self.direction.value} {self.side.value} session in state ({self.state}) does not allow {event.name}"
            )
        self.state = transition.state
        return transition.actions
