"""Random runs: many transfers in one world, with every fault at any time. A seed names a run."""

import contextlib
import logging
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from kvferry.transfer.types import Direction, Renewal, Role, TransferKey
from tests.simulation.control import Letter
from tests.simulation.engine import Prompt, Tally
from tests.simulation.failure import SimulationFailure
from tests.simulation.life import Life
from tests.simulation.settings import Settings
from tests.simulation.settling import finish
from tests.simulation.world import World

Thing = TypeVar("Thing")

MAX_TRIES = 60
"""How often a job asks for room before it is given up."""


@dataclass(frozen=True)
class Weather:
    """How often what happens, as weights of the steps; 0 is never.

    Attributes:
        stragglers: share of the letters that arrive although their channel is no more.
        replays: share of the transfers that say again the key of an earlier one.
        spared: share of the crashes that do not happen, because they would be a prefill worker's.
        num_open: transfers at once.
        in_order: letters to prefill workers arrive once and in order, as those of a real stream do.
        forgetful: transceivers remember one ended attempt. Safe only when `in_order`.
    """

    crash: float = 0.0
    stop: float = 0.0
    cut: float = 0.0
    snap: float = 0.0
    lose: float = 0.0
    repeat: float = 0.0
    fail: float = 0.0
    cancel: float = 0.0
    time: float = 4.0
    stragglers: float = 0.0
    replays: float = 0.0
    move: float = 14.0
    spared: float = 0.0
    num_open: int = 6
    in_order: bool = False
    forgetful: bool = False


CALM = Weather(cancel=0.2, in_order=True)
"""Cancels, and nothing else out of the ordinary."""
NOISY = Weather(lose=0.4, repeat=0.6, cancel=0.4, replays=0.2)
"""Letters are lost, said twice and out of order."""
STORMY = Weather(
    crash=0.12,
    stop=0.15,
    cut=0.2,
    snap=0.3,
    lose=0.3,
    repeat=0.5,
    fail=0.2,
    cancel=0.4,
    stragglers=0.3,
    replays=0.3,
)
"""Everything happens."""
SLOW = Weather(crash=0.3, stop=0.1, cancel=0.4, snap=0.3, replays=0.2, stragglers=0.3, move=2.0, time=8.0)
"""Bytes stay under way for long, and workers die meanwhile."""
FORGETFUL = Weather(cancel=1.0, repeat=2.0, snap=0.1, replays=0.7, in_order=True, forgetful=True)
"""As AGAIN, with transceivers that soon forget what ended: the fence of a grant is all that is left."""
AGAIN = Weather(cancel=1.0, repeat=4.0, snap=0.1, replays=0.7)
"""The same keys and the same letters again and again."""
REBORN = Weather(
    crash=2.0, repeat=0.5, stragglers=0.9, replays=0.8, spared=0.9, num_open=2, in_order=True, forgetful=True
)
"""Decode workers die, come back with the same slots and epochs, and ask for the same keys."""
WEATHERS = (CALM, NOISY, STORMY, STORMY, SLOW, AGAIN, FORGETFUL, REBORN)


@dataclass(eq=False)
class Job:
    """One transfer on its way through its callers: what is still to be done, in order, on either side."""

    prompt: Prompt
    senders: tuple[str, ...]
    receiver: str
    steps: list[list[tuple[str, str]]]
    tries: int = 0

    @property
    def key(self) -> TransferKey:
        return self.prompt.key


@dataclass
class Report:
    """What a run, or many, did."""

    transfers: int = 0
    steps: int = 0
    tally: Tally = field(default_factory=Tally)

    def add(self, other: "Report") -> None:
        self.transfers += other.transfers
        self.steps += other.steps
        for side in self.tally.done:
            self.tally.done[side] += other.tally.done[side]
            self.tally.failed[side] += other.tally.failed[side]
        for code, count in other.tally.codes.items():
            self.tally.codes[code] = self.tally.codes.get(code, 0) + count

    def __str__(self) -> str:
        done = ", ".join(f"{side.value} {count}" for side, count in self.tally.done.items())
        failed = ", ".join(f"{side.value} {count}" for side, count in self.tally.failed.items())
        return f"{self.transfers} transfers in {self.steps} steps; done: {done}; failed: {failed} {self.tally.codes}"


class RandomRun:
    """One world and the dice."""

    def __init__(self, seed: int, num_transfers: int, settings: Settings | None = None, weather: Weather | None = None):
        self.dice = random.Random(seed)
        self.weather = weather or self.dice.choice(WEATHERS)
        self.world = World(seed, settings or self._settings())
        self.num_transfers = num_transfers
        self.parties: dict[TransferKey, set[str]] = {}
        self.num_started = 0
        self.num_steps = 0
        self._jobs: list[Job] = []
        self._past: list[Job] = []
        steps: list[tuple[float, Callable[[], None]]] = [
            (14.0, self._deliver),
            (self.weather.move, self._move),
            (8.0, self._arrive),
            (10.0, self._turn),
            (6.0, self._poll),
            (8.0, self._job_step),
            (3.0, self._free),
            (2.0, self._tell_lost),
            (1.5, self._connect),
            (self.weather.time, self._pass_time),
            (self.weather.lose, self._lose),
            (self.weather.repeat, self._repeat),
            (self.weather.fail, self._fail),
            (self.weather.cancel, self._cancel),
            (self.weather.crash, self._crash),
            (self.weather.crash * 4, self._restart),
            (self.weather.stop, self._stop),
            (self.weather.stop * 3, self._go_on),
            (self.weather.cut, self._cut),
            (self.weather.cut * 2, self._heal),
            (self.weather.snap, self._snap),
        ]
        self._steps = [step for weight, step in steps if weight > 0]
        self._weights = [weight for weight, step in steps if weight > 0]
        self.world.say(f"{self.world.settings} {self.weather}")

    def run(self) -> Report:
        """All transfers, to their end. Raises SimulationFailure."""
        with quiet_logs(), telling(self.world):
            while self.num_started < self.num_transfers or self._jobs:
                for step in self.dice.choices(self._steps, self._weights, k=32):
                    step()
                self.num_steps += 32
                self._start_jobs()
            finish(self.world, self.parties)
        return Report(self.num_started, self.num_steps, self.world.tally)

    def _settings(self) -> Settings:
        dice = self.dice
        kind = dice.choice(("cma", "tcp"))
        groups = dice.choice((1, 2))
        num_workers = (1,) if self.weather.num_open < 3 else (1, 1, 2)
        return Settings(
            kind=kind,
            lagging=kind == "cma" and dice.random() < 0.5,
            lets_go=kind == "tcp" and dice.random() < 0.3,
            num_senders=dice.choice(num_workers),
            num_receivers=dice.choice(num_workers),
            num_slots=(dice.randint(6, 14),) * groups,
            slice_bytes=dice.choice((16, 32, 64)),
            pieces_per_run=dice.choice((1, 2)),
            max_remembered=1 if self.weather.forgetful else 4096,
        )

    # ---- jobs

    def _start_jobs(self) -> None:
        self._jobs = [job for job in self._jobs if any(job.steps)]
        while len(self._jobs) < self.weather.num_open and self.num_started < self.num_transfers:
            replay = self._past and self.dice.random() < self.weather.replays
            self._add(self._replay() if replay else self._new_job())

    def _add(self, job: Job) -> None:
        self.num_started += 1
        self._jobs.append(job)
        self._past.append(job)
        del self._past[:-8]
        self.parties.setdefault(job.key, set()).update((*job.senders, job.receiver))

    def _new_job(self) -> Job:
        dice, settings = self.dice, self.world.settings
        blocks = dice.randint(1, 3)
        early = dice.random() < 0.4
        prompt = Prompt(
            TransferKey(f"{self.num_started + 1:032x}", 1),
            blocks,
            skip_blocks=dice.choice((0, 0, 0, 1, blocks)),
            direction=dice.choice(tuple(Direction)),
            early=early,
            timeout_seconds=dice.choice((20.0, 60.0)),
            hold_seconds=dice.choice((None, 8.0, 15.0)),
        )
        fan_in = settings.num_senders > 1 and dice.random() < 0.2
        senders = tuple(f"p{index}" for index in range(2)) if fan_in else (f"p{dice.randrange(settings.num_senders)}",)
        return self._job(prompt, senders, f"d{dice.randrange(settings.num_receivers)}")

    def _replay(self) -> Job:
        """Callers say a key again: all of it, or one side only."""
        past = self._past[-1] if self.dice.random() < 0.5 else self.dice.choice(self._past)
        job = self._job(past.prompt, past.senders, past.receiver)
        if self.dice.random() < 0.3:
            job.steps = [[step for step in line if step[0] != "offer"] for line in job.steps]
        return job

    def _job(self, prompt: Prompt, senders: tuple[str, ...], receiver: str) -> Job:
        offers = [("offer", sender) for sender in senders]
        wants = [("request", receiver)]
        if self.dice.random() < 0.4:
            wants.insert(0, ("enlist", receiver))
        return Job(prompt, senders, receiver, [offers, wants] if prompt.early else [offers + wants])

    def _job_step(self) -> None:
        job = self._any(self._jobs)
        line = self._any([line for line in job.steps if line]) if job else None
        if job is None or line is None:
            return
        what, name = line[0]
        life = self.world.lives[name]
        if not life.running:
            self._give_up(job)
        elif self._do(job, what, life):
            line.pop(0)
        else:
            self._give_up(job)

    def _do(self, job: Job, what: str, life: Life) -> bool:
        senders = tuple(self.world.lives[name] for name in job.senders)
        if what == "offer":
            return self.world.offer(life, job.prompt)
        if what == "enlist":
            self.world.enlist(life, job.prompt, senders)
            return True
        return self.world.request(life, job.prompt, senders)

    def _give_up(self, job: Job) -> None:
        job.tries += 1
        if job.tries < MAX_TRIES:
            return
        job.steps = []
        for name in (*job.senders, job.receiver):
            if self.world.lives[name].running:
                self.world.cancel(self.world.lives[name], job.key, "no room")

    # ---- steps

    def _deliver(self) -> None:
        ready = [letter for letter in self.world.control.letters if self.world.can_deliver(letter)]
        if ready:
            letter = self._hasty(ready)
            if self._waits(letter):
                return
            if self._is_exact(letter):
                letter = next(each for each in ready if each.target == letter.target and each.source == letter.source)
            self.world.deliver(letter)
            self._maybe_look(self.world.lives[letter.target.name])

    def _waits(self, letter: Letter) -> bool:
        """What is out of place comes when it does most harm: when its key is asked for again."""
        if not (letter.straggler or letter.repeated) or isinstance(letter.message, Renewal):
            return False
        engine = self.world.lives[letter.target.name].engine
        wanted = engine.wanted.get(letter.message.key)
        asked = letter.message.key in engine.offered or (wanted is not None and wanted.pages is not None)
        return self.dice.random() < (0.3 if asked else 0.95)

    def _is_exact(self, letter: Letter) -> bool:
        """Whether this letter arrives once, and after those before it."""
        return self.weather.in_order and self.world.lives[letter.target.name].role is Role.PREFILL

    def _move(self) -> None:
        """Some steps of one post."""
        op = self._any(self.world.wire.ops)
        if op is not None:
            for _ in range(self.dice.choice((1, 1, 2, 8))):
                if not self.world.move(op):
                    break
            poster = self.world.lives_by_agent(op.poster)
            self._maybe_look(poster)

    def _arrive(self) -> None:
        arriving = self._any(self.world.wire.arriving)
        if arriving is not None:
            self.world.arrive(arriving)

    def _turn(self) -> None:
        life = self._life()
        if life is not None:
            self.world.turn(life)

    def _poll(self) -> None:
        life = self._life()
        if life is not None:
            self.world.poll(life)

    def _free(self) -> None:
        life = self._life()
        key = self._any(list(life.engine.reading)) if life is not None else None
        if life is not None and key is not None:
            self.world.free(life, key)

    def _tell_lost(self) -> None:
        lost = self._any(self.world.can_tell_lost())
        if lost is not None:
            self.world.tell_lost(*lost)

    def _connect(self) -> None:
        pair = self._any([pair for pair in self.world.pairs() if self.world.can_connect(*pair)])
        if pair is not None:
            self.world.connect(*pair)

    def _pass_time(self) -> None:
        self.world.pass_time(self.dice.choice((0.01, 0.1, 0.1, 0.5, 0.5, 1.0, 4.0)))

    def _lose(self) -> None:
        letter = self._any(self.world.control.letters)
        if letter is not None and not self._is_exact(letter):
            self.world.lose(letter)

    def _repeat(self) -> None:
        letter = self._any(self.world.control.letters)
        if letter is not None and not self._is_exact(letter) and len(self.world.control.letters) < 64:
            self.world.repeat(letter)

    def _fail(self) -> None:
        op = self._any(self.world.wire.ops)
        if op is not None and self.world.can_fail(op):
            self.world.fail_op(op, "the lane broke")

    def _cancel(self) -> None:
        job, life = self._any(self._jobs + self._past), self._life()
        if job is not None and life is not None:
            self.world.cancel(life, job.key, "somebody wanted it")

    def _crash(self) -> None:
        life = self._life()
        if life is not None and not (life.role is Role.PREFILL and self.dice.random() < self.weather.spared):
            self.world.crash(life, keep=self._straggles)

    def _restart(self) -> None:
        life = self._any([life for life in self.world.lives.values() if not life.alive])
        if life is not None:
            self.world.restart(life)
            self._say_again(life.worker.name)

    def _say_again(self, name: str) -> None:
        """Callers of a worker that was away try again what they asked for last."""
        past = next((job for job in reversed(self._past) if name in (job.receiver, *job.senders)), None)
        if past is not None and self.dice.random() < self.weather.replays:
            for pair in self.world.pairs():
                if self.world.can_connect(*pair):
                    self.world.connect(*pair)
            self._add(self._job(past.prompt, past.senders, past.receiver))

    def _stop(self) -> None:
        life = self._life()
        if life is not None:
            self.world.stop(life)

    def _go_on(self) -> None:
        life = self._any([life for life in self.world.lives.values() if life.alive and not life.running])
        if life is not None:
            self.world.go_on(life)

    def _cut(self) -> None:
        one, other = (life.worker.name for life in self.dice.choice(self.world.pairs()))
        for source, target in ((one, other), (other, one)):
            if self.dice.random() < 0.7:
                self.world.cut(source, target)

    def _heal(self) -> None:
        self.world.heal()

    def _snap(self) -> None:
        channel = self._any([channel for channel in self.world.control.channels if channel.open])
        if channel is not None:
            letters = [letter for letter in self.world.control.letters if letter.channel is channel]
            kept = tuple(letter for letter in letters if self._straggles(letter))
            self.world.break_channel(channel, "the connection was reset", keep=kept)

    # ---- dice

    def _straggles(self, letter: Letter) -> bool:
        return not self._is_exact(letter) and self.dice.random() < self.weather.stragglers

    def _life(self) -> Life | None:
        return self._any([life for life in self.world.lives.values() if life.running])

    def _maybe_look(self, life: Life) -> None:
        if life.running and self.dice.random() < 0.5:
            self.world.turn(life)
            self.world.poll(life)

    def _any(self, things: Sequence[Thing]) -> Thing | None:
        return things[int(self.dice.random() * len(things))] if things else None

    def _hasty(self, things: Sequence[Thing]) -> Thing:
        """The oldest ones more often."""
        return things[min(int(self.dice.expovariate(0.7)), len(things) - 1)]


@contextlib.contextmanager
def quiet_logs() -> Iterator[None]:
    """The real code tells of every fault, and here there are many."""
    logger = logging.getLogger("kvferry")
    before, logger.disabled = logger.level, False
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextlib.contextmanager
def telling(world: World) -> Iterator[None]:
    """Any error of the real code ends a run with its transcript, as a broken promise does."""
    try:
        yield
    except SimulationFailure:
        raise
    except Exception as error:
        raise SimulationFailure(world.seed, f"{type(error).__name__}: {error}", world.transcript) from error


def run_many(seeds: range, transfers_per_world: int) -> Report:
    """One world per seed. Raises SimulationFailure at the first broken promise."""
    report = Report()
    for seed in seeds:
        report.add(RandomRun(seed, transfers_per_world).run())
    return report
