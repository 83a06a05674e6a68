"""This side of one live transfer channel: a bounded queue out, and the rules for what comes in."""

import asyncio
import enum
import threading
from collections import deque
from collections.abc import AsyncIterator

from kvferry.cache.errors import RemoteProtocolError
from kvferry.transfer.control.handlers import ChannelBody, Envelope, Hello
from kvferry.transfer.types import (
    PROTOCOL_VERSION,
    Cancel,
    Grant,
    Message,
    Permit,
    Renewal,
    Side,
    TransferResult,
    WorkerId,
)

MAX_QUEUED = 256


class Opening(enum.Enum):
    """Who opened the channel, which is who receives pages over it."""

    DIALLED = "dialled"
    ACCEPTED = "accepted"

    @property
    def side(self) -> Side:
        """What this worker is in every attempt spoken of on such a channel."""
        return Side.RECEIVER if self is Opening.DIALLED else Side.SENDER


def speaker(message: Message) -> Side:
    """The only side that may send this message."""
    match message:
        case Grant() | Cancel():
            return Side.RECEIVER
        case Permit() | TransferResult():
            return Side.SENDER
        case Renewal():
            return message.side


class Stream:
    """A live channel with `peer`, as the network sees it from either end.

    Concurrency: `offer` from any thread, everything else on the loop.
    """

    def __init__(self, local: WorkerId, peer: WorkerId, opening: Opening, max_queued: int = MAX_QUEUED) -> None:
        self.peer = peer
        self.opening = opening
        self.reason = ""
        self._local = local
        self._max_queued = max_queued
        self._lock = threading.Lock()
        self._queue: deque[Message] = deque()
        self._news = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._sent = 0
        self._expected = 0

    def __repr__(self) -> str:
        state = f"closed: {self.reason}" if self._closed else f"{len(self._queue)} of {self._max_queued} queued"
        return f"<Stream {self.opening.value} {self.peer} sent={self._sent} received={self._expected} {state}>"

    @property
    def closed(self) -> bool:
        return self._closed

    def offer(self, message: Message) -> bool:
        """Queue a message. False: the channel is closed or its queue is full, and the message will not be sent."""
        with self._lock:
            if self._closed or len(self._queue) >= self._max_queued:
                return False
            self._queue.append(message)
        return self._ring()

    def close(self, reason: str) -> bool:
        """Take no more messages and end `outbound`. False when it was closed before; the first reason stays."""
        with self._lock:
            if self._closed:
                return False
            self._closed = True
        self.reason = reason
        self._news.set()
        return True

    async def outbound(self) -> AsyncIterator[Envelope]:
        """Hello, then queued messages in order, until the stream is closed and all that was queued by then is out."""
        yield self._numbered(Hello(self._local, PROTOCOL_VERSION))
        while True:
            await self._news.wait()
            self._news.clear()
            while self._queue:
                yield self._numbered(self._queue.popleft())
            if self._closed:
                return

    def accept_hello(self, envelope: Envelope) -> None:
        """The first message must be a hello of the expected peer. Raises RemoteProtocolError."""
        body = self._in_order(envelope)
        if body != Hello(self.peer, PROTOCOL_VERSION):
            raise RemoteProtocolError(
                f"expected hello from {self.peer} with protocol version {PROTOCOL_VERSION}, got {body}: "
                "the first message of a channel says who speaks"
            )

    def accept(self, envelope: Envelope) -> Message:
        """A message after the hello. Raises RemoteProtocolError when order, side or identities are wrong."""
        body = self._in_order(envelope)
        if isinstance(body, Hello) or speaker(body) is self.opening.side:
            raise RemoteProtocolError(
                f"{self.peer} sent {_shown(body)} on a channel {self.opening.value} here: receivers send grants, "
                "cancels and renewals of their side, senders send permits, results and renewals of theirs, and hello "
                "comes once"
            )
        if isinstance(body, Cancel | Renewal):
            self._check_origin(body)
        else:
            self._check_ends(body)
        return body

    def _ring(self) -> bool:
        try:
            self._loop.call_soon_threadsafe(self._news.set)
        except RuntimeError:
            return False
        return True

    def _numbered(self, body: ChannelBody) -> Envelope:
        self._sent += 1
        return Envelope(self._sent - 1, body)

    def _in_order(self, envelope: Envelope) -> ChannelBody:
        if envelope.sequence != self._expected:
            raise RemoteProtocolError(
                f"message {envelope.sequence} of {self.peer} came where {self._expected} was due: "
                "each is one more than the last"
            )
        self._expected += 1
        return envelope.body

    def _check_ends(self, body: Grant | Permit | TransferResult) -> None:
        sends = self.opening.side is Side.SENDER
        sender, receiver = (self._local, self.peer) if sends else (self.peer, self._local)
        if (body.sender, body.receiver) != (sender, receiver):
            raise RemoteProtocolError(
                f"{type(body).__name__} {body.key} names sender {body.sender} and receiver {body.receiver} "
                f"on the channel of sender {sender} and receiver {receiver}"
            )

    def _check_origin(self, body: Cancel | Renewal) -> None:
        if body.origin != self.peer:
            raise RemoteProtocolError(f"{_shown(body)} names origin {body.origin} on the channel of {self.peer}")


def _shown(body: ChannelBody) -> str:
    """What it is, without its lists."""
    match body:
        case Hello():
            return "Hello"
        case Renewal():
            return f"Renewal of {len(body.keys)} attempts as {body.side.value}"
        case _:
            return f"{type(body).__name__} {body.key}"
