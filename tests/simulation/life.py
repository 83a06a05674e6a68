"""One life of a simulated worker: a real transceiver over a simulated lane, pool and engine."""

from collections.abc import Callable
from typing import Any, Protocol

from kvferry.transfer.transceiver import Transceiver, TransceiverSettings
from kvferry.transfer.types import Message, Role, WorkerId
from tests.simulation.engine import Engine, Tally
from tests.simulation.lane import SimLane
from tests.simulation.pool import SimPool, as_manager
from tests.simulation.reactor import InlineReactor
from tests.simulation.settings import Settings
from tests.simulation.wire import Run


class Surroundings(Protocol):
    """What a life needs of its world."""

    settings: Settings
    tally: Tally

    def say(self, line: str) -> None: ...
    def broken(self, what: str) -> None: ...
    def now(self) -> float: ...
    def send(self, source: WorkerId, target: WorkerId, message: Message) -> bool: ...
    def hang_up(self, source: WorkerId, target: WorkerId, reason: str) -> None: ...
    def note_free(self, agent: str, group: int, slot: int) -> None: ...


class Life:
    """One process. Its memory, engine and transceiver are gone when it dies; a later life of the name has others.

    Attributes:
        agent: names this life on the wire; the addresses are those of every life of the name.
    """

    def __init__(self, worker: WorkerId, role: Role, base: int, world: Surroundings, make_lane: "MakeLane") -> None:
        self.worker = worker
        self.role = role
        self.agent = str(worker)
        self.run = Run.RUNNING
        self.pool = SimPool(
            base, world.settings.num_slots, lambda group, slot: world.note_free(self.agent, group, slot)
        )
        self.lane = make_lane(self.agent, base)
        self.transceiver = Transceiver(
            worker,
            role,
            as_manager(self.pool),
            self.lane,
            model_digest="d",
            send=lambda target, message: world.send(worker, target, message),
            hang_up=lambda target, reason: world.hang_up(worker, target, reason),
            settings=TransceiverSettings(
                slice_bytes=world.settings.slice_bytes,
                lease_seconds=world.settings.lease_seconds,
                max_remembered=world.settings.max_remembered,
            ),
            clock=world.now,
            make_reactor=self._make_reactor,
        )
        self.engine = Engine(self.agent, self.transceiver, self.pool, world.say, world.broken, world.tally)

    def _make_reactor(self, transport: Any, handler: Any, clock: Callable[[], float]) -> Any:
        self.reactor = InlineReactor(transport, handler, clock)
        return self.reactor

    @property
    def running(self) -> bool:
        return self.run is Run.RUNNING

    @property
    def alive(self) -> bool:
        return self.run is not Run.DEAD

    def __str__(self) -> str:
        return self.agent


MakeLane = Callable[[str, int], SimLane]
