"""A world of simulated workers in which nothing happens but by a step, and in which nobody looks away.

The steps are the methods of `World`. What the real code must never do is checked where the bytes are: when a page
becomes free, when a byte leaves or lands, when an attempt is done.
"""

from collections.abc import Callable

from kvferry.cache.errors import KVError
from kvferry.transfer.transport.base import PostState, Quiescence
from kvferry.transfer.transport.quiescence import Condition, Fact, judge
from kvferry.transfer.types import (
    Cancel,
    Grant,
    Message,
    Permit,
    Renewal,
    Role,
    TransferKey,
    TransferResult,
    WorkerId,
)
from tests.simulation.content import SLOT_BYTES
from tests.simulation.control import Channel, ControlPlane, Letter, short
from tests.simulation.engine import Prompt, Tally
from tests.simulation.failure import SimulationFailure
from tests.simulation.lane import SimLane
from tests.simulation.life import Life
from tests.simulation.settings import Settings
from tests.simulation.wire import Arriving, Op, Piece, Run, Wire

START_SECONDS = 1_000_000.0
"""Where the clock starts: any float above half of it is a moment, any other a duration."""


class World:
    """Some workers, the wire and the control plane between them, and a clock.

    Attributes:
        lives: the latest life of each name.
        failure: the first broken promise.
    """

    def __init__(self, seed: object, settings: Settings) -> None:
        self.seed = seed
        self.settings = settings
        self.clock = START_SECONDS
        self.transcript: list[str] = []
        self.tally = Tally()
        self.wire = Wire(settings.kind, lagging=settings.lagging, lets_go=settings.lets_go)
        self.control = ControlPlane()
        self.lives: dict[str, Life] = {}
        self.failure: SimulationFailure | None = None
        self._bases: dict[str, int] = {}
        self._incarnations: dict[str, int] = {}
        for name, role in self.names:
            self._start(name, role)
        for pair in self.pairs():
            self.connect(*pair)

    @property
    def names(self) -> list[tuple[str, Role]]:
        senders = [(f"p{index}", Role.PREFILL) for index in range(self.settings.num_senders)]
        return senders + [(f"d{index}", Role.DECODE) for index in range(self.settings.num_receivers)]

    def pairs(self) -> list[tuple[Life, Life]]:
        senders = [life for life in self.lives.values() if life.role is Role.PREFILL]
        receivers = [life for life in self.lives.values() if life.role is Role.DECODE]
        return [(sender, receiver) for sender in senders for receiver in receivers]

    # ---- what lives see of the world

    def say(self, line: str) -> None:
        self.transcript.append(f"{self.clock - START_SECONDS:9.2f}  {line}")

    def broken(self, what: str) -> None:
        """Raise SimulationFailure; the first one stays."""
        self.failure = self.failure or SimulationFailure(self.seed, what, self.transcript)
        raise self.failure

    def now(self) -> float:
        return self.clock

    def send(self, source: WorkerId, target: WorkerId, message: Message) -> bool:
        return self.control.send(source, target, message) is not None

    def hang_up(self, source: WorkerId, target: WorkerId, reason: str) -> None:
        channel = self.control.find(source, target)
        if channel is not None and channel.open:
            self.say(f"{source} hangs up on {target}")
            self.control.break_channel(channel, f"hung up: {reason}")

    def note_free(self, agent: str, group: int, slot: int) -> None:
        """A page becomes free, so it may be handed out at once: nothing may still touch it."""
        op = self.wire.touching(agent, group, slot)
        if op is not None:
            self.broken(f"{agent} frees slot {slot} of group {group} while {op} for {short(op.notice.key)} touches it")
        self.wire.overwritten(agent, group, slot)

    def prove(self, peer: str, agent: str) -> Quiescence:
        gone = self.wire.processes[peer].run is Run.DEAD
        drained = self.wire.drained(peer, agent)
        facts = {
            Condition.WRITER_GONE: Fact(gone, f"{peer} is {'gone' if gone else 'alive'}"),
            Condition.STREAMS_DRAINED: Fact(drained, f"its lane is {'' if drained else 'not '}drained"),
        }
        return judge(self.settings.kind, (self.settings.kind,), facts)

    # ---- control plane

    def deliver(self, letter: Letter) -> None:
        self.say(f"deliver {letter}{' (straggler)' if letter.straggler else ''}")
        self.control.letters.remove(letter)
        target = self.lives[letter.target.name].transceiver
        message = letter.message
        if isinstance(message, Grant):
            target.on_grant(letter.source, message)
        elif isinstance(message, Permit):
            target.on_permit(letter.source, message)
        elif isinstance(message, TransferResult):
            target.on_result(letter.source, message)
        elif isinstance(message, Cancel):
            target.on_cancel(letter.source, message)
        elif isinstance(message, Renewal):
            target.on_renewal(letter.source, message)

    def can_deliver(self, letter: Letter) -> bool:
        return self.lives[letter.target.name].running and self.control.passes(letter)

    def lose(self, letter: Letter) -> None:
        self.say(f"lose {letter}")
        self.control.letters.remove(letter)

    def repeat(self, letter: Letter) -> None:
        self.say(f"repeat {letter} as {self.control.repeat(letter).number}")

    def break_channel(self, channel: Channel, reason: str, *, keep: tuple[Letter, ...] = ()) -> None:
        self.say(f"break channel {channel.ends[0]} {channel.ends[1]}: {reason}, {len(keep)} stragglers")
        self.control.break_channel(channel, reason, keep=keep)

    def can_tell_lost(self) -> list[tuple[Channel, WorkerId]]:
        return [(c, end) for c, end in self.control.untold() if self._is_current(end) and self.lives[end.name].running]

    def tell_lost(self, channel: Channel, worker: WorkerId) -> None:
        self.say(f"{worker} hears that its channel to {channel.other(worker)} is lost")
        channel.up.discard(worker)
        self.control.forget_over(channel)
        self.lives[worker.name].transceiver.on_channel_lost(channel.other(worker), channel.reason)

    def can_connect(self, sender: Life, receiver: Life) -> bool:
        names = (sender.worker.name, receiver.worker.name)
        cut = {names, names[::-1]} & self.control.cut
        return sender.running and receiver.running and not cut and self.control.open_between(*names) is None

    def connect(self, sender: Life, receiver: Life) -> None:
        """The receiver dials; either end hears of losses of earlier channels first."""
        ends = {sender.worker.name, receiver.worker.name}
        for channel, end in self.can_tell_lost():
            if {worker.name for worker in channel.ends} == ends:
                self.tell_lost(channel, end)
        self.say(f"connect {receiver} to {sender}")
        for one, other in ((sender, receiver), (receiver, sender)):
            try:
                one.transceiver.pair(other.transceiver.info).result(0)
            except KVError as error:
                self.broken(f"{one} cannot pair with {other}: {error}")
        channel = Channel((sender.worker, receiver.worker), {sender.worker, receiver.worker})
        self.control.channels.append(channel)
        sender.transceiver.on_channel_up(receiver.worker)
        receiver.transceiver.on_channel_up(sender.worker)

    def cut(self, source: str, target: str) -> None:
        self.say(f"cut {source}>{target}")
        self.control.cut.add((source, target))

    def heal(self) -> None:
        if self.control.cut:
            self.say("heal all")
            self.control.cut.clear()

    # ---- lanes

    def take(self, op: Op) -> None:
        piece = op.pieces[op.num_taken]
        self.say(f"take {op}")
        self._check_source(op, piece)
        if self.wire.kind == "cma":
            self._check_target(op, piece)
        self.wire.take(op)

    def land(self, op: Op) -> None:
        self.say(f"land {op}")
        self._check_target(op, op.pieces[op.num_landed])
        self.wire.land(op)

    def finish(self, op: Op) -> None:
        self.say(f"finish {op}")
        self.wire.finish(op)

    def can_fail(self, op: Op) -> bool:
        return op.state is PostState.IN_PROGRESS and self.lives_by_agent(op.poster).running

    def fail_op(self, op: Op, error: str) -> None:
        self.say(f"fail {op}: {error}")
        self.wire.fail(op, error)

    def serve_orphan(self, op: Op) -> None:
        self.say(f"serve {op} of a dead reader")
        if not op.all_taken:
            self._check_source(op, op.pieces[op.num_taken])
        self.wire.serve_orphan(op)

    def arrive(self, arriving: Arriving) -> None:
        self.say(f"notification of {arriving.notification.peer} arrives at {arriving.target}")
        self.wire.arrive(arriving)

    def move_lanes(self) -> bool:
        """One step of every post and notification that can move. Returns whether any could."""
        moved = False
        for op in tuple(self.wire.ops):
            moved = self.move(op) or moved
        for arriving in tuple(self.wire.arriving):
            if self.lives_by_agent(arriving.target).running:
                self.arrive(arriving)
                moved = True
        return moved

    def move(self, op: Op) -> bool:
        """The next step of one post. Returns whether there is one."""
        step = self._next_move(op)
        if step is not None:
            step(op)
        return step is not None

    def can_move(self, op: Op) -> bool:
        return self._next_move(op) is not None

    def _next_move(self, op: Op) -> Callable[[Op], None] | None:
        wire = self.wire
        if op not in wire.ops:
            return None
        moves: tuple[tuple[Callable[[Op], bool], Callable[[Op], None]], ...] = (
            (wire.can_land, self.land),
            (wire.can_take, self.take),
            (wire.can_finish, self.finish),
            (wire.can_break, self._break_op),
            (wire.can_serve_orphan, self.serve_orphan),
        )
        return next((move for possible, move in moves if possible(op)), None)

    def _break_op(self, op: Op) -> None:
        self.fail_op(op, "the other end is gone")

    def lives_by_agent(self, agent: str) -> Life:
        life = self.wire.processes[agent]
        assert isinstance(life, Life)
        return life

    def _check_source(self, op: Op, piece: Piece) -> None:
        owner = self.lives_by_agent(op.source).pool.owners[piece.group][piece.source // SLOT_BYTES]
        if owner is None or owner.key != op.notice.key:
            self.broken(f"{op} for {short(op.notice.key)} reads a page of {op.source} that is {_whose(owner)} now")

    def _check_target(self, op: Op, piece: Piece) -> None:
        owner = self.lives_by_agent(op.target).pool.owners[piece.group][piece.target // SLOT_BYTES]
        if owner is None or (owner.key, owner.fence) != (op.notice.key, op.notice.fence):
            self.broken(f"{op} for {short(op.notice.key)} writes a page of {op.target} that is {_whose(owner)} now")

    # ---- processes and time

    def turn(self, life: Life) -> None:
        """The transport thread of a worker looks around."""
        life.reactor.turn()

    def poll(self, life: Life) -> int:
        """The engine of a worker looks around."""
        return life.engine.poll()

    def pass_time(self, seconds: float) -> None:
        self.clock += seconds

    def crash(self, life: Life, *, keep: Callable[[Letter], bool] = lambda _: False) -> None:
        """End a process. Letters from and to it are lost, but for those that `keep` says arrive nevertheless."""
        self.say(f"crash {life}")
        life.run = Run.DEAD
        self.wire.die(life.agent)
        for channel in tuple(self.control.channels):
            if channel.open and life.worker in channel.ends:
                kept = tuple(letter for letter in self.control.letters if letter.channel is channel and keep(letter))
                self.break_channel(channel, f"{life} is gone", keep=kept)
        self.control.forget_life(life.worker)

    def restart(self, life: Life) -> None:
        self._start(life.worker.name, life.role)
        self.say(f"restart as {self.lives[life.worker.name]}")

    def stop(self, life: Life) -> None:
        self.say(f"stop {life}")
        life.run = Run.STOPPED

    def go_on(self, life: Life) -> None:
        self.say(f"{life} goes on")
        life.run = Run.RUNNING

    def cancel(self, life: Life, key: TransferKey, reason: str) -> None:
        self.say(f"cancel {short(key)} at {life}: {reason}")
        life.transceiver.cancel(key, reason)

    def offer(self, life: Life, prompt: Prompt) -> bool:
        self.say(f"offer {short(prompt.key)} at {life}, {prompt.num_blocks} blocks")
        return life.engine.offer(prompt)

    def enlist(self, life: Life, prompt: Prompt, senders: tuple[Life, ...]) -> None:
        self.say(f"enlist {short(prompt.key)} at {life}")
        life.engine.enlist(prompt, tuple(sender.worker for sender in senders))

    def request(self, life: Life, prompt: Prompt, senders: tuple[Life, ...]) -> bool:
        what = f"{prompt.direction.value}{', early' if prompt.early else ''}"
        self.say(f"request {short(prompt.key)} at {life}, {what}, {prompt.num_blocks - prompt.skip_blocks} blocks")
        return life.engine.request(prompt, tuple(sender.worker for sender in senders))

    def free(self, life: Life, key: TransferKey) -> None:
        self.say(f"{life} has decoded {short(key)}")
        life.engine.free(key)

    def _start(self, name: str, role: Role) -> None:
        self._incarnations[name] = self._incarnations.get(name, 0) + 1
        index = [known for known, _ in self.names].index(name)
        worker = WorkerId(name, 100 * (index + 1) + self._incarnations[name])
        life = Life(worker, role, (index + 1) << 32, self, self._make_lane)
        self.lives[name] = life
        self.wire.join(life)

    def _make_lane(self, agent: str, base: int) -> SimLane:
        self._bases[agent] = base
        return SimLane(agent, self.wire, self._bases, self.settings.pieces_per_run, self.prove)

    def _is_current(self, worker: WorkerId) -> bool:
        return self.lives[worker.name].worker == worker


def _whose(owner: object) -> str:
    return "nobody's" if owner is None else f"of {owner}"
