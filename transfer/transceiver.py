"""Moves pages between the pools of this worker and its peers, for an engine loop that never waits."""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from kvferry.cache.errors import CapacityError, ConfigError, TransportError
from kvferry.cache.holds import Access, Hold
from kvferry.cache.page_table import BlockLists
from kvferry.cache.protocol import CacheManager
from kvferry.transfer.outcomes import (
    HangUp,
    Outbox,
    PagesReusable,
    Report,
    SendMessage,
    TransferOutcome,
    error_of,
)
from kvferry.transfer.peers import PeerBook
from kvferry.transfer.reactor import IDLE_SECONDS, WAITING_SECONDS, Reactor
from kvferry.transfer.receiving import Receiver
from kvferry.transfer.sending import Offer, Sender
from kvferry.transfer.session import Side
from kvferry.transfer.transport.base import Notification, Transport
from kvferry.transfer.types import (
    AuxRecord,
    Cancel,
    Failure,
    Grant,
    Phase,
    PromptId,
    RankInfo,
    Role,
    TransferKey,
    TransferResult,
    WireReport,
    WorkerId,
)

log = logging.getLogger(__name__)

SWEEP_SECONDS = 0.05
SPIN_TURNS = 2000
"""Turns without progress after which the thread looks at its writes less often: some tens of milliseconds."""


@dataclass(frozen=True)
class TransceiverSettings:
    """Bounds of a transceiver.

    Attributes:
        slice_bytes: most bytes handed to the transport in one post.
        max_transfers: attempts that may be open at once, both directions together.
    """

    slice_bytes: int = 8 << 20
    max_transfers: int = 1024


class Transceiver:
    """The stateful shell around sessions, one per worker.

    The engine's thread calls `offer`, `request`, `cancel` and `poll`; none of them waits. The control plane's threads
    call the `on_*` methods and `pair`. Everything else happens on the reactor's thread.
    """

    def __init__(
        self,
        worker: WorkerId,
        role: Role,
        manager: CacheManager,
        transport: Transport,
        *,
        model_digest: str,
        send: SendMessage,
        hang_up: HangUp,
        wake: Callable[[], None] = lambda: None,
        settings: TransceiverSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        settings = settings or TransceiverSettings()
        self._manager = manager
        self._transport = transport
        self._settings = settings
        self._worker = worker
        self._clock = clock
        self._outbox = Outbox(wake)
        self._holds: dict[tuple[TransferKey, Side], Hold] = {}
        self._in_doubt: set[tuple[TransferKey, Side]] = set()
        self._reported_failure = False
        self._next_sweep = 0.0
        self._still_turns = 0
        transport.register(manager.storage.pools)
        self.info = RankInfo(
            worker=worker,
            role=role,
            rank=0,
            num_ranks=1,
            transport=transport.name,
            agent_name=transport.agent_name,
            agent_metadata=transport.metadata(),
            model_digest=model_digest,
            manager=manager.version,
            page_table=manager.page_table(),
        )
        self._peers = PeerBook(self.info, transport)
        self._sender = Sender(worker, transport, self._peers, send, self._outbox, clock, settings.slice_bytes, hang_up)
        self._receiver = Receiver(worker, self._peers, send, self._outbox, clock)
        self._reactor = Reactor(transport, self, clock)
        self._reactor.start()

    # ---- engine's thread

    def offer(
        self, key: TransferKey, pages: BlockLists, prompt: PromptId, aux: AuxRecord, timeout_seconds: float
    ) -> None:
        """Hold the pages of a computed prompt until a grant came and they were written, or the timeout passed.

        The sequence may be closed right after. `poll` reports the outcome.

        Raises:
            ConfigError: the key is open already. CapacityError: too many open transfers.
            TransportError: the reactor ended. LocalProtocolError: as `CacheManager.hold`.
        """
        ready = self._manager.storage.record_event()
        offer = Offer(key, prompt, pages, aux, self._clock() + timeout_seconds, ready)
        self._open(key, Side.SENDER, pages, Access.READ, lambda: self._sender.offer(offer))

    def request(
        self, key: TransferKey, sender: WorkerId, pages: BlockLists, prompt: PromptId, timeout_seconds: float
    ) -> None:
        """Grant pages to a sender and wait for them. `poll` reports the outcome, with the aux record.

        Nothing is granted before the device is done with what the pages were used for until now. Blocks that are here
        already have no page in `pages`; when none is left to move, the outcome still brings the aux record.

        Raises: as `offer`.
        """
        grant = Grant(key, sender, self._worker, prompt, pages, timeout_seconds)
        now, ready = self._clock(), self._manager.storage.record_event()
        self._open(key, Side.RECEIVER, pages, Access.WRITE, lambda: self._receiver.request(grant, now, ready))

    def cancel(self, key: TransferKey, reason: str) -> None:
        """Stop an attempt on whichever side it is here. Its pages come back when they are quiet. Idempotent."""
        self._reactor.submit(lambda: self._cancel(key, reason))

    def poll(self) -> list[TransferOutcome]:
        """Attempts that ended since the last call. Releases the holds of pages that may be used again. Never waits."""
        outcomes = []
        for report in self._outbox.drain():
            if isinstance(report, TransferOutcome):
                outcomes.append(report)
            else:
                self._settle(report)
        return outcomes + self._broken_outcomes()

    def quarantined_slots(self) -> tuple[int, ...]:
        """Slots per pool group that are out of circulation because nobody can prove they are quiet.

        Counted once each: attempts may share the pages of a common prefix.
        """
        holds = [self._holds[entry] for entry in self._in_doubt]
        groups = range(len(self._manager.layout.pool_groups))
        return tuple(len({slot for hold in holds for slot in hold.slots[group].tolist()}) for group in groups)

    @property
    def num_sending(self) -> int:
        """Attempts out that are not over."""
        return self._count(Side.SENDER)

    @property
    def num_receiving(self) -> int:
        """Attempts in that are not over."""
        return self._count(Side.RECEIVER)

    # ---- any thread

    def pair(self, info: RankInfo) -> "Future[None]":
        """Validate and wire a peer. The future raises IncompatiblePeer with every difference."""
        return self._reactor.call(lambda: self._peers.pair(info))

    def lanes(self) -> "Future[dict[WorkerId, tuple[Role, str]]]":
        """Role of each paired peer and the lane its writes take."""
        return self._reactor.call(
            lambda: {peer.info.worker: (peer.info.role, self._transport.lane(peer.agent)) for peer in self._peers}
        )

    @property
    def failure(self) -> Exception | None:
        """Why no transfer can run any more; None while all is well."""
        return self._reactor.failure

    def on_grant(self, peer: WorkerId, grant: Grant) -> None:
        self._reactor.submit(lambda: self._sender.on_grant(peer, grant))

    def on_result(self, peer: WorkerId, result: TransferResult) -> None:
        self._reactor.submit(lambda: self._receiver.on_result(peer, result))

    def on_cancel(self, peer: WorkerId, cancel: Cancel) -> None:
        self._reactor.submit(lambda: self._sender.on_cancel(peer, cancel.key, f"cancelled by {peer}: {cancel.reason}"))

    def on_channel_up(self, peer: WorkerId) -> None:
        log.info("channel to %s is up", peer)
        self._reactor.submit(lambda: self._greet(peer))

    def on_channel_lost(self, peer: WorkerId, reason: str) -> None:
        try:
            self._reactor.submit(lambda: self._lose(peer, reason))
        except TransportError:
            log.info("channel to %s ended while closing: %s", peer, reason)

    def abandon(self, reason: str) -> "Future[None]":
        """Fail every open attempt, so that peers hear of it before the control plane closes."""
        return self._reactor.call(lambda: self._abandon(Failure("peer_lost", Phase.WIRE, reason)))

    def num_unanswered(self) -> "Future[int]":
        """Attempts out whose receiver has not heard how they ended: their writes are not over."""
        return self._reactor.call(lambda: self._sender.num_open)

    def close(self, timeout_seconds: float) -> bool:
        """Stop the reactor and the transport. Returns False, leaving the agent alive, when it did not stop in time."""
        stopped = self._reactor.stop(timeout_seconds)
        if stopped:
            self._peers.close()
            self._transport.close()
        return stopped

    # ---- reactor's thread

    def on_notification(self, notification: Notification) -> None:
        self._receiver.on_notification(notification)

    def advance(self, now: float) -> float:
        moved = self._sender.writer.advance()
        self._receiver.grant_ready()
        if now >= self._next_sweep:
            self._next_sweep = now + SWEEP_SECONDS
            self._sender.expire(now)
            self._receiver.expire(now)
            self._peers.forget_lost(now, self._sender.peers() | self._receiver.peers())
        if self._sender.writer.busy:
            self._still_turns = 0 if moved else self._still_turns + 1
            return 0.0 if self._still_turns < SPIN_TURNS else WAITING_SECONDS
        return WAITING_SECONDS if self._receiver.waiting else IDLE_SECONDS

    def on_reactor_failed(self, error: Exception) -> None:
        self._outbox.wake()

    # ---- private

    def _open(self, key: TransferKey, side: Side, pages: BlockLists, access: Access, start: Callable[[], None]) -> None:
        if (key, side) in self._holds:
            raise ConfigError(f"transfer {key} is open here already as {side.value}: a key serves one attempt")
        if len(self._holds) - len(self._in_doubt) >= self._settings.max_transfers:
            raise CapacityError(
                f"{len(self._holds)} transfers are open, the limit is {self._settings.max_transfers}: retry when some "
                "ended, or raise max_transfers",
                requested=(1,),
                available=(0,),
            )
        self._holds[key, side] = self._manager.hold(pages, access)
        try:
            self._reactor.submit(start)
        except (TransportError, CapacityError):
            self._manager.release(self._holds.pop((key, side)))
            raise

    def _settle(self, report: Report) -> None:
        entry = (report.key, report.side)
        if isinstance(report, PagesReusable):
            self._in_doubt.discard(entry)
            self._manager.release(self._holds.pop(entry))
        else:
            self._in_doubt.add(entry)

    def _count(self, side: Side) -> int:
        return sum(entry[1] is side and entry not in self._in_doubt for entry in self._holds)

    def _broken_outcomes(self) -> list[TransferOutcome]:
        """When the reactor ended, every attempt fails once, and its pages are in doubt: nobody can prove anything."""
        if self._reactor.failure is None or self._reported_failure:
            return []
        self._reported_failure = True
        failure = Failure("transport_failed", Phase.WIRE, f"the transport thread ended: {self._reactor.failure}")
        left = [entry for entry in self._holds if entry not in self._in_doubt]
        self._in_doubt.update(left)
        return [TransferOutcome(key, side, error_of(key, "", failure), WireReport(), 0.0) for key, side in left]

    def _greet(self, peer: WorkerId) -> None:
        self._peers.on_channel(peer, +1, self._clock())
        self._receiver.on_channel_up(peer)

    def _abandon(self, failure: Failure) -> None:
        self._sender.fail_all(failure)
        self._receiver.fail_all(failure)

    def _cancel(self, key: TransferKey, reason: str) -> None:
        self._sender.cancel(key, reason)
        self._receiver.cancel(key, reason)

    def _lose(self, peer: WorkerId, reason: str) -> None:
        self._peers.on_channel(peer, -1, self._clock())
        self._sender.on_channel_lost(peer, reason)
        self._receiver.on_channel_lost(peer, reason)
