"""Random lives of sequences on random models and tiny pools, against a naive model that keeps every token."""

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.cache.manager_machine import ManagerMachine

STEPS_OF_A_LIFE = 50


def check_lives(steps: int) -> None:
    """Contents are always equal, books always add up, and what fails changes nothing."""
    lives = settings(
        max_examples=steps // STEPS_OF_A_LIFE, stateful_step_count=STEPS_OF_A_LIFE, deadline=None, print_blob=True
    )
    run_state_machine_as_test(ManagerMachine, settings=lives)


def test_manager_after_5_000_random_steps_has_every_token() -> None:
    check_lives(5_000)


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_manager_after_100_000_random_steps_has_every_token() -> None:
    check_lives(100_000)
