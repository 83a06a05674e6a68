"""The generated parts of docs/safety.md: session diagrams from the tables, the rule of proof from the transport."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping

from kvferry.transfer.session import INITIAL, TABLES, Outcome, State, Table, Transition, may_reuse
from kvferry.transfer.transport.quiescence import NEEDED, Condition
from kvferry.transfer.types import Direction, Side

_STOPPED = (Outcome.FAILED, Outcome.CANCELLED)

_CONDITIONS = {
    Condition.WRITER_GONE: "no thread of the other process runs any more",
    Condition.STREAMS_DRAINED: "all that was sent to our sockets before has been read, or our agent is destroyed",
    Condition.KEY_INVALIDATED: "the remote key is invalidated, which takes a restart of the worker that owns the pages",
}


def sessions() -> Iterator[str]:
    """One diagram per table."""
    for (direction, side), table in TABLES.items():
        yield from (f"### {direction.value}, {side.value}", "", "```mermaid", "stateDiagram-v2")
        yield f"    [*] --> {_name(INITIAL)}"
        yield from sorted({line for state in table for line in _lines(table, state)})
        yield from (f"    {_name(state)} --> [*]" for state in _once(filter(may_reuse, table)))
        yield from ("```", "")


def _lines(table: Table, state: State) -> Iterator[str]:
    """Arrows of one state; those that change nothing are left out."""
    arrows: defaultdict[str, list[str]] = defaultdict(list)
    for event, transition in table[state].items():
        arrows[f"{_name(transition.state)}: {{}}{_actions(transition)}"].append(event.name)
    for arrow, events in arrows.items():
        if not arrow.startswith(f"{_name(state)}: "):
            yield f"    {_name(state)} --> {arrow.format(' or '.join(sorted(events)))}"


def _actions(transition: Transition) -> str:
    names = ", ".join(action.name for action in transition.actions)
    return f" / {names}" if names else ""


def _once(states: Iterator[State]) -> list[State]:
    """Failed and cancelled differ only in name, so a diagram shows them as one."""
    return list({_name(state): state for state in states}.values())


def _name(state: State) -> str:
    outcome = "stopped" if state.outcome in _STOPPED else state.outcome.value
    return f"{outcome}_{state.exposure.value.replace(' ', '_')}"


def proofs() -> Iterator[str]:
    """What proves that a peer that does not answer touches our memory no more, lane by lane."""
    yield from ("| lane | what must hold |", "|---|---|")
    for lane, needed in NEEDED.items():
        conditions = sorted(needed, key=lambda condition: condition.value)
        yield f"| {lane} | {'; and '.join(_CONDITIONS[condition] for condition in conditions)} |"


REGIONS: Mapping[str, Callable[[], Iterator[str]]] = {"sessions": sessions, "proofs": proofs}

assert set(_CONDITIONS) == set(Condition)
assert {direction for direction, _ in TABLES} == set(Direction)
assert {side for _, side in TABLES} == set(Side)
