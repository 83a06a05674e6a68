"""Every (state, event) pair of both tables, and what must hold of the tables as a whole."""

import itertools

import pytest

from kvferry.cache.errors import LocalProtocolError
from kvferry.transfer.session import (
    INITIAL,
    TABLES,
    Action,
    Event,
    Exposure,
    Outcome,
    Session,
    Side,
    State,
    may_reuse,
)

ALL_STATES = [State(outcome, exposure) for outcome, exposure in itertools.product(Outcome, Exposure)]
PAIRS = [(side, state, event) for side in Side for state in TABLES[side] for event in Event]


def session_in(side: Side, state: State) -> Session:
    session = Session(side)
    session.state = state
    return session


@pytest.mark.parametrize("side, state, event", PAIRS, ids=str)
def test_event_moves_as_the_table_says_or_raises_and_changes_nothing(side: Side, state: State, event: Event) -> None:
    session = session_in(side, state)
    transition = TABLES[side][state].get(event)
    assert session.allows(event) == (transition is not None)
    if transition is None:
        with pytest.raises(LocalProtocolError, match=event.name):
            session.apply(event)
        assert session.state == state
    else:
        assert session.apply(event) == transition.actions
        assert session.state == transition.state


@pytest.mark.parametrize("side", Side)
def test_every_state_is_reachable_and_every_reached_state_has_a_row(side: Side) -> None:
    reached, frontier = {INITIAL}, [INITIAL]
    while frontier:
        for transition in TABLES[side][frontier.pop()].values():
            if transition.state not in reached:
                reached.add(transition.state)
                frontier.append(transition.state)
    assert reached == set(TABLES[side])


@pytest.mark.parametrize("side", Side)
def test_terminal_outcome_is_sticky(side: Side) -> None:
    for state, row in TABLES[side].items():
        if state.outcome.terminal:
            assert {transition.state.outcome for transition in row.values()} == {state.outcome}


@pytest.mark.parametrize("side", Side)
def test_exposure_ends_only_by_proof(side: Side) -> None:
    proofs = {Event.SETTLE, Event.LANDED, Event.WRITTEN}
    for state, row in TABLES[side].items():
        for event, transition in row.items():
            if state.exposure in (Exposure.EXPOSED, Exposure.IN_DOUBT) and transition.state.exposure is Exposure.QUIET:
                assert event in proofs


@pytest.mark.parametrize("side", Side)
def test_pages_once_reusable_stay_reusable(side: Side) -> None:
    for state, row in TABLES[side].items():
        if may_reuse(state):
            assert all(transition.state == state for transition in row.values())


@pytest.mark.parametrize("side", Side)
def test_receiver_done_and_sender_done_are_never_in_doubt(side: Side) -> None:
    for state in TABLES[side]:
        if state.outcome is Outcome.DONE:
            assert state.exposure in (Exposure.PRIVATE, Exposure.QUIET)
            assert side is Side.SENDER or state.exposure is Exposure.QUIET


@pytest.mark.parametrize("side", Side)
def test_every_unfinished_state_can_fail_and_be_cancelled(side: Side) -> None:
    for state, row in TABLES[side].items():
        assert {Event.FAIL, Event.CANCEL} <= set(row), state


@pytest.mark.parametrize("side", Side)
def test_engine_hears_the_outcome_exactly_once_on_every_path(side: Side) -> None:
    def walk(state: State, reports: int, path: tuple[State, ...]) -> None:
        if may_reuse(state) or state.exposure is Exposure.IN_DOUBT:
            assert reports == 1, path
        for transition in TABLES[side][state].values():
            if transition.state not in (state, *path):
                walk(transition.state, reports + transition.actions.count(Action.REPORT), (*path, state))

    walk(INITIAL, 0, ())


@pytest.mark.parametrize("state", ALL_STATES, ids=str)
def test_may_reuse_needs_an_end_and_no_exposure(state: State) -> None:
    ended = state.outcome in (Outcome.DONE, Outcome.FAILED, Outcome.CANCELLED)
    untouched = state.exposure in (Exposure.PRIVATE, Exposure.QUIET)
    assert may_reuse(state) == (ended and untouched)
