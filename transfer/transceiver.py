"""Moves pages between the pools of this worker and its peers, for an engine loop that never waits."""

import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass

from kvferry.cache.errors import CapacityError, ConfigError, RemoteProtocolError, TransportError
from kvferry.cache.holds import Access, Hold
from kvferry.cache.page_table import BlockLists
from kvferry.cache.protocol import CacheManager
from kvferry.transfer.attempts import Offer, Wish
from kvferry.transfer.driving import Driver
from kvferry.transfer.ended import MAX_REMEMBERED, EndedAttempts
from kvferry.transfer.leases import Leases
from kvferry.transfer.notice import Notice
from kvferry.transfer.outcomes import (
    HangUp,
    Outbox,
    PagesReusable,
    Report,
    SendMessage,
    TransferOutcome,
    cancelled,
    error_of,
)
from kvferry.transfer.peers import PeerBook
from kvferry.transfer.proofs import Proofs
from kvferry.transfer.reactor import IDLE_SECONDS, WAITING_SECONDS, Reactor, ReactorHandler
from kvferry.transfer.receiving import Receiver
from kvferry.transfer.sending import Sender
from kvferry.transfer.transport.base import Notification, Transport
from kvferry.transfer.types import (
    AuxRecord,
    Cancel,
    Direction,
    Failure,
    Grant,
    Permit,
    Phase,
    PromptId,
    RankInfo,
    Renewal,
    Role,
    Side,
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
        lease_seconds: how long the other side of an attempt may count on it after a sign of life of this one.
        max_remembered: ended attempts that are remembered, per side.
    """

    slice_bytes: int = 8 << 20
    max_transfers: int = 1024
    lease_seconds: float = 10.0
    max_remembered: int = MAX_REMEMBERED


MakeReactor = Callable[[Transport, ReactorHandler, Callable[[], float]], Reactor]


class Transceiver:
    """The stateful shell around sessions, one per worker.

    The engine's thread calls `offer`, `enlist`, `request`, `cancel` and `poll`; none of them waits. The control plane's
    threads call the `on_*` methods and `pair`. Everything else happens on the reactor's thread.
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
        make_reactor: MakeReactor = Reactor,
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
        self._running: set[tuple[TransferKey, Side]] = set()
        self._enlisted: set[TransferKey] = set()
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
        self._driver = Driver(transport, self._peers, settings.slice_bytes, clock)
        self._proofs = Proofs(transport, clock)
        self._send = send
        self._leases = Leases(worker, settings.lease_seconds)
        self._ended_out, self._ended_in = (EndedAttempts(settings.max_remembered) for _ in Side)
        parts = (self._peers, self._driver, self._proofs)
        self._sender = Sender(worker, *parts, self._ended_out, send, self._outbox, clock, hang_up, self._leases)
        self._receiver = Receiver(worker, *parts, self._ended_in, send, self._outbox, clock, hang_up)
        self._reactor = make_reactor(transport, self, clock)
        self._reactor.start()

    # ---- engine's thread

    def offer(
        self,
        key: TransferKey,
        pages: BlockLists,
        prompt: PromptId,
        aux: AuxRecord,
        timeout_seconds: float,
        *,
        hold_seconds: float | None = None,
        request_id: str = "",
    ) -> None:
        """Hold the pages of a computed prompt until they were moved to a receiver, or the timeout passed.

        The sequence may be closed right after. `poll` reports the outcome.

        Args:
            timeout_seconds: most time until a grant comes; the grant then says how long the move may take.
            hold_seconds: the lease until a receiver shows a sign of life; the whole timeout when not given.
            request_id: what the grant must name.

        Raises:
            ConfigError: the key is open already. CapacityError: too many open transfers.
            TransportError: the reactor ended. LocalProtocolError: as `CacheManager.hold`.
        """
        ready = self._manager.storage.record_event()
        hold = timeout_seconds if hold_seconds is None else min(hold_seconds, timeout_seconds)
        now = self._clock()
        offer = Offer(key, request_id, prompt, pages, aux, now + timeout_seconds, now + hold, ready)
        self._check_new(key, Side.SENDER)
        self._open(key, Side.SENDER, pages, Access.READ, lambda: self._sender.offer(offer))

    def enlist(self, key: TransferKey, senders: tuple[WorkerId, ...], timeout_seconds: float) -> None:
        """Stand by an attempt that waits for room here: its senders keep its pages from now on.

        `request` must follow within the timeout, or `cancel`. `poll` reports when the attempt ends before.

        Raises: as `offer`.
        """
        enlist = self._enlisting(key, senders, timeout_seconds)
        self._reactor.submit(enlist)
        self._enlisted.add(key)

    def request(
        self,
        key: TransferKey,
        senders: tuple[WorkerId, ...],
        pages: BlockLists,
        prompt: PromptId,
        timeout_seconds: float,
        *,
        request_id: str = "",
        direction: Direction = Direction.PUSH,
        early: bool = False,
    ) -> None:
        """Grant pages to senders and wait until they are filled. `poll` reports the outcome, with the aux record.

        Nothing is granted before the device is done with what the pages were used for until now. Blocks that are here
        already have no page in `pages`; when none is left to move, the outcome still brings the aux record.

        Args:
            senders: each moves what it has of these pages; today one.
            direction: whether the senders write or this worker reads.
            early: the prompt may not be computed yet.

        Raises: as `offer`.
        """
        now, ready = self._clock(), self._manager.storage.record_event()
        wish = Wish(request_id, prompt, pages, direction, early, ready)
        queued = key in self._enlisted and (key, Side.RECEIVER) not in self._holds
        enlist = _nothing if queued else self._enlisting(key, senders, timeout_seconds)

        def start() -> None:
            enlist()
            self._receiver.request(key, wish, now + timeout_seconds, now)

        self._open(key, Side.RECEIVER, pages, Access.WRITE, start)
        self._enlisted.add(key)

    def cancel(self, key: TransferKey, reason: str) -> None:
        """Stop an attempt on whichever side it is here. Its pages come back when they are quiet. Idempotent."""
        self.fail(key, cancelled(reason))

    def fail(self, key: TransferKey, failure: Failure) -> None:
        """As `cancel`, for a reason that the other side should hear with its code, phase and hint."""
        self._reactor.submit(lambda: self._fail(key, failure))

    def why_ended(self, key: TransferKey) -> Failure | None:
        """Why an attempt must not be offered here any more, as far as is remembered: cancelled, failed or served."""
        return self._ended_out.find(key)

    def poll(self) -> list[TransferOutcome]:
        """Attempts that ended since the last call. Releases the holds of pages that may be used again. Never waits."""
        outcomes = []
        for report in self._outbox.drain():
            if isinstance(report, TransferOutcome):
                outcomes.append(report)
                self._running.discard((report.key, report.side))
                if report.side is Side.RECEIVER:
                    self._enlisted.discard(report.key)
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

    def on_permit(self, peer: WorkerId, permit: Permit) -> None:
        self._reactor.submit(lambda: self._receiver.on_permit(peer, permit))

    def on_result(self, peer: WorkerId, result: TransferResult) -> None:
        self._reactor.submit(lambda: self._receiver.on_result(peer, result))

    def on_cancel(self, peer: WorkerId, cancel: Cancel) -> None:
        self._reactor.submit(lambda: self._sender.on_cancel(peer, cancel))

    def on_renewal(self, peer: WorkerId, renewal: Renewal) -> None:
        self._reactor.submit(lambda: self._renewed(peer, renewal))

    def on_channel_up(self, peer: WorkerId) -> None:
        log.info("channel to %s is up", peer)
        self._reactor.submit(lambda: self._greet(peer))

    def on_channel_lost(self, peer: WorkerId, reason: str) -> None:
        try:
            self._reactor.submit(lambda: self._lose(peer, reason))
        except TransportError:
            log.info("channel to %s ended while closing: %s", peer, reason)
        except CapacityError as error:
            log.error("the loss of the channel to %s (%s) is noticed only by leases: %s", peer, reason, error)

    def abandon(self, reason: str) -> "Future[None]":
        """Fail every open attempt, so that peers hear of it before the control plane closes."""
        return self._reactor.call(lambda: self._abandon(Failure("peer_lost", Phase.WIRE, reason)))

    def num_unanswered(self) -> "Future[int]":
        """Attempts out whose pages may not be reused yet; their receivers have not heard the last word."""
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
        """Slices that are over. Notices for other lives, other attempts or from other peers are refused."""
        try:
            notice = Notice.unpack(notification.payload)
            known = self._receiver.on_notice(notification.peer, notice)
            if not known and not self._sender.on_notice(notification.peer, notice):
                raise RemoteProtocolError(f"transfer {notice.key} is not open here")
        except RemoteProtocolError as error:
            log.warning("notification from %s refused: %s", notification.peer, error)

    def advance(self, now: float) -> float:
        moved = self._driver.advance()
        self._receiver.grant_ready()
        if now >= self._next_sweep:
            self._next_sweep = now + SWEEP_SECONDS
            self._sender.expire(now)
            self._receiver.expire(now)
            in_use = self._sender.peers() | self._receiver.peers()
            self._peers.forget_lost(now, in_use)
            self._proofs.forget_all_but(in_use)
        self._tell(Side.RECEIVER, self._receiver.first_renewals())
        if self._leases.due(now):
            self._tell(Side.SENDER, self._sender.renewals())
            self._tell(Side.RECEIVER, self._receiver.renewals())
        if self._driver.busy:
            self._still_turns = 0 if moved else self._still_turns + 1
            return 0.0 if self._still_turns < SPIN_TURNS else WAITING_SECONDS
        return WAITING_SECONDS if self._receiver.waiting else IDLE_SECONDS

    def on_reactor_failed(self, error: Exception) -> None:
        self._outbox.wake()

    # ---- private

    def _enlisting(self, key: TransferKey, senders: tuple[WorkerId, ...], timeout_seconds: float) -> Callable[[], None]:
        """What the reactor does to enlist an attempt. Raises ConfigError when it is open, or comes from nowhere."""
        self._check_new(key, Side.RECEIVER)
        if not senders:
            raise ConfigError(f"transfer {key} names no sender: pages come from at least one")
        deadline = self._clock() + timeout_seconds
        return lambda: self._receiver.enlist(key, senders, deadline)

    def _check_new(self, key: TransferKey, side: Side) -> None:
        if (key, side) in self._holds or (side is Side.RECEIVER and key in self._enlisted):
            raise ConfigError(f"transfer {key} is open here already as {side.value}: a key serves one attempt")

    def _open(self, key: TransferKey, side: Side, pages: BlockLists, access: Access, start: Callable[[], None]) -> None:
        if len(self._running) >= self._settings.max_transfers:
            raise CapacityError(
                f"{len(self._running)} transfers are open, the limit is {self._settings.max_transfers}: retry when "
                "some ended, or raise max_transfers",
                requested=(1,),
                available=(0,),
            )
        self._holds[key, side] = self._manager.hold(pages, access)
        self._running.add((key, side))
        try:
            self._reactor.submit(start)
        except (TransportError, CapacityError):
            self._running.discard((key, side))
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
        left += [(key, Side.RECEIVER) for key in self._enlisted if (key, Side.RECEIVER) not in self._holds]
        error = [error_of(key, "", str(self._worker), "", failure) for key, _ in left]
        return [TransferOutcome(*entry, cause, WireReport(), 0.0) for entry, cause in zip(left, error, strict=True)]

    def _greet(self, peer: WorkerId) -> None:
        self._peers.on_channel(peer, +1, self._clock())
        self._sender.on_channel_up(peer)
        self._receiver.on_channel_up(peer)

    def _abandon(self, failure: Failure) -> None:
        self._sender.fail_all(failure)
        self._receiver.fail_all(failure)

    def _fail(self, key: TransferKey, failure: Failure) -> None:
        known = [self._sender.stop(key, failure), self._receiver.stop(key, failure)]
        if not any(known):
            # It may still be opened: whoever cancels need not wait for that.
            self._ended_out.remember(key, failure)
            self._ended_in.remember(key, failure)

    def _tell(self, side: Side, attempts: Iterable[tuple[WorkerId, TransferKey]]) -> None:
        """Renew these attempts."""
        for peer, renewal in self._leases.renewals(side, attempts):
            self._send(peer, renewal)

    def _renewed(self, peer: WorkerId, renewal: Renewal) -> None:
        """The peer is the other side of what it says it is."""
        hear = self._receiver.on_renewal if renewal.side is Side.SENDER else self._sender.on_renewal
        for key in renewal.keys:
            hear(peer, key, renewal.lease_seconds)

    def _lose(self, peer: WorkerId, reason: str) -> None:
        self._peers.on_channel(peer, -1, self._clock())
        self._sender.on_channel_lost(peer, reason)
        self._receiver.on_channel_lost(peer, reason)


def _nothing() -> None:
    """The attempt is enlisted already."""
