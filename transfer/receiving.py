"""The receiving side of transfers: pages granted, filled, complete when notices or reads and the result are in."""

import logging
from collections.abc import Callable, Iterator

from kvferry.cache.errors import RemoteProtocolError
from kvferry.transfer import fencing
from kvferry.transfer.attempts import Receiving, Source, Wish
from kvferry.transfer.content import check_content
from kvferry.transfer.driving import Driver
from kvferry.transfer.ended import BROKEN_HINT, KEY_HINT, LEASE_HINT, SERVED, EndedAttempts
from kvferry.transfer.notice import Notice
from kvferry.transfer.outcomes import (
    HangUp,
    Outbox,
    PagesInDoubt,
    PagesReusable,
    SendMessage,
    TransferOutcome,
    cancelled,
    error_of,
)
from kvferry.transfer.peers import PeerBook
from kvferry.transfer.plan import TransferPlan, check_same_blocks
from kvferry.transfer.proofs import SETTLE_SECONDS, Proofs
from kvferry.transfer.session import Action, Event, Exposure, Session, may_reuse
from kvferry.transfer.transport.base import Operation
from kvferry.transfer.types import (
    AuxRecord,
    Cancel,
    Failure,
    Grant,
    Permit,
    Phase,
    ResultStatus,
    Side,
    TransferKey,
    TransferResult,
    WireReport,
    WorkerId,
)

log = logging.getLogger(__name__)


class Receiver:
    """All attempts this worker receives.

    Concurrency: the thread that owns the transport.
    """

    def __init__(
        self,
        worker: WorkerId,
        peers: PeerBook,
        driver: Driver,
        proofs: Proofs,
        ended: EndedAttempts,
        send: SendMessage,
        outbox: Outbox,
        clock: Callable[[], float],
        hang_up: HangUp,
    ) -> None:
        self._worker = worker
        self._peers = peers
        self._driver = driver
        self._proofs = proofs
        self._ended = ended
        self._send = send
        self._outbox = outbox
        self._clock = clock
        self._hang_up = hang_up
        self._receivings: dict[TransferKey, Receiving] = {}
        self._unready: list[Receiving] = []
        self._newly_enlisted: list[Receiving] = []

    @property
    def waiting(self) -> bool:
        """Whether some attempt is not over: its data may arrive any moment."""
        return any(not receiving.ended and receiving.wish is not None for receiving in self._receivings.values())

    def peers(self) -> set[WorkerId]:
        """Senders that an open attempt is granted to."""
        return {worker for receiving in self._receivings.values() for worker in receiving.sources}

    def renewals(self) -> Iterator[tuple[WorkerId, TransferKey]]:
        """Attempts this side stands by, and who counts on them."""
        for receiving in self._receivings.values():
            if not receiving.ended:
                for source in receiving.sources.values():
                    if not source.done:
                        yield source.worker, receiving.key

    def first_renewals(self) -> Iterator[tuple[WorkerId, TransferKey]]:
        """Attempts enlisted since the last call that wait for room: their senders hear at once."""
        enlisted, self._newly_enlisted = self._newly_enlisted, []
        for receiving in enlisted:
            for source in receiving.sources.values():
                if not receiving.ended and receiving.wish is None:
                    yield source.worker, receiving.key

    # ---- from the engine

    def enlist(self, key: TransferKey, senders: tuple[WorkerId, ...], deadline: float) -> None:
        """Stand by an attempt that has no pages yet."""
        now = self._clock()
        receiving = Receiving(self, key, deadline, now)
        for worker in senders:
            receiving.sources[worker] = Source(receiving, worker, deadline, Session(Side.RECEIVER))
        self._receivings[key] = receiving
        self._newly_enlisted.append(receiving)
        stopped = self._ended.find(key)
        if stopped is not None:
            self._stop(receiving, stopped)

    def request(self, key: TransferKey, wish: Wish, deadline: float, started_at: float) -> None:
        """Send the grants of an enlisted attempt as soon as the pages are ready, and wait until the deadline."""
        receiving = self._receivings.get(key)
        if receiving is None or receiving.ended:
            # It ended between the engine's two calls: the pages were never granted.
            self._outbox.put(PagesReusable(key, Side.RECEIVER))
            return
        receiving.wish, receiving.deadline, receiving.started_at = wish, deadline, started_at
        for source in receiving.sources.values():
            source.session.direction = wish.direction
            source.peer = self._peers.find(source.worker)
            # Without a page nobody can write anything, so there is nothing to wait for but the result.
            source.landing.num_slices = None if wish.pages.num_pages else 0
        lost = [source.worker for source in receiving.sources.values() if source.peer is None]
        if lost:
            self._stop(receiving, Failure("peer_lost", Phase.GRANT, f"{lost[0]} is not a paired peer"))
            return
        self._unready.append(receiving)
        self.grant_ready()

    def grant_ready(self) -> None:
        """Send the grants whose pages the device is done with; an attempt that ended meanwhile needs none."""
        waiting, self._unready = self._unready, []
        for receiving in waiting:
            assert receiving.wish is not None
            if not receiving.wish.ready():
                self._unready.append(receiving)
                continue
            for source in receiving.sources.values():
                if not receiving.ended:
                    self._grant(receiving, receiving.wish, source)

    def stop(self, key: TransferKey, failure: Failure) -> bool:
        """End an attempt without success. Returns whether it is known here."""
        receiving = self._receivings.get(key)
        if receiving is not None:
            self._stop(receiving, failure)
        return receiving is not None

    def fail_all(self, failure: Failure) -> None:
        for receiving in tuple(self._receivings.values()):
            self._stop(receiving, failure)

    # ---- from the senders

    def on_permit(self, peer: WorkerId, permit: Permit) -> None:
        """Start to read. A permit for another life, or of other pages, fails the attempt; one said twice is ignored."""
        source = self._source(permit.key, peer)
        if source is None or source.grant is None or not source.session.allows(Event.PERMIT):
            log.warning("permit of %s for transfer %s ignored: nothing waits for it", peer, permit.key)
            return
        try:
            fencing.check_ends(permit.sender, permit.receiver, peer, self._worker)
            fencing.check_fence(permit.fence, source.grant)
            source.plan = self._plan(source, source.grant, permit)
            source.receiving.deadline = min(source.receiving.deadline, self._clock() + permit.timeout_seconds)
        except RemoteProtocolError as error:
            self._stop(source.receiving, Failure("bad_permit", Phase.GRANT, str(error)))
            return
        self.drive(source, Event.PERMIT)

    def on_notice(self, agent: str, notice: Notice) -> bool:
        """Count a slice that landed. Returns whether the attempt is one of these. Raises RemoteProtocolError."""
        receiving = self._receivings.get(notice.key)
        if receiving is None:
            return False
        source = next((source for source in receiving.sources.values() if _agent(source) == agent), None)
        if source is None or source.grant is None or source.session.drives:
            raise RemoteProtocolError(f"transfer {notice.key} grants {agent} no writes")
        fencing.check_life(notice.incarnation, self._worker)
        fencing.check_fence(notice.fence, source.grant)
        source.landing.note(notice)
        self._check_landed(source)
        return True

    def on_result(self, peer: WorkerId, result: TransferResult) -> None:
        """Take the sender's last word; results for another life or of other pages are refused."""
        source = self._source(result.key, peer)
        if source is None:
            self._answer_unknown(peer, result)
            return
        try:
            fencing.check_ends(result.sender, result.receiver, peer, self._worker)
            self._take(source, result)
        except RemoteProtocolError as error:
            self._stop(
                source.receiving, Failure("bad_result", Phase.RESULT, str(error), layer_groups=source.receiving.groups)
            )

    def _answer_unknown(self, peer: WorkerId, result: TransferResult) -> None:
        """With pull, a sender whose pages are in doubt asks whether our reads are over. They are: none is here."""
        if not result.quiet:
            failure = self._ended.find(result.key) or _not_here(result.key)
            self._send(peer, Cancel(result.key, self._worker, failure, result.fence, quiet=True))

    def on_renewal(self, peer: WorkerId, key: TransferKey, lease_seconds: float) -> None:
        """The sender stands by an attempt. One that ended here is answered; one that never began may still come."""
        source, failure = self._source(key, peer), self._ended.find(key)
        if source is None and failure is not None and failure.code != SERVED:
            self._send(peer, Cancel(key, self._worker, failure))
        elif source is not None:
            source.lease_until = self._clock() + lease_seconds

    def on_channel_up(self, peer: WorkerId) -> None:
        """Ask again about attempts that ended without proof: the answer says whether their pages are quiet."""
        for source in self._sources_of(peer):
            if source.receiving.ended:
                self._act(source, Action.SEND_CANCEL)

    def on_channel_lost(self, peer: WorkerId, reason: str) -> None:
        """Fail every attempt of this peer. Without a channel no word of it will come: what it may write is in doubt."""
        for source in self._sources_of(peer):
            self._stop(source.receiving, Failure("peer_lost", Phase.WIRE, reason, layer_groups=source.receiving.groups))
            if not source.session.drives:
                self._drive_if_allowed(source, Event.DOUBT)

    # ---- from the transport and the clock

    def on_post_failed(self, source: Source, message: str) -> None:
        """Fail an attempt and have the lane to its sender wired again: after one failed read none can be trusted."""
        self._stop(source.receiving, Failure("read_failed", Phase.WIRE, message, BROKEN_HINT, source.receiving.groups))
        self._peers.mark_broken(source.worker)
        self._hang_up(source.worker, f"a read failed: {message}")

    def expire(self, now: float) -> None:
        """Fail overdue attempts, and look for proof about those that ended without."""
        for receiving in tuple(self._receivings.values()):
            if not receiving.ended:
                self._check_time(receiving, now)
            else:
                for source in tuple(receiving.sources.values()):
                    self._settle(source, now)

    def _check_time(self, receiving: Receiving, now: float) -> None:
        open_sources = [source for source in receiving.sources.values() if not source.done]
        late = next((source for source in open_sources if now >= source.lease_until), None)
        phase = Phase.ADMISSION if receiving.wish is None else Phase.WIRE
        if now >= receiving.deadline:
            seconds = now - receiving.started_at
            landed = ", ".join(str(source.landing) for source in receiving.sources.values())
            message = f"{seconds:g} s passed " + (f"since the grant; {landed}" if receiving.wish else "in the queue")
            self._stop(receiving, Failure("timeout", phase, message, layer_groups=receiving.groups))
        elif late is not None:
            message = f"the lease of {late.worker} ran out"
            self._stop(receiving, Failure("lease_expired", phase, message, LEASE_HINT, receiving.groups))

    def _settle(self, source: Source, now: float) -> None:
        """Look for proof that nothing touches the pages any more."""
        if not source.session.drives and now >= source.receiving.ended_at + SETTLE_SECONDS:
            self._drive_if_allowed(source, Event.DOUBT)
            self._ask_again(source, now)
        if source.session.state.exposure is Exposure.IN_DOUBT and self._is_proven_quiet(source):
            self._drive_if_allowed(source, Event.SETTLE)

    def _ask_again(self, source: Source, now: float) -> None:
        """A question or its answer may have been lost to a full queue."""
        if source.session.state.exposure is Exposure.IN_DOUBT and now >= source.asked_at + SETTLE_SECONDS:
            self._act(source, Action.SEND_CANCEL)

    def _is_proven_quiet(self, source: Source) -> bool:
        """Reads of our own must have been let go in any case: no proof about the peer covers them."""
        if source.session.drives and not self._driver.abort(source.job):
            return False
        return self._reads_are_over(source) or (source.peer is not None and self._proofs.quiet(source.peer))

    # ---- the session

    def drive(self, source: Source, event: Event) -> None:
        """Move a session, give the pages back when they may be reused, and do what its table asks."""
        receiving = source.receiving
        actions = source.session.apply(event)
        if receiving.ended and not receiving.ended_at:
            receiving.ended_at = self._clock()
            self._ended.remember(receiving.key, receiving.failure or _over(receiving.key))
        if receiving.may_reuse():
            self._release(receiving)
        elif event is Event.DOUBT and receiving.wish is not None:
            self._outbox.put(PagesInDoubt(receiving.key, Side.RECEIVER))
        for action in actions:
            self._act(source, action)

    def _drive_if_allowed(self, source: Source, event: Event) -> None:
        if source.session.allows(event):
            self.drive(source, event)

    def _release(self, receiving: Receiving) -> None:
        if self._receivings.pop(receiving.key, None) is not None and receiving.wish is not None:
            self._outbox.put(PagesReusable(receiving.key, Side.RECEIVER))

    def _act(self, source: Source, action: Action) -> None:
        match action:
            case Action.SEND_GRANT:
                self._send_grant(source)
            case Action.SEND_CANCEL:
                self._send_cancel(source)
            case Action.START:
                self._start(source)
            case Action.ABORT:
                self._abort(source)
            case Action.REPORT:
                self._report(source.receiving)

    def _grant(self, receiving: Receiving, wish: Wish, source: Source) -> None:
        rest = max(0.001, receiving.deadline - self._clock())
        source.grant = Grant(
            receiving.key,
            source.worker,
            self._worker,
            wish.prompt,
            wish.pages,
            rest,
            request_id=wish.request_id,
            direction=wish.direction,
            early=wish.early,
        )
        self.drive(source, Event.GRANT)
        if not source.session.drives:
            self._check_landed(source)

    def _send_grant(self, source: Source) -> None:
        assert source.grant is not None
        if not self._send(source.worker, source.grant):
            self._stop(source.receiving, Failure("peer_lost", Phase.GRANT, f"no channel to {source.worker}"))
            # The grant never left, so nobody was ever allowed to write.
            self._drive_if_allowed(source, Event.SETTLE)

    def _send_cancel(self, source: Source) -> None:
        failure = source.receiving.failure or cancelled("stopped by the receiver")
        fence = source.grant.fence if source.grant is not None else 0
        quiet = source.session.drives and may_reuse(source.session.state)
        source.asked_at = self._clock()
        self._send(source.worker, Cancel(source.receiving.key, self._worker, failure, fence, quiet))

    def _plan(self, source: Source, grant: Grant, permit: Permit) -> TransferPlan:
        assert source.peer is not None
        source.peer.planner.check_pages(grant.prompt.num_tokens, permit.pages)
        check_same_blocks(grant.pages, permit.pages)
        return source.peer.planner.plan(grant.pages, permit.pages)

    def _start(self, source: Source) -> None:
        assert source.grant is not None
        assert source.peer is not None
        assert source.plan is not None
        # The device was done with the pages before they were granted.
        source.job = self._driver.start(Operation.READ, source.plan, source.peer, source.grant, _at_once, source)
        if not source.job.num_slices:
            self.drive(source, Event.MOVED)

    def _abort(self, source: Source) -> None:
        """Take back the reads of a failed attempt; without exposure there is nothing to prove."""
        over = self._reads_are_over(source)
        if source.session.state.exposure is Exposure.EXPOSED:
            self.drive(source, Event.SETTLE if over else Event.DOUBT)

    def _reads_are_over(self, source: Source) -> bool:
        """Whether this side drives, and no read of its own can bring bytes any more."""
        if not source.session.drives or not self._driver.abort(source.job):
            return False
        return source.job is None or not source.job.undelivered

    def _take(self, source: Source, result: TransferResult) -> None:
        source.told_quiet = source.told_quiet or (result.quiet and fencing.is_about(result.fence, source.grant))
        if result.status is not ResultStatus.OK:
            # After a good result it only repeats that the attempt is over there.
            if source.result is None:
                self._stop(source.receiving, result.failure or _silent(result))
            else:
                self._settle_if_told(source)
            return
        if source.grant is None:
            raise RemoteProtocolError("result is ok, but nothing was granted")
        fencing.check_fence(result.fence, source.grant)
        check_content(source, source.grant, result)
        source.landing.expect(result.wire.num_slices)
        if not source.session.allows(Event.RESULT):
            self._settle_if_told(source)
            return
        source.result = result
        self.drive(source, Event.RESULT)
        if not source.session.drives:
            self._check_landed(source)

    def _check_landed(self, source: Source) -> None:
        if source.landing.complete:
            self._drive_if_allowed(source, Event.LANDED)

    def _settle_if_told(self, source: Source) -> None:
        """The writer's own word that nothing is under way is proof, once the attempt is over."""
        if source.told_quiet and not source.session.drives and source.receiving.ended:
            self._drive_if_allowed(source, Event.SETTLE)

    def _stop(self, receiving: Receiving, failure: Failure) -> None:
        """End an attempt without success, with all its sources, unless it already ended."""
        if not receiving.ended:
            receiving.failure = failure
        event = Event.CANCEL if failure.code == "cancelled" else Event.FAIL
        for source in tuple(receiving.sources.values()):
            self.drive(source, event)
            self._settle_if_told(source)

    def _source(self, key: TransferKey, peer: WorkerId) -> Source | None:
        receiving = self._receivings.get(key)
        return receiving.sources.get(peer) if receiving is not None else None

    def _sources_of(self, peer: WorkerId) -> list[Source]:
        return [r.sources[peer] for r in tuple(self._receivings.values()) if peer in r.sources]

    def _report(self, receiving: Receiving) -> None:
        """Tell the engine once: at the first failure, or when all sources are done."""
        if receiving.reported or not receiving.ended:
            return
        receiving.reported = True
        senders = ", ".join(str(worker) for worker in receiving.sources)
        failure, key = receiving.failure, receiving.key
        error = error_of(key, senders, str(self._worker), senders, failure) if failure is not None else None
        seconds = receiving.ended_at - receiving.started_at
        aux = None if failure is not None else self._aux(receiving)
        self._outbox.put(TransferOutcome(key, Side.RECEIVER, error, self._wire(receiving), seconds, aux))

    def _aux(self, receiving: Receiving) -> AuxRecord | None:
        return next((source.result.aux for source in receiving.sources.values() if source.result is not None), None)

    def _wire(self, receiving: Receiving) -> WireReport:
        """Of the first source that moved anything; with pull the reads are our own."""
        for source in receiving.sources.values():
            if source.job is not None:
                return self._driver.report(source.job, source.plan)
            if source.result is not None:
                return source.result.wire
        return WireReport()


def _at_once() -> bool:
    return True


def _agent(source: Source) -> str | None:
    return source.peer.agent if source.peer is not None else None


def _over(key: TransferKey) -> Failure:
    return Failure(SERVED, Phase.ADMISSION, f"transfer {key} was received here already", KEY_HINT)


def _not_here(key: TransferKey) -> Failure:
    return Failure("unknown_transfer", Phase.WIRE, f"transfer {key} is not open here")


def _silent(result: TransferResult) -> Failure:
    code = "cancelled" if result.status is ResultStatus.CANCELLED else "failed"
    return Failure(code, Phase.RESULT, f"{result.sender} gave no reason")
