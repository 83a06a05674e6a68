"""One attempt as each side keeps it: what was said about it, its sessions, its posts."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from kvferry.cache.page_table import BlockLists
from kvferry.transfer.notice import Landing
from kvferry.transfer.peers import Peer
from kvferry.transfer.plan import TransferPlan, groups_of
from kvferry.transfer.poster import PostJob
from kvferry.transfer.session import Event, Outcome, Session, may_reuse
from kvferry.transfer.types import (
    AuxRecord,
    Direction,
    Failure,
    Grant,
    PromptId,
    Side,
    TransferKey,
    TransferResult,
    WorkerId,
)


class SendingOwner(Protocol):
    """What an attempt out tells of its posts."""

    def drive(self, sending: "Sending", event: Event) -> None: ...

    def on_post_failed(self, sending: "Sending", message: str) -> None: ...


class ReceivingOwner(Protocol):
    """What an attempt in tells of its posts."""

    def drive(self, source: "Source", event: Event) -> None: ...

    def on_post_failed(self, source: "Source", message: str) -> None: ...


@dataclass(frozen=True)
class Offer:
    """A computed prompt whose pages wait for a grant.

    Attributes:
        deadline: on the transceiver's clock, in seconds; the attempt must have ended by then.
        hold_until: as `deadline`; a receiver must have shown a sign of life by then.
        ready: whether the pages' bytes are final (a device event); always true on cpu.
    """

    key: TransferKey
    request_id: str
    prompt: PromptId
    pages: BlockLists
    aux: AuxRecord
    deadline: float
    hold_until: float
    ready: Callable[[], bool]


@dataclass(eq=False)
class Sending:
    """One attempt on the sending side. Also the listener of its posts.

    Attributes:
        lease_until: the receiver must show a sign of life before.
        guest: who hears how it ended when nobody was granted anything: who renewed it, or cancelled it.
        guest_fence: of the grant that was cancelled before it came here; it will not be served any more.
        told_quiet: the receiver said that none of its reads is under way.
        asked_at: when it was last told how the attempt ended, which with pull is a question, too.
    """

    owner: SendingOwner
    key: TransferKey
    deadline: float
    lease_until: float
    session: Session = field(default_factory=lambda: Session(Side.SENDER))
    offer: Offer | None = None
    grant: Grant | None = None
    peer: Peer | None = None
    job: PostJob | None = None
    plan: TransferPlan | None = None
    landing: Landing = field(default_factory=Landing)
    failure: Failure | None = None
    guest: WorkerId | None = None
    guest_fence: int = 0
    told_quiet: bool = False
    ended_at: float = 0.0
    asked_at: float = 0.0

    @property
    def receiver(self) -> WorkerId | None:
        return self.grant.receiver if self.grant is not None else self.guest

    @property
    def ended(self) -> bool:
        return self.session.state.outcome.terminal

    def posted(self) -> None:
        self.owner.drive(self, Event.POST)

    def moved(self) -> None:
        self.owner.drive(self, Event.MOVED)

    def failed(self, message: str) -> None:
        self.owner.on_post_failed(self, message)


@dataclass(frozen=True)
class Wish:
    """Pages that are to be filled.

    Attributes:
        ready: whether the device is done with what the pages were used for before.
    """

    request_id: str
    prompt: PromptId
    pages: BlockLists
    direction: Direction
    early: bool
    ready: Callable[[], bool]


@dataclass(eq=False)
class Source:
    """What one sender has to do with an attempt: a session of its own. Also the listener of reads from it.

    Attributes:
        lease_until: the sender must show a sign of life before.
        told_quiet: the sender proved that nothing of its own touches the granted pages.
        asked_at: when it was last asked to stop and to say so.
    """

    receiving: "Receiving"
    worker: WorkerId
    lease_until: float
    session: Session
    grant: Grant | None = None
    peer: Peer | None = None
    job: PostJob | None = None
    plan: TransferPlan | None = None
    landing: Landing = field(default_factory=Landing)
    result: TransferResult | None = None
    told_quiet: bool = False
    asked_at: float = 0.0

    @property
    def done(self) -> bool:
        return self.session.state.outcome is Outcome.DONE

    def posted(self) -> None:
        self.receiving.owner.drive(self, Event.POST)

    def moved(self) -> None:
        self.receiving.owner.drive(self, Event.MOVED)

    def failed(self, message: str) -> None:
        self.receiving.owner.on_post_failed(self, message)


@dataclass(eq=False)
class Receiving:
    """One attempt on the receiving side. Its pages are reusable when the sessions with all sources say so."""

    owner: ReceivingOwner
    key: TransferKey
    deadline: float
    started_at: float
    wish: Wish | None = None
    sources: dict[WorkerId, Source] = field(default_factory=dict)
    failure: Failure | None = None
    reported: bool = False
    ended_at: float = 0.0

    @property
    def ended(self) -> bool:
        """Without success as soon as it failed with one source; with success only when it did with all."""
        return self.failure is not None or all(source.done for source in self.sources.values())

    @property
    def groups(self) -> tuple[int, ...]:
        """Layer groups whose pages were granted."""
        granted = any(source.grant is not None for source in self.sources.values())
        return groups_of(self.wish.pages) if self.wish is not None and granted else ()

    def may_reuse(self) -> bool:
        return may_reuse(*(source.session.state for source in self.sources.values()))
