"""Moves pages between the pools of this worker and its peers, for an engine loop that never waits."""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from kvferry.cache.errors import CapacityError, TransportError
from kvferry.cache.manager import Hold, KVCacheManager
from kvferry.cache.page_table import BlockLists
from kvferry.transfer.outcomes import (
    Outbox,
    PagesInDoubt,
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
    RankInfo,
    Role,
    TransferKey,
    TransferResult,
    WireReport,
    WorkerId,
)

log = logging.getLogger(__name__)

SWEEP_SECONDS = 0.05


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
        manager: KVCacheManager,
        transport: Transport,
        *,
        model_digest: str,
        send: SendMessage,
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
        self._next_sweep = 0.0
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
            page_table=manager.page_table(),
        )
        self._peers = PeerBook(self.info, transport)
        self._sender = Sender(worker, transport, self._peers, send, self._outbox, clock, settings.slice_bytes)
        self._receiver = Receiver(worker, self._peers, send, self._outbox, clock)
        self._reactor = Reactor(transport, self, clock)
        self._reactor.start()

    # ---- engine's thread

    def offer(
        self, key: TransferKey, pages: BlockLists, prompt_tokens: int, aux: AuxRecord, timeout_seconds: float
    ) -> None:
        """Hold the pages of a computed prompt until a grant came and they were written, or the timeout passed.

        The sequence may be closed right after. `poll` reports the outcome.

        Raises: CapacityError: too many open transfers. TransportError: the reactor ended.
        """
        ready = self._manager.storage.record_event()
        offer = Offer(key, prompt_tokens, pages, aux, self._clock() + timeout_seconds, ready)
        self._open(key, Side.SENDER, pages, lambda: self._sender.offer(offer))

    def request(
        self, key: TransferKey, sender: WorkerId, pages: BlockLists, prompt_tokens: int, timeout_seconds: float
    ) -> None:
        """Grant pages to a sender and wait for them. `poll` reports the outcome, with the aux record.

        Raises: CapacityError: too many open transfers. TransportError: the reactor ended.
        """
        grant = Grant(key, sender, self._worker, prompt_tokens, pages, timeout_seconds)
        now = self._clock()
        self._open(key, Side.RECEIVER, pages, lambda: self._receiver.request(grant, now))

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
        return outcomes

    def quarantined_slots(self) -> tuple[int, ...]:
        """Slots per pool group that are out of circulation because nobody can prove they are quiet."""
        holds = [self._holds[entry] for entry in self._in_doubt]
        groups = range(len(self._manager.layout.pool_groups))
        return tuple(sum(len(hold.slots[group]) for hold in holds) for group in groups)

    @property
    def num_sending(self) -> int:
        return sum(side is Side.SENDER for _, side in self._holds)

    @property
    def num_receiving(self) -> int:
        return sum(side is Side.RECEIVER for _, side in self._holds)

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
        self._reactor.submit(lambda: self._sender.cancel(cancel.key, f"cancelled by {peer}: {cancel.reason}"))

    def on_channel_up(self, peer: WorkerId) -> None:
        log.info("channel to %s is up", peer)
        self._reactor.submit(lambda: self._peers.on_channel(peer, +1))

    def on_channel_lost(self, peer: WorkerId, reason: str) -> None:
        try:
            self._reactor.submit(lambda: self._lose(peer, reason))
        except TransportError:
            log.info("channel to %s ended while closing: %s", peer, reason)

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
        self._sender.writer.advance()
        if now >= self._next_sweep:
            self._next_sweep = now + SWEEP_SECONDS
            self._sender.expire(now)
            self._receiver.expire(now)
            self._peers.forget_lost(self._sender.peers() | self._receiver.peers())
        if self._sender.writer.busy:
            return 0.0
        return WAITING_SECONDS if len(self._receiver) else IDLE_SECONDS

    def on_reactor_failed(self, error: Exception) -> None:
        failure = Failure("transport_failed", Phase.WIRE, f"the transport thread ended: {error}")
        for key, side in tuple(self._holds):
            typed = error_of(key, "", failure)
            self._outbox.put(TransferOutcome(key, side, typed, WireReport(), 0.0))
            self._outbox.put(PagesInDoubt(key, side))

    # ---- private

    def _open(self, key: TransferKey, side: Side, pages: BlockLists, start: Callable[[], None]) -> None:
        if len(self._holds) >= self._settings.max_transfers:
            raise CapacityError(
                f"{len(self._holds)} transfers are open, the limit is {self._settings.max_transfers}: retry when some "
                "ended, or raise max_transfers",
                requested=(1,),
                available=(0,),
            )
        hold = self._manager.hold(pages)
        try:
            self._reactor.submit(start)
        except (TransportError, CapacityError):
            self._manager.release(hold)
            raise
        self._holds[key, side] = hold

    def _settle(self, report: Report) -> None:
        entry = (report.key, report.side)
        if isinstance(report, PagesReusable):
            self._in_doubt.discard(entry)
            self._manager.release(self._holds.pop(entry))
        else:
            self._in_doubt.add(entry)

    def _cancel(self, key: TransferKey, reason: str) -> None:
        self._sender.cancel(key, reason)
        self._receiver.cancel(key, reason)

    def _lose(self, peer: WorkerId, reason: str) -> None:
        self._peers.on_channel(peer, -1)
        self._sender.on_channel_lost(peer, reason)
        self._receiver.on_channel_lost(peer, reason)
