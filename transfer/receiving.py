"""The receiving side of transfers: pages granted, written by the peer, complete when notices and result are in."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.cache.errors import RemoteProtocolError
from kvferry.transfer.notice import Notice
from kvferry.transfer.outcomes import Outbox, PagesInDoubt, PagesReusable, SendMessage, TransferOutcome, error_of
from kvferry.transfer.peers import PeerBook
from kvferry.transfer.session import Action, Event, Exposure, Session, Side, may_reuse
from kvferry.transfer.transport.base import Notification
from kvferry.transfer.types import (
    Cancel,
    Failure,
    Grant,
    Phase,
    ResultStatus,
    TransferKey,
    TransferResult,
    WireReport,
    WorkerId,
)

log = logging.getLogger(__name__)

SETTLE_SECONDS = 5.0
"""How long after a failure the sender may take to prove quiet before the pages count as in doubt."""


@dataclass(eq=False)
class Receiving:
    """One attempt on the receiving side."""

    grant: Grant
    deadline: float
    started_at: float
    ready: Callable[[], bool]
    session: Session = field(default_factory=lambda: Session(Side.RECEIVER))
    landed: set[int] = field(default_factory=set)
    num_slices: int | None = None
    result: TransferResult | None = None
    failure: Failure | None = None
    quiet: bool = False
    ended_at: float = 0.0

    @property
    def ended(self) -> bool:
        return self.session.state.outcome.terminal


class Receiver:
    """All attempts this worker receives.

    Concurrency: the thread that owns the transport.
    """

    def __init__(
        self,
        worker: WorkerId,
        peers: PeerBook,
        send: SendMessage,
        outbox: Outbox,
        clock: Callable[[], float],
    ) -> None:
        self._worker = worker
        self._peers = peers
        self._send = send
        self._outbox = outbox
        self._clock = clock
        self._receivings: dict[TransferKey, Receiving] = {}
        self._unready: list[Receiving] = []

    @property
    def waiting(self) -> bool:
        """Whether some attempt is not over: its data may arrive any moment."""
        return any(not receiving.ended for receiving in self._receivings.values())

    def peers(self) -> set[WorkerId]:
        """Senders that an open attempt is granted to."""
        return {receiving.grant.sender for receiving in self._receivings.values()}

    def request(self, grant: Grant, now: float, ready: Callable[[], bool]) -> None:
        """Send a grant as soon as `ready` and wait for the pages until its timeout, counted from `now`."""
        receiving = Receiving(grant, now + grant.timeout_seconds, now, ready)
        # Without a page nobody can write anything, so there is nothing to wait for but the result.
        receiving.num_slices = None if grant.pages.num_pages else 0
        self._receivings[grant.key] = receiving
        if self._peers.find(grant.sender) is None:
            self._fail(receiving, Failure("peer_lost", Phase.GRANT, f"{grant.sender} is not a paired peer"))
            return
        self._unready.append(receiving)
        self.grant_ready()

    def grant_ready(self) -> None:
        """Send the grants whose pages the device is done with; an attempt that ended meanwhile needs none."""
        waiting, self._unready = self._unready, []
        for receiving in waiting:
            if receiving.ended:
                continue
            if receiving.ready():
                self._drive(receiving, Event.GRANT)
                self._check_landed(receiving)
            else:
                self._unready.append(receiving)

    def on_notification(self, notification: Notification) -> None:
        """Count a slice that landed. Notices for other lives, other attempts or from other peers are refused."""
        try:
            notice = Notice.unpack(notification.payload)
            receiving = self._expected(notification.peer, notice)
        except RemoteProtocolError as error:
            log.warning("notification from %s refused: %s", notification.peer, error)
            return
        receiving.num_slices = notice.num_slices
        receiving.landed.add(notice.slice_index)
        self._check_landed(receiving)

    def on_result(self, peer: WorkerId, result: TransferResult) -> None:
        """Take the sender's last word; results for another life or of other pages are refused."""
        receiving = self._receivings.get(result.key)
        if receiving is None:
            return
        try:
            _check_origin(receiving.grant, peer, result)
            if result.status is ResultStatus.OK:
                _check_content(receiving, result)
        except RemoteProtocolError as error:
            self._fail(receiving, Failure("bad_result", Phase.RESULT, str(error)))
            return
        receiving.quiet = receiving.quiet or result.quiet
        if result.status is ResultStatus.OK:
            self._accept(receiving, result)
        else:
            self._fail(receiving, result.failure or Failure("failed", Phase.RESULT, "the sender gave no reason"))

    def cancel(self, key: TransferKey, reason: str) -> None:
        """Stop an attempt; unknown ones are ignored."""
        receiving = self._receivings.get(key)
        if receiving is not None:
            receiving.failure = receiving.failure or Failure("cancelled", Phase.WIRE, reason)
            self._drive(receiving, Event.CANCEL)
            self._settle_if_quiet(receiving)

    def on_channel_up(self, peer: WorkerId) -> None:
        """Ask again about attempts that ended without proof: the answer says whether their pages are quiet."""
        for receiving in tuple(self._receivings.values()):
            if receiving.grant.sender == peer and receiving.ended:
                self._act(receiving, Action.SEND_CANCEL)

    def on_channel_lost(self, peer: WorkerId, reason: str) -> None:
        """Fail every attempt of this peer. Without a channel no proof of quiet will come, so its pages are in doubt."""
        for receiving in tuple(self._receivings.values()):
            if receiving.grant.sender == peer:
                self._fail(receiving, Failure("peer_lost", Phase.WIRE, reason))
                self._drive_if_allowed(receiving, Event.DOUBT)

    def fail_all(self, failure: Failure) -> None:
        for receiving in tuple(self._receivings.values()):
            self._fail(receiving, failure)

    def expire(self, now: float) -> None:
        """Fail overdue attempts; give up waiting for proof after a grace period."""
        for receiving in tuple(self._receivings.values()):
            if not receiving.ended and now >= receiving.deadline:
                expected = "an unknown number of" if receiving.num_slices is None else receiving.num_slices
                landed = f"{len(receiving.landed)} of {expected} slices landed"
                message = f"{receiving.grant.timeout_seconds:g} s passed since the grant; {landed}"
                self._fail(receiving, Failure("timeout", Phase.WIRE, message))
            elif receiving.ended and now >= receiving.ended_at + SETTLE_SECONDS:
                self._drive_if_allowed(receiving, Event.DOUBT)

    def _expected(self, agent: str, notice: Notice) -> Receiving:
        receiving = self._receivings.get(notice.key)
        if notice.receiver_incarnation != self._worker.incarnation:
            raise RemoteProtocolError(f"it is for incarnation {notice.receiver_incarnation:x} of this worker")
        if receiving is None:
            raise RemoteProtocolError(f"transfer {notice.key} is not expected")
        peer = self._peers.find(receiving.grant.sender)
        if peer is None or peer.agent != agent:
            raise RemoteProtocolError(f"transfer {notice.key} was granted to {receiving.grant.sender}")
        if receiving.num_slices not in (None, notice.num_slices):
            raise RemoteProtocolError(f"{notice.num_slices} slices now, {receiving.num_slices} before")
        return receiving

    def _accept(self, receiving: Receiving, result: TransferResult) -> None:
        receiving.num_slices = result.wire.num_slices
        if receiving.session.allows(Event.RESULT):
            receiving.result = result
            self._drive(receiving, Event.RESULT)
        self._settle_if_quiet(receiving)
        self._check_landed(receiving)

    def _check_landed(self, receiving: Receiving) -> None:
        if len(receiving.landed) == receiving.num_slices:
            self._drive_if_allowed(receiving, Event.LANDED)

    def _settle_if_quiet(self, receiving: Receiving) -> None:
        """The writer's own word that nothing is under way is proof, once the attempt is over."""
        if receiving.quiet and receiving.ended:
            self._drive_if_allowed(receiving, Event.SETTLE)

    def _fail(self, receiving: Receiving, failure: Failure) -> None:
        receiving.failure = receiving.failure or failure
        self._drive(receiving, Event.FAIL)
        self._settle_if_quiet(receiving)

    def _drive_if_allowed(self, receiving: Receiving, event: Event) -> None:
        if receiving.session.allows(event):
            self._drive(receiving, event)

    def _drive(self, receiving: Receiving, event: Event) -> None:
        """Move the session, give its pages back when they may be reused, and do what its table asks."""
        ended_before = receiving.ended
        actions = receiving.session.apply(event)
        if receiving.ended and not ended_before:
            receiving.ended_at = self._clock()
        self._publish(receiving, event)
        for action in actions:
            self._act(receiving, action)

    def _act(self, receiving: Receiving, action: Action) -> None:
        grant = receiving.grant
        if action is Action.SEND_GRANT:
            if not self._send(grant.sender, grant):
                self._fail(receiving, Failure("peer_lost", Phase.GRANT, f"no channel to {grant.sender}"))
                # The grant never left, so nobody was ever allowed to write.
                self._drive_if_allowed(receiving, Event.SETTLE)
        elif action is Action.SEND_CANCEL:
            reason = receiving.failure.message if receiving.failure else "cancelled"
            self._send(grant.sender, Cancel(grant.key, self._worker, reason))
        elif action is Action.REPORT:
            self._report(receiving)

    def _publish(self, receiving: Receiving, event: Event) -> None:
        key, state = receiving.grant.key, receiving.session.state
        if may_reuse(state):
            if self._receivings.pop(key, None) is not None:
                self._outbox.put(PagesReusable(key, Side.RECEIVER))
        elif event is Event.DOUBT and state.exposure is Exposure.IN_DOUBT:
            self._outbox.put(PagesInDoubt(key, Side.RECEIVER))

    def _report(self, receiving: Receiving) -> None:
        key, grant, result, failure = receiving.grant.key, receiving.grant, receiving.result, receiving.failure
        done = receiving.session.state.outcome.value == "done"
        error = None if done or failure is None else error_of(key, str(grant.sender), failure)
        wire = result.wire if result else WireReport()
        aux = result.aux if result and done else None
        seconds = receiving.ended_at - receiving.started_at
        self._outbox.put(TransferOutcome(key, Side.RECEIVER, error, wire, seconds, aux))


def _check_origin(grant: Grant, peer: WorkerId, result: TransferResult) -> None:
    """Raise RemoteProtocolError unless the result is about exactly the pages and lives of this grant."""
    if peer != grant.sender or result.sender != grant.sender or result.receiver != grant.receiver:
        raise RemoteProtocolError(
            f"result of {result.sender} for {result.receiver} came from {peer}; the grant is from {grant.sender} "
            f"to {grant.receiver}"
        )
    # A sender that has no grant has none to echo; it can only say that nothing was done.
    unknown = not result.epochs and result.status is not ResultStatus.OK
    if not unknown and result.epochs != tuple(epochs.tobytes() for epochs in grant.pages.epochs):
        raise RemoteProtocolError("result echoes other slot epochs than the grant: it is for another life of the pages")


def _check_content(receiving: Receiving, result: TransferResult) -> None:
    """Raise RemoteProtocolError unless a good result accounts for every granted page and for the first token."""
    grant, wire, aux = receiving.grant, result.wire, result.aux
    if wire.num_pages != grant.pages.num_pages or (wire.num_slices == 0) != (wire.num_pages == 0):
        raise RemoteProtocolError(
            f"result accounts for {wire.num_pages} pages in {wire.num_slices} slices, {grant.pages.num_pages} pages "
            "were granted"
        )
    if receiving.num_slices not in (None, wire.num_slices):
        raise RemoteProtocolError(f"result says {wire.num_slices} slices, notices say {receiving.num_slices}")
    if aux is None or len(aux.first_tokens) != 1 or len(aux.first_logprobs) != 1 or aux.draft_tokens:
        raise RemoteProtocolError(f"result is ok but does not carry exactly one first token: {aux}")
    if aux.usage.prompt_tokens != grant.prompt.num_tokens:
        raise RemoteProtocolError(f"result is for {aux.usage.prompt_tokens} prompt tokens, granted was {grant.prompt}")
