"""The sending side of transfers: pages offered, granted a destination, written, answered for."""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.cache.errors import RemoteProtocolError, TransportError
from kvferry.cache.page_table import BlockLists
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
from kvferry.transfer.plan import TransferPlan
from kvferry.transfer.session import Action, Event, Exposure, Session, Side, may_reuse
from kvferry.transfer.transport.base import Transport
from kvferry.transfer.types import (
    AuxRecord,
    Failure,
    Grant,
    Phase,
    PromptId,
    ResultStatus,
    TransferKey,
    TransferResult,
    WireReport,
    WorkerId,
)
from kvferry.transfer.writer import WriteJob, Writer

log = logging.getLogger(__name__)

MAX_UNDELIVERED = 65536
"""Attempts remembered as possibly on their way; each is a write that failed after it was handed over."""


@dataclass(frozen=True)
class Offer:
    """A computed prompt whose pages wait for a grant.

    Attributes:
        deadline: on the transceiver's clock, in seconds; without a grant by then the pages are released.
        ready: whether the pages' bytes are final (a device event); always true on cpu.
    """

    key: TransferKey
    prompt: PromptId
    pages: BlockLists
    aux: AuxRecord
    deadline: float
    ready: Callable[[], bool]


@dataclass(eq=False)
class Sending:
    """One attempt on the sending side. Also the listener of its writes."""

    owner: "Sender"
    offer: Offer
    deadline: float
    session: Session = field(default_factory=lambda: Session(Side.SENDER))
    grant: Grant | None = None
    job: WriteJob | None = None
    plan: TransferPlan | None = None
    failure: Failure | None = None
    canceller: WorkerId | None = None

    @property
    def receiver(self) -> WorkerId | None:
        """Who hears how it ended: who was granted, or who cancelled before that."""
        return self.grant.receiver if self.grant is not None else self.canceller

    def posted(self) -> None:
        self.owner.drive(self, Event.POST)

    def written(self) -> None:
        self.owner.drive(self, Event.WRITTEN)

    def failed(self, message: str) -> None:
        self.owner.on_write_failed(self, message)


class Sender:
    """All attempts this worker sends.

    Concurrency: the thread that owns the transport.
    """

    def __init__(
        self,
        worker: WorkerId,
        transport: Transport,
        peers: PeerBook,
        send: SendMessage,
        outbox: Outbox,
        clock: Callable[[], float],
        slice_bytes: int,
        hang_up: HangUp,
    ) -> None:
        self._worker = worker
        self._transport = transport
        self._peers = peers
        self._send = send
        self._outbox = outbox
        self._clock = clock
        self._slice_bytes = slice_bytes
        self._hang_up = hang_up
        self._undelivered: set[TransferKey] = set()
        self._sendings: dict[TransferKey, Sending] = {}
        self.writer = Writer(transport, clock)

    @property
    def num_open(self) -> int:
        """Attempts whose pages may not be reused yet."""
        return len(self._sendings)

    def peers(self) -> set[WorkerId]:
        """Receivers that an open attempt is granted to."""
        return {sending.grant.receiver for sending in self._sendings.values() if sending.grant is not None}

    def offer(self, offer: Offer) -> None:
        """Wait for a grant until the offer's deadline."""
        self._sendings[offer.key] = Sending(self, offer, offer.deadline)

    def on_grant(self, peer: WorkerId, grant: Grant) -> None:
        """Start writing, or answer why not."""
        sending = self._sendings.get(grant.key)
        if sending is None or not sending.session.allows(Event.GRANT):
            self._refuse(peer, grant, sending)
            return
        sending.grant = grant
        sending.deadline = self._clock() + grant.timeout_seconds
        try:
            sending.plan = self._plan(sending, grant)
        except RemoteProtocolError as error:
            self.fail(sending, Failure("bad_grant", Phase.GRANT, str(error)))
            return
        self.drive(sending, Event.GRANT)

    def cancel(self, key: TransferKey, reason: str) -> None:
        """Stop an attempt; unknown ones are ignored."""
        sending = self._sendings.get(key)
        if sending is not None:
            self._cancel(sending, reason)

    def on_cancel(self, peer: WorkerId, key: TransferKey, reason: str) -> None:
        """Stop an attempt on a peer's request. The peer hears whether its pages are quiet: now, or when it is known."""
        sending = self._sendings.get(key)
        if sending is None:
            failure = Failure("unknown_transfer", Phase.WIRE, f"transfer {key} is not, or no longer, open here")
            self._send(peer, self._refusal(peer, key, (), failure, quiet=self._is_delivered(key)))
        elif sending.receiver in (None, peer):
            sending.canceller = peer
            self._cancel(sending, reason)
        else:
            log.warning("%s cancelled transfer %s, which is granted to %s: ignored", peer, key, sending.receiver)

    def on_write_failed(self, sending: Sending, message: str) -> None:
        """Fail an attempt and have the lane to its receiver wired again: after one failed write none can be trusted."""
        self.fail(sending, Failure("write_failed", Phase.WIRE, message))
        if sending.grant is not None:
            self._peers.mark_broken(sending.grant.receiver)
            self._hang_up(sending.grant.receiver, f"a write failed: {message}")

    def on_channel_lost(self, peer: WorkerId, reason: str) -> None:
        """Fail every attempt that is granted to this peer."""
        for sending in tuple(self._sendings.values()):
            if sending.grant is not None and sending.grant.receiver == peer:
                self.fail(sending, Failure("peer_lost", Phase.WIRE, reason))

    def fail(self, sending: Sending, failure: Failure) -> None:
        """End an attempt without success, unless it already ended."""
        sending.failure = sending.failure or failure
        self.drive(sending, Event.FAIL)

    def fail_all(self, failure: Failure) -> None:
        for sending in tuple(self._sendings.values()):
            self.fail(sending, failure)

    def expire(self, now: float) -> None:
        """Fail overdue attempts and try again to settle those whose writes could not be taken back."""
        for sending in tuple(self._sendings.values()):
            if now >= sending.deadline and not sending.session.state.outcome.terminal:
                message = "no grant came in time" if sending.grant is None else "the writes did not end in time"
                self.fail(sending, Failure("timeout", Phase.GRANT if sending.grant is None else Phase.WIRE, message))
            elif sending.session.state.exposure is Exposure.IN_DOUBT and self._abort(sending):
                self.drive(sending, Event.SETTLE)

    def drive(self, sending: Sending, event: Event) -> None:
        """Move the session, give its pages back when they may be reused, and do what its table asks."""
        actions = sending.session.apply(event)
        if may_reuse(sending.session.state) and self._sendings.pop(sending.offer.key, None) is not None:
            self._note_undelivered(sending)
            self._outbox.put(PagesReusable(sending.offer.key, Side.SENDER))
        for action in actions:
            self._act(sending, action)

    def _act(self, sending: Sending, action: Action) -> None:
        if action is Action.START_WRITES:
            self._start(sending)
        elif action is Action.ABORT_WRITES:
            self._try_settle(sending)
        elif action is Action.SEND_RESULT:
            self._answer(sending)
        elif action is Action.REPORT:
            self._report(sending)

    def _plan(self, sending: Sending, grant: Grant) -> TransferPlan:
        peer = self._peer(grant)
        if grant.prompt != sending.offer.prompt:
            raise RemoteProtocolError(f"grant is for {grant.prompt}, computed was {sending.offer.prompt}")
        peer.planner.check_grant(grant.prompt.num_tokens, grant.pages)
        return peer.planner.plan(sending.offer.pages, grant.pages)

    def _peer(self, grant: Grant) -> Peer:
        peer = self._peers.find(grant.receiver)
        if grant.sender != self._worker or peer is None:
            raise RemoteProtocolError(
                f"grant names sender {grant.sender} and receiver {grant.receiver}, this is {self._worker}, "
                f"which is {'not ' if peer is None else ''}paired with that receiver"
            )
        return peer

    def _start(self, sending: Sending) -> None:
        assert sending.grant is not None
        assert sending.plan is not None
        peer = self._peer(sending.grant)
        incarnation = sending.grant.receiver.incarnation
        slices = deque(sending.plan.slices(self._slice_bytes))
        count = len(slices)
        sending.job = WriteJob(
            peer=peer.agent,
            local=self._peers.own_runs,
            remote=peer.runs,
            slices=slices,
            notification=lambda index: Notice(sending.offer.key, incarnation, index, count).pack(),
            ready=sending.offer.ready,
            listener=sending,
        )
        if slices:
            self.writer.add(sending.job)
        else:
            self.drive(sending, Event.WRITTEN)

    def _abort(self, sending: Sending) -> bool:
        return sending.job is None or self.writer.abort(sending.job)

    def _try_settle(self, sending: Sending) -> None:
        """Take back the writes of a failed attempt; without exposure there is nothing to prove."""
        quiet = self._abort(sending)
        if sending.session.state.exposure is Exposure.EXPOSED:
            self.drive(sending, Event.SETTLE if quiet else Event.DOUBT)

    def _cancel(self, sending: Sending, reason: str) -> None:
        sending.failure = sending.failure or Failure("cancelled", Phase.WIRE, reason)
        self.drive(sending, Event.CANCEL)

    def _answer(self, sending: Sending) -> None:
        if sending.receiver is not None:
            self._send(sending.receiver, self._result(sending, sending.receiver))

    def _result(self, sending: Sending, receiver: WorkerId) -> TransferResult:
        outcome = sending.session.state.outcome.value
        status = {"done": ResultStatus.OK, "cancelled": ResultStatus.CANCELLED}.get(outcome, ResultStatus.FAILED)
        undelivered = sending.job is not None and sending.job.undelivered
        return TransferResult(
            key=sending.offer.key,
            sender=self._worker,
            receiver=receiver,
            status=status,
            epochs=_epochs(sending.grant) if sending.grant is not None else (),
            quiet=may_reuse(sending.session.state) and not undelivered,
            wire=self._wire(sending),
            aux=sending.offer.aux if status is ResultStatus.OK else None,
            failure=None if status is ResultStatus.OK else sending.failure,
        )

    def _refuse(self, peer: WorkerId, grant: Grant, sending: Sending | None) -> None:
        """Answer a grant that cannot be served without touching the attempt, if there is one."""
        state = "unknown here: expired, cancelled or never offered" if sending is None else sending.session.state
        failure = Failure("unknown_transfer", Phase.GRANT, f"transfer {grant.key} is {state}")
        log.warning("grant from %s refused: %s", peer, failure.message)
        # A grant that was never served exposes nothing, unless it repeats one that was.
        quiet = self._is_delivered(grant.key) if sending is None else sending.receiver != peer
        self._send(peer, self._refusal(peer, grant.key, _epochs(grant), failure, quiet=quiet))

    def _note_undelivered(self, sending: Sending) -> None:
        """Remember an attempt whose bytes may still be on their way.

        For good: its receiver may be away for long, come back, and ask.
        """
        if sending.job is not None and sending.job.undelivered and len(self._undelivered) < MAX_UNDELIVERED:
            self._undelivered.add(sending.offer.key)

    def _is_delivered(self, key: TransferKey) -> bool:
        """Whether no byte of an attempt that is over is on its way. Too many to remember: none is known to be."""
        return key not in self._undelivered and len(self._undelivered) < MAX_UNDELIVERED

    def _refusal(
        self, peer: WorkerId, key: TransferKey, epochs: tuple[bytes, ...], failure: Failure, *, quiet: bool
    ) -> TransferResult:
        return TransferResult(key, self._worker, peer, ResultStatus.FAILED, epochs, quiet=quiet, failure=failure)

    def _wire(self, sending: Sending) -> WireReport:
        job, plan = sending.job, sending.plan
        if job is None or plan is None or not job.num_slices:
            return WireReport()
        return WireReport(
            num_slices=job.num_slices,
            num_pages=plan.num_pages,
            num_bytes=plan.num_bytes,
            num_descriptors=job.num_descriptors,
            seconds=max(0.0, job.ended_at - job.started_at),
            lane=self._lane(job.peer),
        )

    def _lane(self, agent: str) -> str:
        """The lane of the last write; a peer that was forgotten meanwhile has none any more."""
        try:
            return self._transport.lane(agent)
        except TransportError:
            return "unknown"

    def _report(self, sending: Sending) -> None:
        key, failure = sending.offer.key, sending.failure
        state = sending.session.state
        peer = str(sending.grant.receiver) if sending.grant else ""
        error = error_of(key, peer, failure) if failure and state.outcome.value != "done" else None
        wire = self._wire(sending)
        self._outbox.put(TransferOutcome(key, Side.SENDER, error, wire, wire.seconds))
        if state.exposure is Exposure.IN_DOUBT:
            self._outbox.put(PagesInDoubt(key, Side.SENDER))


def _epochs(grant: Grant) -> tuple[bytes, ...]:
    return tuple(epochs.tobytes() for epochs in grant.pages.epochs)
