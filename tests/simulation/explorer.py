"""Every way one transfer can go, with faults at every point: a search over copies of a world."""

from collections.abc import Iterator
from dataclasses import dataclass

from tests.simulation.control import Letter
from tests.simulation.copying import Digester, clone
from tests.simulation.engine import Prompt
from tests.simulation.randomly import quiet_logs, telling
from tests.simulation.settings import Settings
from tests.simulation.settling import finish, is_over, look_around
from tests.simulation.world import World

LATE_SECONDS = 11.0
"""Longer than a lease."""
MAX_ROUNDS = 6

IGNORED = frozenset(
    {
        "transcript",
        "tally",
        "number",
        "started_at",
        "_next_letter",
        "_next_op",
        "_next_hold",
        "_still_turns",
        "seed",
        "settings",
        "_settings",
        "info",
        "_local",
        "rows",
        "own_runs",
        "lane",
        "_transport",
        "_bases",
        "prompt",
        "say",
        "broken",
        "on_free",
        "_say",
        "_broken",
        "_tally",
    }
)
"""Attributes that change nothing of what can happen, or are the same in every copy of a world."""

FAULTS = ("crash", "lose", "repeat", "late", "cancel")
"""Kinds of faults; each may happen once."""

Step = tuple[str, int]
"""What happens, and to which one."""


@dataclass
class Found:
    """What an exploration saw.

    Attributes:
        ends: states in which nothing more can happen, all of them good.
    """

    states: int = 0
    transitions: int = 0
    ends: int = 0

    def __str__(self) -> str:
        return f"{self.states} states, {self.transitions} transitions, {self.ends} ends"


class Scene:
    """A world with one transfer, what its callers still have to do, and the faults that happened."""

    def __init__(self, prompt: Prompt, settings: Settings) -> None:
        self.prompt = prompt
        self.world = World(f"{prompt.direction.value}{', early' if prompt.early else ''}", settings)
        self.offers = True
        self.requests = True
        self.faults: tuple[str, ...] = ()
        self.late: list[Letter] = []

    def digest(self) -> int:
        return Digester(self.world.clock, IGNORED).digest(self)

    # ---- what can happen

    def steps(self) -> Iterator[Step]:
        """What happens without a fault; time passes only when nothing else does."""
        found = [*self._caller_steps(), *self._control_steps(), *self._lane_steps()]
        yield from found
        if not found:
            yield ("tick", 0)

    def fault_steps(self, bound: int) -> Iterator[Step]:
        if len(self.faults) >= bound:
            return
        for kind in FAULTS:
            if kind not in self.faults:
                yield from self._faults_of(kind)

    def _caller_steps(self) -> Iterator[Step]:
        sender, receiver = self.world.lives.values()
        if self.offers and sender.running:
            yield ("offer", 0)
        if self.requests and receiver.running and (self.prompt.early or not self.offers):
            yield ("request", 0)

    def _control_steps(self) -> Iterator[Step]:
        world, seen = self.world, set()
        for index, letter in enumerate(world.control.letters):
            way = (letter.source, letter.target)
            if letter in self.late or way not in seen:
                if letter not in self.late:
                    seen.add(way)
                if world.can_deliver(letter):
                    yield ("deliver", index)
        yield from (("tell", index) for index in range(len(world.can_tell_lost())))
        yield from (("restart", index) for index, life in enumerate(world.lives.values()) if not life.alive)
        yield from (("connect", index) for index, pair in enumerate(world.pairs()) if world.can_connect(*pair))

    def _lane_steps(self) -> Iterator[Step]:
        world = self.world
        yield from (("move", index) for index, op in enumerate(world.wire.ops) if world.can_move(op))
        yield from (
            ("arrive", index)
            for index, arriving in enumerate(world.wire.arriving)
            if world.lives_by_agent(arriving.target).running
        )

    def _faults_of(self, kind: str) -> Iterator[Step]:
        lives, letters = list(self.world.lives.values()), self.world.control.letters
        if kind == "crash":
            yield from (("crash", index) for index, life in enumerate(lives) if life.running)
        elif kind == "cancel":
            yield from (("cancel", index) for index, life in enumerate(lives) if life.running)
        elif kind == "late":
            yield ("wait", 0)
            yield from (("late", index) for index in range(len(letters)))
        else:
            yield from ((kind, index) for index in range(len(letters)))

    # ---- making it happen

    def do(self, step: Step) -> None:
        """One step, and what the workers do about it. Raises SimulationFailure."""
        what, index = step
        if what in FAULTS:
            self.faults = (*self.faults, what)
        elif what == "wait":
            self.faults = (*self.faults, "late")
        with telling(self.world):
            getattr(self, f"_do_{what}")(index)
            for _ in range(MAX_ROUNDS):
                if not look_around(self.world):
                    break
        self.late = [letter for letter in self.late if letter in self.world.control.letters]
        # Only the order of letters of one way matters.
        self.world.control.letters.sort(key=lambda letter: (letter.source.name, letter.target.name))

    def _do_offer(self, index: int) -> None:
        self.offers = False
        self.world.offer(self.world.lives["p0"], self.prompt)

    def _do_request(self, index: int) -> None:
        self.requests = False
        self.world.request(self.world.lives["d0"], self.prompt, (self.world.lives["p0"],))

    def _do_deliver(self, index: int) -> None:
        self.world.deliver(self.world.control.letters[index])

    def _do_tell(self, index: int) -> None:
        self.world.tell_lost(*self.world.can_tell_lost()[index])

    def _do_restart(self, index: int) -> None:
        self.world.restart(list(self.world.lives.values())[index])

    def _do_connect(self, index: int) -> None:
        self.world.connect(*self.world.pairs()[index])

    def _do_move(self, index: int) -> None:
        self.world.move(self.world.wire.ops[index])

    def _do_arrive(self, index: int) -> None:
        self.world.arrive(self.world.wire.arriving[index])

    def _do_tick(self, index: int) -> None:
        self.world.pass_time(LATE_SECONDS)

    def _do_wait(self, index: int) -> None:
        self.world.say("everybody is late")
        self.world.pass_time(LATE_SECONDS)

    def _do_late(self, index: int) -> None:
        letter = self.world.control.letters[index]
        self.world.say(f"{letter} is late")
        letter.straggler = True
        self.late.append(letter)

    def _do_crash(self, index: int) -> None:
        self.world.crash(list(self.world.lives.values())[index])

    def _do_lose(self, index: int) -> None:
        self.world.lose(self.world.control.letters[index])

    def _do_repeat(self, index: int) -> None:
        self.world.repeat(self.world.control.letters[index])

    def _do_cancel(self, index: int) -> None:
        life = list(self.world.lives.values())[index]
        self.world.cancel(life, self.prompt.key, "somebody wanted it")


class Explorer:
    """Depth first over all scenes, each once.

    Args:
        bound: most faults in one run.
    """

    def __init__(self, prompt: Prompt, settings: Settings, bound: int) -> None:
        self._bound = bound
        self._start = Scene(prompt, settings)
        self._parties = {prompt.key: {"p0", "d0"}}
        self._seen: set[int] = set()
        self.found = Found()

    def run(self) -> Found:
        """Raises SimulationFailure with the transcript of a run that breaks a promise."""
        with quiet_logs():
            open_scenes = [self._start]
            self._seen.add(self._start.digest())
            while open_scenes:
                scene = open_scenes.pop()
                self.found.states += 1
                open_scenes += self._successors(scene)
        return self.found

    def _successors(self, scene: Scene) -> list[Scene]:
        fresh: list[Scene] = []
        steps = [*scene.steps(), *scene.fault_steps(self._bound)]
        if is_over(scene.world) and not scene.offers and not scene.requests and not scene.world.control.letters:
            self.found.ends += 1
            return fresh
        for number, step in enumerate(steps):
            following = scene if number == len(steps) - 1 else clone(scene)
            before = scene.digest() if step[0] == "tick" else 0
            following.do(step)
            self.found.transitions += 1
            digest = following.digest()
            if digest == before:
                self._check_end(following)
            elif digest not in self._seen:
                self._seen.add(digest)
                fresh.append(following)
        return fresh

    def _check_end(self, scene: Scene) -> None:
        """Nothing more happens, and not all is over: what is left must be so for want of proof."""
        self.found.ends += 1
        finish(scene.world, self._parties)
