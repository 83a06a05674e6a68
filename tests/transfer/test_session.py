"""Every (state, event) pair of the four tables, and what must hold of the tables as a whole."""

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
    State,
    may_reuse,
)
from kvferry.transfer.types import Direction, Side

ALL_STATES = [State(outcome, exposure) for outcome, exposure in itertools.product(Outcome, Exposure)]
KINDS = list(TABLES)
PAIRS = [(kind, state, event) for kind in KINDS for state in TABLES[kind] for event in Event]

Kind = tuple[Direction, Side]


def name(value: object) -> str:
    return " ".join(part.value for part in value) if isinstance(value, tuple) else str(value)


def session_in(kind: Kind, state: State) -> Session:
    direction, side = kind
    session = Session(side, direction)
    session.state = state
    return session


@pytest.mark.parametrize("kind, state, event", PAIRS, ids=name)
def test_event_moves_as_the_table_says_or_raises_and_changes_nothing(kind: Kind, state: State, event: Event) -> None:
    session = session_in(kind, state)
    transition = TABLES[kind][state].get(event)
    assert session.allows(event) == (transition is not None)
    if transition is None:
        with pytest.raises(LocalProtocolError, match=event.name):
            session.apply(event)
        assert session.state == state
    else:
        assert session.apply(event) == transition.actions
        assert session.state == transition.state


@pytest.mark.parametrize("kind", KINDS, ids=name)
def test_every_state_is_reachable_and_every_reached_state_has_a_row(kind: Kind) -> None:
    reached, frontier = {INITIAL}, [INITIAL]
    while frontier:
        for transition in TABLES[kind][frontier.pop()].values():
            if transition.state not in reached:
                reached.add(transition.state)
                frontier.append(transition.state)
    assert reached == set(TABLES[kind])


@pytest.mark.parametrize("kind", KINDS, ids=name)
def test_terminal_outcome_is_sticky(kind: Kind) -> None:
    for state, row in TABLES[kind].items():
        if state.outcome.terminal:
            assert {transition.state.outcome for transition in row.values()} == {state.outcome}


@pytest.mark.parametrize("kind", KINDS, ids=name)
def test_exposure_ends_only_by_proof(kind: Kind) -> None:
    proofs = {Event.SETTLE, Event.LANDED, Event.MOVED}
    for state, row in TABLES[kind].items():
        for event, transition in row.items():
            if state.exposure in (Exposure.EXPOSED, Exposure.IN_DOUBT) and transition.state.exposure is Exposure.QUIET:
                assert event in proofs


@pytest.mark.parametrize("kind", KINDS, ids=name)
def test_doubt_ends_only_in_quiet_and_exposure_never_turns_private(kind: Kind) -> None:
    for state, row in TABLES[kind].items():
        following = {transition.state.exposure for transition in row.values()}
        if state.exposure is Exposure.IN_DOUBT:
            assert following == {Exposure.IN_DOUBT, Exposure.QUIET}
        if state.exposure is not Exposure.PRIVATE:
            assert Exposure.PRIVATE not in following


@pytest.mark.parametrize("kind", KINDS, ids=name)
def test_pages_once_reusable_stay_reusable(kind: Kind) -> None:
    for state, row in TABLES[kind].items():
        if may_reuse(state):
            assert all(transition.state == state for transition in row.values())


@pytest.mark.parametrize("kind", KINDS, ids=name)
def test_done_is_never_in_doubt_and_a_receiver_is_done_only_with_its_data(kind: Kind) -> None:
    for state, row in TABLES[kind].items():
        if state.outcome is Outcome.DONE:
            assert state.exposure in (Exposure.PRIVATE, Exposure.QUIET)
        for event, transition in row.items():
            if (
                kind[1] is Side.RECEIVER
                and transition.state.outcome is Outcome.DONE
                and state.outcome is not Outcome.DONE
            ):
                assert state.exposure is Exposure.QUIET or event in (Event.LANDED, Event.MOVED)


@pytest.mark.parametrize("kind", KINDS, ids=name)
def test_every_unfinished_state_can_fail_and_be_cancelled(kind: Kind) -> None:
    for state, row in TABLES[kind].items():
        assert {Event.FAIL, Event.CANCEL} <= set(row), state


@pytest.mark.parametrize("kind", KINDS, ids=name)
def test_engine_hears_the_outcome_exactly_once_on_every_path(kind: Kind) -> None:
    def walk(state: State, reports: int, path: tuple[State, ...]) -> None:
        if may_reuse(state) or state.exposure is Exposure.IN_DOUBT:
            assert reports == 1, path
        for transition in TABLES[kind][state].values():
            if transition.state not in (state, *path):
                walk(transition.state, reports + transition.actions.count(Action.REPORT), (*path, state))

    walk(INITIAL, 0, ())


@pytest.mark.parametrize("kind", KINDS, ids=name)
def test_other_side_is_told_of_every_end_without_success(kind: Kind) -> None:
    told = Action.SEND_RESULT if kind[1] is Side.SENDER else Action.SEND_CANCEL

    def walk(state: State, messages: int, path: tuple[State, ...]) -> None:
        if state.outcome in (Outcome.FAILED, Outcome.CANCELLED) and state.exposure is not Exposure.EXPOSED:
            assert messages >= 1, path
        for transition in TABLES[kind][state].values():
            if transition.state not in (state, *path):
                walk(transition.state, messages + transition.actions.count(told), (*path, state))

    walk(INITIAL, 0, ())


@pytest.mark.parametrize("side", Side)
def test_direction_makes_no_difference_before_the_grant(side: Side) -> None:
    for state in (State(Outcome.NEW, Exposure.PRIVATE), State(Outcome.OFFERED, Exposure.PRIVATE)):
        push, pull = (TABLES[direction, side].get(state, {}) for direction in Direction)
        assert set(push) == set(pull)
        assert {push[event] for event in push if event is not Event.GRANT} == {
            pull[event] for event in pull if event is not Event.GRANT
        }


@pytest.mark.parametrize("state", ALL_STATES, ids=str)
def test_may_reuse_needs_an_end_and_no_exposure(state: State) -> None:
    ended = state.outcome in (Outcome.DONE, Outcome.FAILED, Outcome.CANCELLED)
    untouched = state.exposure in (Exposure.PRIVATE, Exposure.QUIET)
    assert may_reuse(state) == (ended and untouched)


@pytest.mark.parametrize("one, other", list(itertools.product(ALL_STATES[-8:], repeat=2)), ids=str)
def test_grant_is_reusable_only_when_the_session_with_every_rank_is(one: State, other: State) -> None:
    assert may_reuse(one, other) == (may_reuse(one) and may_reuse(other))
