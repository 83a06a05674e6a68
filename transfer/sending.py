"""The sending side of transfers: pages offered, granted a destination, moved, answered for."""

import logging
from collections.abc import Callable, Iterator

from kvferry.cache.errors import RemoteProtocolError
from kvferry.transfer import fencing
from kvferry.transfer.attempts import Offer, Sending
from kvferry.transfer.driving import Driver
from kvferry.transfer.ended import BROKEN_HINT, KEY_HINT, LEASE_HINT, SERVED, EndedAttempts
from kvferry.transfer.leases import Leases
from kvferry.transfer.notice import Notice
from kvferry.transfer.outcomes import (
    HangUp,
    Outbox,
    PagesInDoubt,
    PagesReusable,
    SendMessage,
    TransferOutcome,
    error_of,
)
from kvferry.transfer.peers import Peer, PeerBook
from kvferry.transfer.plan import groups_of
from kvferry.transfer.proofs import SETTLE_SECONDS, Proofs
from kvferry.transfer.session import Action, Event, Exposure, Outcome, may_reuse
from kvferry.transfer.transport.base import Operation
from kvferry.transfer.types import (
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

MAX_UNDELIVERED = 65536
"""Attempts remembered as possibly on their way; each is a write that failed after it was handed over."""

MAX_EARLY_GRANTS = 1024
"""Grants that may wait for a prompt nobody has offered yet."""

_HOLD_HINT = "look why no decode worker asks for the prompt, or raise transfer.hold_seconds"


class Sender:
    """All attempts this worker sends.

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
        leases: Leases,
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
        self._leases = leases
        self._undelivered: set[TransferKey] = set()
        self._sendings: dict[TransferKey, Sending] = {}

    @property
    def num_open(self) -> int:
        """Attempts whose pages may not be reused yet."""
        return len(self._sendings)

    def peers(self) -> set[WorkerId]:
        """Receivers that an open attempt is granted to, or that stand by one."""
        return {sending.receiver for sending in self._sendings.values() if sending.receiver is not None}

    def renewals(self) -> Iterator[tuple[WorkerId, TransferKey]]:
        """Attempts this side stands by, and who counts on them."""
        for sending in self._sendings.values():
            if sending.receiver is not None and not sending.ended:
                yield sending.receiver, sending.key

    # ---- from the engine

    def offer(self, offer: Offer) -> None:
        """Wait for a grant, or serve the one that came before, until the offer's deadline."""
        stopped = self._ended.find(offer.key)
        sending = self._sendings.get(offer.key)
        if sending is None:
            sending = self._open(offer.key, offer.deadline, offer.hold_until)
        sending.offer = offer
        if stopped is not None:
            self._stop(sending, stopped)
        else:
            self._match(sending, Event.OFFER)

    def stop(self, key: TransferKey, failure: Failure) -> bool:
        """End an attempt without success. Returns whether it is known here."""
        sending = self._sendings.get(key)
        if sending is not None:
            self._stop(sending, failure)
        return sending is not None

    def fail(self, sending: Sending, failure: Failure) -> None:
        """End an attempt without success, unless it already ended."""
        sending.failure = sending.failure or failure
        self.drive(sending, Event.FAIL)

    def fail_all(self, failure: Failure) -> None:
        for sending in tuple(self._sendings.values()):
            self.fail(sending, failure)

    # ---- from the receiver

    def on_grant(self, peer: WorkerId, grant: Grant) -> None:
        """Start moving, keep the grant until there is something to move, or answer why not."""
        sending = self._sendings.get(grant.key) or self._expect(grant)
        if sending is not None and sending.grant is not None and _same(sending.grant, grant):
            return
        if sending is None or not sending.session.allows(Event.GRANT):
            self._refuse(peer, grant, sending)
            return
        sending.grant = grant
        sending.session.direction = grant.direction
        sending.deadline = self._clock() + grant.timeout_seconds
        # Renewals move it; until the first of them only the deadline counts.
        sending.lease_until = sending.deadline
        try:
            sending.peer = self._peer(grant)
            sending.peer.planner.check_pages(grant.prompt.num_tokens, grant.pages)
        except RemoteProtocolError as error:
            self.fail(sending, Failure("bad_grant", Phase.GRANT, str(error)))
            return
        # From now on the receiver counts on renewals: should the result be lost, it need not wait for its deadline.
        self._send(peer, self._leases.renewal(Side.SENDER, grant.key))
        self._match(sending, Event.GRANT)

    def on_cancel(self, peer: WorkerId, cancel: Cancel) -> None:
        """Stop an attempt on its receiver's request.

        With push the receiver hears whether its pages are quiet: now, or when it is known.
        """
        sending = self._sendings.get(cancel.key)
        if sending is None:
            self._ended.remember(cancel.key, cancel.failure)
            if not cancel.quiet:
                failure = _not_open(cancel.key)
                quiet = self._is_delivered(cancel.key)
                self._send(peer, self._refusal(peer, cancel.key, cancel.fence, failure, quiet=quiet))
        elif sending.receiver in (None, peer):
            sending.guest, sending.guest_fence = peer, cancel.fence
            sending.told_quiet = sending.told_quiet or (cancel.quiet and fencing.is_about(cancel.fence, sending.grant))
            self._stop(sending, cancel.failure)
        else:
            log.warning("%s cancelled transfer %s, which is %s's", peer, cancel.key, sending.receiver)
            failure = Failure("unknown_transfer", Phase.WIRE, f"transfer {cancel.key} is not {peer}'s")
            quiet = self._is_delivered(cancel.key)
            self._send(peer, self._refusal(peer, cancel.key, cancel.fence, failure, quiet=quiet))

    def on_renewal(self, peer: WorkerId, key: TransferKey, lease_seconds: float) -> None:
        """The receiver stands by an attempt. One that failed here is answered; one that never began may still come.

        One that went well is not: its result is on the way, or was lost, and then the receiver's lease runs out.
        """
        sending = self._sendings.get(key)
        failure = self._ended.find(key)
        if sending is None and failure is not None and failure.code != SERVED:
            self._send(peer, self._refusal(peer, key, 0, failure, quiet=self._is_delivered(key)))
        elif sending is not None and sending.receiver in (None, peer):
            sending.guest = peer
            sending.lease_until = self._clock() + lease_seconds

    def on_notice(self, agent: str, notice: Notice) -> bool:
        """Count a read that is over. Returns whether the attempt is one of these. Raises RemoteProtocolError."""
        sending = self._sendings.get(notice.key)
        if sending is None:
            return False
        grant, peer = sending.grant, sending.peer
        if grant is None or peer is None or peer.agent != agent or sending.session.drives:
            raise RemoteProtocolError(f"transfer {notice.key} permits {agent} no reads")
        fencing.check_life(notice.incarnation, self._worker)
        fencing.check_fence(notice.fence, grant)
        sending.landing.note(notice)
        self._check_landed(sending)
        return True

    def on_channel_up(self, peer: WorkerId) -> None:
        """Say again how attempts ended whose reads may not be over: the answer says whether they are."""
        for sending in tuple(self._sendings.values()):
            if sending.receiver == peer and sending.ended and not sending.session.drives:
                self._answer(sending)

    def on_channel_lost(self, peer: WorkerId, reason: str) -> None:
        """Fail every attempt of this peer. Without a channel no word of it will come: what it may read is in doubt."""
        for sending in tuple(self._sendings.values()):
            if sending.receiver == peer and sending.grant is not None:
                self.fail(
                    sending, Failure("peer_lost", Phase.WIRE, reason, layer_groups=groups_of(sending.grant.pages))
                )
                if not sending.session.drives:
                    self._drive_if_allowed(sending, Event.DOUBT)

    # ---- from the transport and the clock

    def on_post_failed(self, sending: Sending, message: str) -> None:
        """Fail an attempt and have the lane to its receiver wired again: after one failed write none can be trusted."""
        assert sending.grant is not None
        failure = Failure("write_failed", Phase.WIRE, message, BROKEN_HINT, groups_of(sending.grant.pages))
        self.fail(sending, failure)
        self._peers.mark_broken(sending.grant.receiver)
        self._hang_up(sending.grant.receiver, f"a write failed: {message}")

    def expire(self, now: float) -> None:
        """Fail overdue attempts and try again to settle those that may still be touched."""
        for sending in tuple(self._sendings.values()):
            if not sending.ended:
                self._check_time(sending, now)
            elif sending.session.drives:
                self._settle_posts(sending)
            else:
                self._settle_reads(sending, now)

    def _check_time(self, sending: Sending, now: float) -> None:
        phase = Phase.GRANT if sending.grant is None else Phase.WIRE
        groups = groups_of(sending.grant.pages) if sending.grant is not None else ()
        if now >= sending.deadline:
            message = "no grant came in time" if sending.grant is None else "the pages were not moved in time"
            self.fail(sending, Failure("timeout", phase, message, layer_groups=groups))
        elif now >= sending.lease_until:
            message, hint = f"the lease of {sending.receiver} ran out", LEASE_HINT
            if sending.receiver is None:
                message, hint = "no receiver gave a sign of life in time", _HOLD_HINT
            self.fail(sending, Failure("lease_expired", phase, message, hint, groups))

    def _settle_posts(self, sending: Sending) -> None:
        if sending.session.state.exposure is Exposure.IN_DOUBT and self._driver.abort(sending.job):
            self.drive(sending, Event.SETTLE)

    def _settle_reads(self, sending: Sending, now: float) -> None:
        if now >= sending.ended_at + SETTLE_SECONDS:
            self._drive_if_allowed(sending, Event.DOUBT)
        if sending.session.state.exposure is not Exposure.IN_DOUBT or sending.peer is None:
            return
        if self._proofs.quiet(sending.peer):
            self.drive(sending, Event.SETTLE)
        elif now >= sending.asked_at + SETTLE_SECONDS:
            # The question or its answer may have been lost to a full queue.
            self._answer(sending)

    # ---- the session

    def drive(self, sending: Sending, event: Event) -> None:
        """Move the session, give its pages back when they may be reused, and do what its table asks."""
        ended_before = sending.ended
        actions = sending.session.apply(event)
        if sending.ended and not ended_before:
            sending.ended_at = self._clock()
            self._ended.remember(sending.key, sending.failure or _over(sending.key))
        if may_reuse(sending.session.state):
            self._release(sending)
        elif event is Event.DOUBT and sending.offer is not None:
            self._outbox.put(PagesInDoubt(sending.key, Side.SENDER))
        for action in actions:
            self._act(sending, action)

    def _drive_if_allowed(self, sending: Sending, event: Event) -> None:
        if sending.session.allows(event):
            self.drive(sending, event)

    def _release(self, sending: Sending) -> None:
        if self._sendings.pop(sending.key, None) is not None:
            self._note_undelivered(sending)
            if sending.offer is not None:
                self._outbox.put(PagesReusable(sending.key, Side.SENDER))

    def _act(self, sending: Sending, action: Action) -> None:
        match action:
            case Action.START:
                self._start(sending)
            case Action.ABORT:
                self._abort(sending)
            case Action.SEND_PERMIT:
                self._permit(sending)
            case Action.SEND_RESULT:
                self._answer(sending)
            case Action.REPORT:
                self._report(sending)

    def _open(self, key: TransferKey, deadline: float, lease_until: float) -> Sending:
        sending = Sending(self, key, deadline, lease_until)
        self._sendings[key] = sending
        return sending

    def _expect(self, grant: Grant) -> Sending | None:
        """Generation-first: the prompt of this grant is not computed yet."""
        waiting = sum(sending.offer is None for sending in self._sendings.values())
        if not grant.early or waiting >= MAX_EARLY_GRANTS or self._ended.find(grant.key) is not None:
            return None
        deadline = self._clock() + grant.timeout_seconds
        return self._open(grant.key, deadline, deadline)

    def _match(self, sending: Sending, event: Event) -> None:
        """Take in one of offer and grant; once both are there, they must be about the same prompt."""
        if sending.offer is not None and sending.grant is not None:
            try:
                self._plan(sending, sending.offer, sending.grant)
            except RemoteProtocolError as error:
                self.fail(sending, Failure("bad_grant", Phase.GRANT, str(error)))
                return
        self.drive(sending, event)

    def _plan(self, sending: Sending, offer: Offer, grant: Grant) -> None:
        peer = self._peer(grant)
        if grant.prompt != offer.prompt:
            raise RemoteProtocolError(f"grant is for {grant.prompt}, computed was {offer.prompt}")
        if grant.request_id != offer.request_id:
            raise RemoteProtocolError(f"grant is for request {grant.request_id!r}, computed was {offer.request_id!r}")
        sending.plan = peer.planner.plan(offer.pages, grant.pages)

    def _peer(self, grant: Grant) -> Peer:
        peer = self._peers.find(grant.receiver)
        fencing.check_life(grant.sender.incarnation, self._worker)
        if grant.sender.name != self._worker.name or peer is None:
            raise RemoteProtocolError(
                f"grant names sender {grant.sender} and receiver {grant.receiver}, this is {self._worker}, "
                f"which is {'not ' if peer is None else ''}paired with that receiver"
            )
        return peer

    def _start(self, sending: Sending) -> None:
        assert sending.grant is not None
        assert sending.offer is not None
        assert sending.peer is not None
        assert sending.plan is not None
        sending.job = self._driver.start(
            Operation.WRITE, sending.plan, sending.peer, sending.grant, sending.offer.ready, sending
        )
        if not sending.job.num_slices:
            self.drive(sending, Event.MOVED)

    def _abort(self, sending: Sending) -> None:
        """Take back the writes of a failed attempt; without exposure there is nothing to prove."""
        quiet = self._driver.abort(sending.job)
        if sending.session.state.exposure is Exposure.EXPOSED:
            self.drive(sending, Event.SETTLE if quiet else Event.DOUBT)

    def _permit(self, sending: Sending) -> None:
        assert sending.grant is not None
        assert sending.offer is not None
        assert sending.peer is not None
        grant = sending.grant
        pages = sending.peer.planner.permit(sending.offer.pages, grant.pages)
        rest = max(0.001, sending.deadline - self._clock())
        permit = Permit(grant.key, self._worker, grant.receiver, grant.fence, pages, rest)
        if not self._send(grant.receiver, permit):
            self.fail(sending, Failure("peer_lost", Phase.GRANT, f"no channel to {grant.receiver}"))
            # The permit never left, so nobody was ever allowed to read.
            self._drive_if_allowed(sending, Event.SETTLE)
        elif not grant.pages.num_pages:
            sending.landing.expect(0)
            self._check_landed(sending)

    def _check_landed(self, sending: Sending) -> None:
        if sending.landing.complete:
            self._drive_if_allowed(sending, Event.LANDED)

    def _stop(self, sending: Sending, failure: Failure) -> None:
        """End an attempt for a reason from elsewhere: cancelled, or failed there."""
        sending.failure = sending.failure or failure
        self.drive(sending, Event.CANCEL if failure.code == "cancelled" else Event.FAIL)
        if sending.told_quiet and not sending.session.drives:
            self._drive_if_allowed(sending, Event.SETTLE)

    # ---- answers

    def _answer(self, sending: Sending) -> None:
        sending.asked_at = self._clock()
        if sending.receiver is not None:
            self._send(sending.receiver, self._result(sending, sending.receiver))

    def _result(self, sending: Sending, receiver: WorkerId) -> TransferResult:
        outcome = sending.session.state.outcome
        status = {Outcome.DONE: ResultStatus.OK, Outcome.CANCELLED: ResultStatus.CANCELLED}.get(
            outcome, ResultStatus.FAILED
        )
        ok = status is ResultStatus.OK
        return TransferResult(
            key=sending.key,
            sender=self._worker,
            receiver=receiver,
            status=status,
            fence=sending.grant.fence if sending.grant is not None else sending.guest_fence,
            quiet=self._is_quiet(sending),
            wire=self._wire(sending),
            aux=sending.offer.aux if ok and sending.offer is not None else None,
            failure=None if ok else sending.failure,
        )

    def _is_quiet(self, sending: Sending) -> bool:
        """Whether no write of ours and, as far as is known, no read of the receiver's is under way any more."""
        undelivered = sending.job is not None and sending.job.undelivered
        return may_reuse(sending.session.state) and not undelivered

    def _refuse(self, peer: WorkerId, grant: Grant, sending: Sending | None) -> None:
        """Answer a grant that cannot be served without touching the attempt, if there is one."""
        failure = self._ended.find(grant.key) or _not_open(grant.key)
        if sending is not None:
            state = f"transfer {grant.key} is being served already ({sending.session.state})"
            failure = Failure(SERVED, Phase.GRANT, state, KEY_HINT)
        log.warning("grant from %s refused: %s", peer, failure.message)
        if sending is None:
            # The answer says that nothing was and will be written: so it must stay.
            self._ended.remember(grant.key, failure)
        # A grant that was never served exposes nothing, unless it repeats one that was.
        quiet = self._is_delivered(grant.key) if sending is None else sending.receiver != peer
        self._send(peer, self._refusal(peer, grant.key, grant.fence, failure, quiet=quiet))

    def _note_undelivered(self, sending: Sending) -> None:
        """Remember an attempt whose bytes may still be on their way.

        For good: its receiver may be away for long, come back, and ask.
        """
        if sending.job is not None and sending.job.undelivered and len(self._undelivered) < MAX_UNDELIVERED:
            self._undelivered.add(sending.key)

    def _is_delivered(self, key: TransferKey) -> bool:
        """Whether no byte of an attempt that is over is on its way. Too many to remember: none is known to be."""
        return key not in self._undelivered and len(self._undelivered) < MAX_UNDELIVERED

    def _refusal(
        self, peer: WorkerId, key: TransferKey, fence: int, failure: Failure, *, quiet: bool
    ) -> TransferResult:
        return TransferResult(key, self._worker, peer, ResultStatus.FAILED, fence, quiet=quiet, failure=failure)

    def _wire(self, sending: Sending) -> WireReport:
        """With pull the receiver knows what it cost; the pages are what it granted."""
        if sending.session.drives or sending.plan is None or not sending.plan.num_pages:
            return self._driver.report(sending.job, sending.plan)
        slices = sending.landing.num_slices or 0
        return WireReport(num_slices=slices, num_pages=sending.plan.num_pages, num_bytes=sending.plan.num_bytes)

    def _report(self, sending: Sending) -> None:
        """Also when nothing was offered yet: whoever computes the prompt may stop."""
        failed, receiver = sending.session.state.outcome is not Outcome.DONE, str(sending.receiver or "")
        failure = sending.failure if failed else None
        error = error_of(sending.key, str(self._worker), receiver, receiver, failure) if failure else None
        wire = self._wire(sending)
        self._outbox.put(TransferOutcome(sending.key, Side.SENDER, error, wire, wire.seconds))


def _same(one: Grant, other: Grant) -> bool:
    """Whether a grant repeats another: said twice, it changes nothing."""
    return (one.receiver, one.fence, one.direction) == (other.receiver, other.fence, other.direction)


def _over(key: TransferKey) -> Failure:
    return Failure(SERVED, Phase.GRANT, f"transfer {key} was served already", KEY_HINT)


def _not_open(key: TransferKey) -> Failure:
    return Failure("unknown_transfer", Phase.GRANT, f"transfer {key} is unknown here", KEY_HINT)
