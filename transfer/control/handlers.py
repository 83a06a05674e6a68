"""What a control server serves and what a network delivers: the records and protocols around `transfer.types`.

Handlers know nothing of gRPC. They raise any KVError and the caller at the other end gets the same one. When the caller
goes away or its deadline passes, the handler's task is cancelled (asyncio.CancelledError at its current await).
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from kvferry.transfer.inference import (
    DecodeCall,
    DirectoryEntry,
    GenerateCall,
    GenerateEvent,
    PrefillReply,
    WorkerStatus,
)
from kvferry.transfer.types import (
    Cancel,
    Grant,
    Message,
    Permit,
    RankInfo,
    Renewal,
    TransferKey,
    TransferResult,
    WorkerId,
)


@dataclass(frozen=True)
class Snapshot:
    """The whole membership at one moment, members in order of name.

    Attributes:
        version: counts changes of one life of one directory; not comparable across directories or restarts.
    """

    version: int
    members: tuple[DirectoryEntry, ...]


@dataclass(frozen=True)
class Hello:
    """First message of each direction of a channel: who speaks."""

    worker: WorkerId
    protocol_version: int


ChannelBody = Hello | Message


@dataclass(frozen=True)
class Envelope:
    """One message of a channel. `sequence` is 0 for the first of its direction, then one more for each."""

    sequence: int
    body: ChannelBody


class DirectoryHandler(Protocol):
    """Knows the members."""

    async def join(self, entry: DirectoryEntry, lease_seconds: float) -> float:
        """Add or refresh a member; a newer life of the same name replaces the older. Returns the seconds granted.

        Raises:
            CapacityError: the directory is full.
            ConfigError: this life was already replaced by a newer one of the same name.
        """

    async def renew(self, worker: WorkerId, paired: tuple[WorkerId, ...]) -> None:
        """Extend a lease and replace the member's paired workers. Raises UnknownMember when it is not a member."""

    async def leave(self, worker: WorkerId) -> None:
        """Remove a member; removing a stranger changes nothing."""

    def watch(self) -> AsyncIterator[Snapshot]:
        """The membership now and after every change. A slow reader gets the newest snapshot, not every one."""


class PeerHandler(Protocol):
    """Pairs with other workers and says how this one does."""

    async def register(self, remote: RankInfo) -> RankInfo:
        """Validate and wire a peer; returns this worker. Raises IncompatiblePeer with every difference."""

    async def get_status(self) -> WorkerStatus:
        """This worker now."""


class TransferHandler(Protocol):
    """Takes channels that receivers open."""

    def channel(self, inbound: AsyncIterator[Envelope]) -> AsyncIterator[Envelope]:
        """Read `inbound` and yield what to say back. Raises RemoteProtocolError when the peer breaks the protocol."""


class InferenceHandler(Protocol):
    """Answers prompts. A method that is not offered raises ConfigError.

    Concurrency: many calls at once, all on the server's loop. `generate` and `decode` are async generators.
    """

    def generate(self, call: GenerateCall) -> AsyncIterator[GenerateEvent]:
        """Chunks of tokens, then exactly one GenerateSummary."""

    async def prefill(self, call: GenerateCall) -> PrefillReply:
        """Compute the prompt and hold its pages until a decode worker has them, cancels, or the lease runs out."""

    def decode(self, call: DecodeCall) -> AsyncIterator[GenerateEvent]:
        """Fetch the pages, then as `generate`."""

    async def cancel(self, key: TransferKey, reason: str) -> None:
        """Stop an attempt. Idempotent; an unknown key changes nothing."""

    async def tokenize(self, prompt: str, chat: bool) -> tuple[int, ...]:
        """Token ids of a text; `chat` wraps it as one user turn where the model has a chat template."""


class ChannelSink(Protocol):
    """Where a network delivers. Called on the network's loop: hand over and return, never block.

    For one stream the order is on_channel_up, then messages in the order they were sent, then on_channel_lost. Two
    workers that both prefill and decode have two streams, one each way, each with its own up and lost.
    """

    def on_grant(self, peer: WorkerId, grant: Grant) -> None:
        """`peer` wants pages of this worker; sender and receiver of the grant are this worker and `peer`."""

    def on_permit(self, peer: WorkerId, permit: Permit) -> None:
        """`peer` allows this worker to read; sender and receiver of the permit are `peer` and this worker."""

    def on_result(self, peer: WorkerId, result: TransferResult) -> None:
        """`peer` ended an attempt whose pages this worker granted."""

    def on_cancel(self, peer: WorkerId, cancel: Cancel) -> None:
        """`peer`, which receives the attempt, gave it up."""

    def on_renewal(self, peer: WorkerId, renewal: Renewal) -> None:
        """`peer` stands by attempts in which it is `renewal.side`, and this worker the other side."""

    def on_channel_up(self, peer: WorkerId) -> None:
        """A stream with `peer` works in both directions."""

    def on_channel_lost(self, peer: WorkerId, reason: str) -> None:
        """A stream that was up ended; what was under way over it is in doubt, and queued messages may be lost."""
