"""The engine of one life of a simulated worker: what a caller of the transceiver does, with every byte compared."""

from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.cache.errors import CapacityError, ConfigError
from kvferry.cache.page_table import BlockLists
from kvferry.transfer.outcomes import TransferOutcome
from kvferry.transfer.transceiver import Transceiver
from kvferry.transfer.types import Direction, Side, TransferKey, WorkerId
from tests.simulation.content import aux_of, prompt_of
from tests.simulation.control import short
from tests.simulation.pool import SimPool


@dataclass(frozen=True)
class Prompt:
    """One transfer as its callers see it.

    Attributes:
        skip_blocks: leading blocks that the receiver has already.
    """

    key: TransferKey
    num_blocks: int
    skip_blocks: int = 0
    direction: Direction = Direction.PUSH
    early: bool = False
    timeout_seconds: float = 60.0
    hold_seconds: float | None = None


@dataclass(eq=False)
class Wanted:
    """An attempt in."""

    prompt: Prompt
    pages: BlockLists | None = None


@dataclass
class Tally:
    """What became of attempts, by side."""

    done: dict[Side, int] = field(default_factory=lambda: dict.fromkeys(Side, 0))
    failed: dict[Side, int] = field(default_factory=lambda: dict.fromkeys(Side, 0))
    codes: dict[str, int] = field(default_factory=dict)

    def count(self, outcome: TransferOutcome) -> None:
        counts = self.done if outcome.error is None else self.failed
        counts[outcome.side] += 1
        if outcome.error is not None:
            code = str(outcome.error).partition("]")[0].rpartition("[")[2]
            self.codes[code] = self.codes.get(code, 0) + 1


class Engine:
    """Uses one transceiver.

    Attributes:
        offered: attempts out whose outcome is not known.
        wanted: attempts in whose outcome is not known.
        reading: pages that arrived and are in use.
    """

    def __init__(
        self,
        name: str,
        transceiver: Transceiver,
        pool: SimPool,
        say: Callable[[str], None],
        broken: Callable[[str], None],
        tally: Tally,
    ) -> None:
        self.offered: dict[TransferKey, Prompt] = {}
        self.wanted: dict[TransferKey, Wanted] = {}
        self.reading: dict[TransferKey, BlockLists] = {}
        self._never_early: set[TransferKey] = set()
        self._name = name
        self._transceiver = transceiver
        self._pool = pool
        self._say = say
        self._broken = broken
        self._tally = tally

    @property
    def busy(self) -> bool:
        return bool(self.offered or self.wanted or self.reading)

    def offer(self, prompt: Prompt) -> bool:
        """Compute a prompt and offer its pages; the sequence is closed at once. Returns False without room for it."""
        pages = self._pool.allocate(prompt.key, prompt.num_blocks)
        if pages is None:
            return False
        self._pool.fill(prompt.key, pages)
        aux, about = aux_of(prompt.key, prompt.num_blocks), prompt_of(prompt.key, prompt.num_blocks)
        try:
            self._transceiver.offer(
                prompt.key, pages, about, aux, prompt.timeout_seconds, hold_seconds=prompt.hold_seconds
            )
            self.offered[prompt.key] = prompt
            if not prompt.early:
                self._never_early.add(prompt.key)
        except (ConfigError, CapacityError) as error:
            self._say(f"{self._name} cannot offer {short(prompt.key)}: {type(error).__name__}")
        self._pool.close(pages)
        return True

    def enlist(self, prompt: Prompt, senders: tuple[WorkerId, ...]) -> None:
        """Stand by a prompt that has no pages yet."""
        try:
            self._transceiver.enlist(prompt.key, senders, prompt.timeout_seconds)
            self.wanted[prompt.key] = Wanted(prompt)
        except (ConfigError, CapacityError) as error:
            self._say(f"{self._name} cannot enlist {short(prompt.key)}: {type(error).__name__}")

    def request(self, prompt: Prompt, senders: tuple[WorkerId, ...]) -> bool:
        """Grant pages for a prompt. Returns False without room for it."""
        wanted = self.wanted.get(prompt.key)
        if prompt.key in self.reading or (wanted is not None and wanted.pages is not None):
            return True
        pages = self._pool.allocate(prompt.key, prompt.num_blocks, prompt.skip_blocks)
        if pages is None:
            return False
        about = prompt_of(prompt.key, prompt.num_blocks)
        try:
            self._transceiver.request(
                prompt.key,
                senders,
                pages,
                about,
                prompt.timeout_seconds,
                direction=prompt.direction,
                early=prompt.early,
            )
            self.wanted[prompt.key] = Wanted(prompt, pages)
        except (ConfigError, CapacityError) as error:
            self._say(f"{self._name} cannot request {short(prompt.key)}: {type(error).__name__}")
            self._pool.close(pages)
        return True

    def poll(self) -> int:
        """Take in what ended. Returns how many attempts."""
        outcomes = self._transceiver.poll()
        for outcome in outcomes:
            self._say(f"{self._name} hears {short(outcome.key)} {outcome.side.value}: {outcome.error or 'done'}")
            self._tally.count(outcome)
            if outcome.side is Side.SENDER:
                self._forget_offer(outcome)
            else:
                self._take(outcome)
        return len(outcomes)

    def free(self, key: TransferKey) -> None:
        """The prompt at `key` was decoded to its end: its pages must be as they came."""
        pages = self.reading.pop(key)
        self._check_pages(key, pages, "when it was decoded")
        self._pool.close(pages)

    def _forget_offer(self, outcome: TransferOutcome) -> None:
        """A grant that came early may end before its prompt is offered, and then ends without it."""
        if self.offered.pop(outcome.key, None) is None and outcome.key in self._never_early:
            self._broken(f"{self._name} hears twice how {short(outcome.key)} ended as sender")

    def _take(self, outcome: TransferOutcome) -> None:
        wanted = self.wanted.pop(outcome.key, None)
        if wanted is None:
            self._broken(f"{self._name} hears twice how {short(outcome.key)} ended as receiver")
            return
        if outcome.error is not None:
            if wanted.pages is not None:
                self._pool.close(wanted.pages)
            return
        if wanted.pages is None:
            self._broken(f"{self._name}: {short(outcome.key)} is done and has no pages")
            return
        if outcome.aux != aux_of(outcome.key, wanted.prompt.num_blocks):
            self._broken(f"{self._name}: {short(outcome.key)} is done with aux {outcome.aux}")
        self._check_pages(outcome.key, wanted.pages, "when it was done")
        self.reading[outcome.key] = wanted.pages

    def _check_pages(self, key: TransferKey, pages: BlockLists, when: str) -> None:
        wrong = self._pool.wrong_pages(key, pages)
        if wrong:
            self._broken(f"wrong bytes at {self._name} {when}: {short(key)} {'; '.join(wrong)}")
