"""The control plane of a simulated world: channels that break, and letters that are late, lost or said twice."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from kvferry.transfer.types import Cancel, Grant, Message, Permit, Renewal, TransferResult, WorkerId


@dataclass(eq=False)
class Channel:
    """One stream between a prefill worker and the decode worker that dialled it.

    Attributes:
        up: ends that were told it is up and not yet that it is lost.
        open: messages get through.
    """

    ends: tuple[WorkerId, WorkerId]
    up: set[WorkerId] = field(default_factory=set)
    open: bool = True
    reason: str = ""

    def other(self, worker: WorkerId) -> WorkerId:
        return self.ends[1] if worker == self.ends[0] else self.ends[0]


@dataclass(eq=False)
class Letter:
    """A message under way.

    Attributes:
        straggler: its channel is no more; it arrives nevertheless, maybe at another life of the same name.
        repeated: another one says the same.
    """

    number: int
    channel: Channel
    source: WorkerId
    target: WorkerId
    message: Message
    straggler: bool = False
    repeated: bool = False

    def __str__(self) -> str:
        return f"letter {self.number} {self.source}>{self.target} {describe(self.message)}"


class ControlPlane:
    """All channels and letters.

    Attributes:
        cut: directions, by names, in which nothing gets through for now.
    """

    def __init__(self) -> None:
        self.channels: list[Channel] = []
        self.letters: list[Letter] = []
        self.cut: set[tuple[str, str]] = set()
        self._next_letter = 0

    def find(self, one: WorkerId, other: WorkerId) -> Channel | None:
        """The channel that `one` believes to be up."""
        return next((c for c in self.channels if one in c.up and other in c.ends and one != other), None)

    def open_between(self, one: str, other: str) -> Channel | None:
        names = {one, other}
        return next((c for c in self.channels if c.open and {end.name for end in c.ends} == names), None)

    def send(self, source: WorkerId, target: WorkerId, message: Message) -> Letter | None:
        """A letter, also into a channel that is broken already: nobody has noticed yet. None: it was refused."""
        channel = self.find(source, target)
        if channel is None:
            return None
        letter = Letter(self._next_letter, channel, source, target, message)
        self._next_letter += 1
        if channel.open:
            self.letters.append(letter)
        return letter

    def repeat(self, letter: Letter) -> Letter:
        again = replace(letter, number=self._next_letter, repeated=True)
        self._next_letter += 1
        self.letters.append(again)
        return again

    def passes(self, letter: Letter) -> bool:
        return (letter.source.name, letter.target.name) not in self.cut

    def break_channel(self, channel: Channel, reason: str, *, keep: Iterable[Letter] = ()) -> None:
        """What is under way in it is lost, but for some letters."""
        channel.open, channel.reason = False, reason
        kept = set(keep)
        for letter in kept:
            letter.straggler = True
        self.letters = [each for each in self.letters if each.channel is not channel or each in kept or each.straggler]
        self.forget_over(channel)

    def forget_over(self, channel: Channel) -> None:
        if not channel.open and not channel.up and channel in self.channels:
            self.channels.remove(channel)

    def forget_life(self, worker: WorkerId) -> None:
        """A process is gone: nobody is there to be told."""
        for channel in tuple(self.channels):
            channel.up.discard(worker)
            self.forget_over(channel)

    def untold(self) -> list[tuple[Channel, WorkerId]]:
        """Losses that an end has not been told of."""
        return [(c, end) for c in self.channels if not c.open for end in c.ends if end in c.up]


def describe(message: Message) -> str:
    """A message in a few words."""
    match message:
        case Grant():
            early = ", early" if message.early else ""
            return f"grant {short(message.key)} {message.direction.value}{early} fence {message.fence & 0xFFFF:04x}"
        case Permit():
            return f"permit {short(message.key)} fence {message.fence & 0xFFFF:04x}"
        case TransferResult():
            failure = f" {message.failure.code}" if message.failure else ""
            quiet = ", quiet" if message.quiet else ""
            return (
                f"result {short(message.key)} {message.status.value}{failure}{quiet} fence {message.fence & 0xFFFF:04x}"
            )
        case Cancel():
            return f"cancel {short(message.key)} {message.failure.code}{', quiet' if message.quiet else ''}"
        case Renewal():
            return f"renewal of {message.side.value} for {', '.join(map(short, message.keys))}"


def short(key: object) -> str:
    """A transfer key without its leading zeros."""
    return str(key).lstrip("0")
