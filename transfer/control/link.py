"""The dialling side of a transfer channel: register, pair, open, keep open."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol, TypeAlias

import grpc

from kvferry.cache.errors import (
    DeadlineExceeded,
    IncompatiblePeer,
    KVError,
    LocalProtocolError,
    RemoteProtocolError,
    Unavailable,
)
from kvferry.transfer.control.background import background, end
from kvferry.transfer.control.backoff import Backoff
from kvferry.transfer.control.convert import channel, checks, rank
from kvferry.transfer.control.errors import calling
from kvferry.transfer.control.handlers import Envelope
from kvferry.transfer.control.parsing import Malformed, parsed, tolerant
from kvferry.transfer.control.stream import Opening, Stream
from kvferry.transfer.control.wire import WRITE_SECONDS, open_channel
from kvferry.transfer.inference import DirectoryEntry
from kvferry.transfer.types import RankInfo
from kvferry.v1.peer_pb2 import RegisterRequest
from kvferry.v1.peer_pb2_grpc import PeerStub
from kvferry.v1.transfer_pb2 import ChannelRequest, ChannelResponse
from kvferry.v1.transfer_pb2_grpc import TransferStub

ChannelCall: TypeAlias = "grpc.aio.StreamStreamCall[ChannelRequest, ChannelResponse]"

log = logging.getLogger(__name__)

REGISTER_SECONDS = 15.0
HELLO_SECONDS = 5.0
REFUSED_RETRY_SECONDS = 30.0
STEADY_SECONDS = 5.0
"""A channel that held this long is dialled again without a long wait."""

_HOPELESS = (IncompatiblePeer, LocalProtocolError, RemoteProtocolError)
"""Trying again soon would end the same way."""


class LinkOwner(Protocol):
    """What a link needs from its network."""

    local: Callable[[], RankInfo]
    pair: Callable[[RankInfo], Awaitable[None]]
    allow_insecure: bool
    keepalive_seconds: float

    def opened(self, stream: Stream) -> None:
        """A stream works in both directions."""

    def deliver(self, stream: Stream, envelope: Envelope) -> None:
        """A message came. Raises RemoteProtocolError when it breaks the rules."""

    def ended(self, stream: Stream, reason: str) -> None:
        """A stream is over. Repeating it changes nothing."""

    def gone(self, link: "Link") -> None:
        """The link will not dial again."""


class Link:
    """Keeps a channel to one life of one worker, to receive pages from it.

    Concurrency: all on the network's loop.
    """

    def __init__(self, owner: LinkOwner, entry: DirectoryEntry) -> None:
        self.entry = entry
        self._owner = owner
        self._keep = True
        self._stream: Stream | None = None
        self._last_refusal = ""
        self._task = background(self._run(), f"channel to {entry.worker}")
        self._task.add_done_callback(lambda _: owner.gone(self))

    def keep(self, wanted: bool) -> None:
        """Whether to dial again when the channel breaks. Unwanted and without a live channel, the link ends now."""
        self._keep = wanted
        if not wanted and self._stream is None:
            self._task.cancel()
            self._owner.gone(self)

    async def close(self, reason: str) -> None:
        """End the channel and stop dialling."""
        self._keep = False
        if self._stream is not None:
            self._owner.ended(self._stream, reason)
        await end(self._task)

    async def _run(self) -> None:
        backoff = Backoff()
        while self._keep:
            delay = await self._try(backoff)
            if self._keep:
                await asyncio.sleep(delay)

    async def _try(self, backoff: Backoff) -> float:
        """One life of the channel, from dialling to its end. Returns the seconds to wait before the next."""
        started = asyncio.get_running_loop().time()
        try:
            await self._session()
        except _HOPELESS as error:
            self._log_refusal(str(error))
            return REFUSED_RETRY_SECONDS
        except KVError as error:
            self._log_refusal(str(error))
        if asyncio.get_running_loop().time() - started >= STEADY_SECONDS:
            backoff.reset()
        return backoff.next()

    def _log_refusal(self, refusal: str) -> None:
        if refusal != self._last_refusal:
            log.warning("no channel to %s at %s: %s", self.entry.worker, self.entry.endpoint, refusal)
        self._last_refusal = refusal

    async def _session(self) -> None:
        owner = self._owner
        async with open_channel(
            self.entry.endpoint, allow_insecure=owner.allow_insecure, keepalive_seconds=owner.keepalive_seconds
        ) as wire:
            await self._pair(await self._register(wire))
            stream = Stream(owner.local().worker, self.entry.worker, Opening.DIALLED)
            reason = "this worker closed the channel"
            try:
                await self._converse(wire, stream)
                reason = "the peer closed the channel"
            except Exception as error:
                reason = str(error)
                raise
            finally:
                self._stream = None
                owner.ended(stream, reason)

    async def _register(self, wire: grpc.aio.Channel) -> RankInfo:
        request = RegisterRequest(rank=rank.rank_to_wire(self._owner.local()))
        with calling(str(self.entry.worker)):
            response = parsed(await PeerStub(tolerant(wire)).Register(request, timeout=REGISTER_SECONDS))
        if checks.one_of(response, "outcome") == "rejected":
            raise rank.rejection_from_wire(response.rejected, str(self.entry.worker))
        info = rank.rank_from_wire(response.accepted)
        if info.worker != self.entry.worker:
            text = f"{self.entry.endpoint} answers as {info.worker}, another life or another worker"
            raise Unavailable(text, peer=str(self.entry.worker))
        return info

    async def _pair(self, info: RankInfo) -> None:
        try:
            async with asyncio.timeout(REGISTER_SECONDS):
                await self._owner.pair(info)
        except TimeoutError:
            text = f"pairing did not end within {REGISTER_SECONDS:g} s on this side"
            raise DeadlineExceeded(text, peer=str(info.worker)) from None

    async def _converse(self, wire: grpc.aio.Channel, stream: Stream) -> None:
        """Returns when either side closed the stream in order. Raises KVError when it broke."""
        call = TransferStub(tolerant(wire)).Channel()
        tasks = [asyncio.create_task(self._speak(call, stream))]
        try:
            with calling(str(stream.peer)):
                await self._hello(call, stream)
                self._stream = stream
                self._owner.opened(stream)
                tasks.append(asyncio.create_task(self._listen(call, stream)))
                await _first_to_end(tasks, stream)
        finally:
            call.cancel()
            for task in tasks:
                await end(task)

    async def _listen(self, call: ChannelCall, stream: Stream) -> None:
        async for envelope in _envelopes(call):
            self._owner.deliver(stream, envelope)

    async def _hello(self, call: ChannelCall, stream: Stream) -> None:
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                response = await call.read()
        except TimeoutError:
            raise DeadlineExceeded(f"no hello within {HELLO_SECONDS:g} s", peer=str(stream.peer)) from None
        if not isinstance(response, ChannelResponse | Malformed):
            raise Unavailable("the channel ended before its hello", peer=str(stream.peer))
        stream.accept_hello(_envelope(response))

    async def _speak(self, call: ChannelCall, stream: Stream) -> None:
        """Write what is queued. A dead call ends this too; the listening side knows why.

        Raises: DeadlineExceeded when the peer does not read.
        """
        try:
            async for envelope in stream.outbound():
                async with asyncio.timeout(WRITE_SECONDS):
                    await call.write(ChannelRequest(message=channel.envelope_to_wire(envelope)))
            async with asyncio.timeout(WRITE_SECONDS):
                await call.done_writing()
        except TimeoutError:
            raise DeadlineExceeded(f"nothing was read for {WRITE_SECONDS:g} s", peer=str(stream.peer)) from None
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return


async def _first_to_end(tasks: list["asyncio.Task[None]"], stream: Stream) -> None:
    """Wait for the speaking or the listening task and raise its error."""
    speaking, listening = tasks
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    if speaking.done():
        speaking.result()
    if listening.done() or not stream.closed:
        await listening
    else:
        # A call that is cancelled loses what the peer has not read yet; it ends the stream when it has.
        await asyncio.wait({listening}, timeout=HELLO_SECONDS)


def _envelope(response: ChannelResponse | Malformed) -> Envelope:
    message = parsed(response)
    checks.present(message, "message")
    return channel.envelope_from_wire(message.message)


async def _envelopes(call: ChannelCall) -> AsyncIterator[Envelope]:
    """Until the peer ends the stream; a status other than OK is raised by the library."""
    while isinstance(response := await call.read(), ChannelResponse | Malformed):
        yield _envelope(response)
