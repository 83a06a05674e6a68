"""All interleavings of one transfer, with faults at every point."""

import gc
from collections.abc import Callable, Iterator

import pytest

from kvferry.transfer.types import Direction, TransferKey
from tests.simulation.copying import clone
from tests.simulation.engine import Prompt
from tests.simulation.explorer import Explorer, Scene
from tests.simulation.settings import Settings
from tests.simulation.settling import settle

KEY = TransferKey(f"{1:032x}", 1)
SCHEDULES = {"context_first": False, "generation_first": True}
LONG = pytest.param("tcp", 3, marks=[pytest.mark.full, pytest.mark.timeout(1200)])
FAULTS_TOGETHER = 2
"""The largest bound that lets all four explorations over tcp end within 90 seconds of CPU time."""


@pytest.fixture(autouse=True)
def rare_garbage_collection() -> Iterator[None]:
    """Thousands of worlds are alive at a time, and looking through them all often takes longer than the search."""
    before = gc.get_threshold()
    gc.set_threshold(50_000, 20, 100)
    yield
    gc.set_threshold(*before)


def prompt(direction: Direction, schedule: str) -> Prompt:
    return Prompt(KEY, 1, direction=direction, early=SCHEDULES[schedule], timeout_seconds=30.0)


def settings(kind: str) -> Settings:
    return Settings(kind=kind, num_slots=(3,))


@pytest.mark.parametrize("schedule", list(SCHEDULES))
@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("kind, bound", [("tcp", FAULTS_TOGETHER), ("cma", 1), LONG])
def test_every_interleaving_keeps_every_promise(
    kind: str, bound: int, direction: Direction, schedule: str, record_property: Callable[[str, object], None]
) -> None:
    found = Explorer(prompt(direction, schedule), settings(kind), bound).run()

    print(f"{kind}, {direction.value}, {schedule}, up to {bound} faults: {found}")
    record_property("explored", str(found))
    assert found.states > 300
    assert found.ends > 30


@pytest.mark.parametrize("direction", list(Direction))
def test_copied_world_goes_its_own_way(direction: Direction) -> None:
    scene = Scene(prompt(direction, "context_first"), settings("tcp"))
    for step in (("offer", 0), ("request", 0), ("deliver", 0)):
        scene.do(step)
    before, lines = scene.digest(), len(scene.world.transcript)

    copied = clone(scene)
    assert copied.digest() == before
    settle(copied.world)

    assert copied.world.lives["d0"].pool.all_free
    assert scene.digest() == before
    assert len(scene.world.transcript) == lines
    settle(scene.world)
    assert scene.world.transcript == copied.world.transcript
