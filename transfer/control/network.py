"""All transfer channels of one worker: the ones it dials to receive pages, and the ones it accepts to send them."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

from kvferry.cache.errors import (
    CapacityError,
    DeadlineExceeded,
    Incompatibility,
    IncompatiblePeer,
    RemoteProtocolError,
    Unavailable,
)
from kvferry.transfer.control.background import end
from kvferry.transfer.control.handlers import ChannelSink, Envelope, Hello
from kvferry.transfer.control.link import HELLO_SECONDS, REGISTER_SECONDS, Link
from kvferry.transfer.control.stream import Opening, Stream, speaker
from kvferry.transfer.control.wire import KEEPALIVE_SECONDS
from kvferry.transfer.inference import DirectoryEntry, WorkerStatus
from kvferry.transfer.types import (
    Cancel,
    Grant,
    Message,
    Permit,
    RankInfo,
    Renewal,
    Side,
    TransferResult,
    WorkerId,
)

log = logging.getLogger(__name__)

MAX_PEERS = 1024


class PeerNetwork:
    """Pairs this worker with others and carries what they say about attempts.

    Serves Peer and Transfer for a ControlServer, and dials the members it is told to. Two workers that both prefill and
    decode have two streams, one each way.

    Args:
        local: this worker as peers should see it now.
        pair: validates and wires a peer; called again at every reconnect, so it must accept a peer it knows. Raises
            IncompatiblePeer with every difference.
        sink: where messages and the life of streams go.
        status: answers GetStatus.
        on_paired: called with `paired` after every change.

    Concurrency: `send` from any thread; everything else on the loop that was running when this was made.
    """

    def __init__(
        self,
        local: Callable[[], RankInfo],
        pair: Callable[[RankInfo], Awaitable[None]],
        sink: ChannelSink,
        status: Callable[[], Awaitable[WorkerStatus]],
        *,
        on_paired: Callable[[frozenset[WorkerId]], None] | None = None,
        allow_insecure: bool = False,
        keepalive_seconds: float = KEEPALIVE_SECONDS,
    ) -> None:
        self.local = local
        self.pair = pair
        self.allow_insecure = allow_insecure
        self.keepalive_seconds = keepalive_seconds
        self._sink = sink
        self._status = status
        self._on_paired = on_paired
        self._links: dict[str, Link] = {}
        self._registered: dict[str, WorkerId] = {}
        self._streams: dict[Opening, dict[WorkerId, Stream]] = {opening: {} for opening in Opening}
        self._paired: frozenset[WorkerId] = frozenset()
        self._changing = asyncio.Lock()
        self._closed = False

    # ---- dialling

    async def connect(self, entry: DirectoryEntry) -> None:
        """Keep a channel to this member from now on; returns before it is up. Repeating it changes nothing.

        A member of the same name with another incarnation or endpoint is disconnected first.
        """
        async with self._changing:
            await self._connect(entry)

    async def _connect(self, entry: DirectoryEntry) -> None:
        if self._closed:
            return
        link = self._links.get(entry.worker.name)
        if link is not None and (link.entry.worker, link.entry.endpoint) != (entry.worker, entry.endpoint):
            await self._drop(link, f"{entry.worker.name} is now {entry.worker} at {entry.endpoint}")
            link = None
        if link is None:
            self._links[entry.worker.name] = Link(self, entry)
        else:
            link.keep(True)

    async def update(self, entries: Iterable[DirectoryEntry], receives_from: Callable[[DirectoryEntry], bool]) -> None:
        """Follow a snapshot of the directory: connect to every member that `receives_from` accepts, except this one.

        A member that vanished is not dialled again, but a live channel to it stays until it breaks: the directory may
        have restarted, and a worker that is really gone breaks its channel by itself.
        """
        own_name = self.local().worker.name
        wanted = {e.worker.name: e for e in entries if e.worker.name != own_name and receives_from(e)}
        async with self._changing:
            for name, link in tuple(self._links.items()):
                if name not in wanted:
                    link.keep(False)
            for entry in wanted.values():
                await self._connect(entry)

    async def disconnect(self, worker: WorkerId, reason: str = "disconnected on request") -> None:
        """Close the channel this worker dialled and stop dialling. Unknown workers are ignored."""
        async with self._changing:
            link = self._links.get(worker.name)
            if link is not None and link.entry.worker == worker:
                await self._drop(link, reason)

    def hang_up(self, worker: WorkerId, reason: str) -> None:
        """End the channels with this peer, after what is queued on them; whoever opened one opens another."""
        for streams in tuple(self._streams.values()):
            stream = streams.get(worker)
            if stream is not None:
                self.ended(stream, reason)

    async def close(self) -> None:
        """End every channel and take no new one."""
        self._closed = True
        async with self._changing:
            for link in tuple(self._links.values()):
                await self._drop(link, "this worker is shutting down")
        for stream in tuple(self._streams[Opening.ACCEPTED].values()):
            self.ended(stream, "this worker is shutting down")

    async def _drop(self, link: Link, reason: str) -> None:
        await link.close(reason)
        self.gone(link)

    # ---- messages out

    def send(self, worker: WorkerId, message: Message) -> bool:
        """Queue a message for a peer. False: there is no live channel for it, or its queue is full.

        What this worker says as a receiver goes over the channel it dialled, what it says as a sender over the one the
        peer dialled. True is no proof of delivery: when the channel breaks, `on_channel_lost` tells. Thread-safe; never
        blocks.
        """
        opening = Opening.DIALLED if speaker(message) is Side.RECEIVER else Opening.ACCEPTED
        stream = self._streams[opening].get(worker)
        return stream is not None and stream.offer(message)

    @property
    def paired(self) -> frozenset[WorkerId]:
        """Workers with a live channel in either direction. Thread-safe."""
        return self._paired

    # ---- serving Peer and Transfer

    async def register(self, remote: RankInfo) -> RankInfo:
        """Validate and wire a peer that wants to receive from this worker, and answer with ourselves."""
        local = self.local()
        if remote.worker.name == local.worker.name:
            reason = Incompatibility("name", str(local.worker), str(remote.worker), "names of workers must be unique")
            raise IncompatiblePeer(str(remote.worker), [reason])
        self._make_room(remote.worker)
        try:
            async with asyncio.timeout(REGISTER_SECONDS):
                await self.pair(remote)
        except TimeoutError:
            text = f"pairing did not end within {REGISTER_SECONDS:g} s"
            raise DeadlineExceeded(text, peer=str(local.worker)) from None
        self._note_life(remote.worker)
        return local

    async def get_status(self) -> WorkerStatus:
        return await self._status()

    async def channel(self, inbound: AsyncIterator[Envelope]) -> AsyncIterator[Envelope]:
        """Take a channel from a registered peer. Raises RemoteProtocolError when the peer breaks the protocol."""
        stream = await self._welcome(inbound)
        listening: asyncio.Task[None] | None = None
        try:
            async for envelope in stream.outbound():
                yield envelope
                if listening is None:
                    self.opened(stream)
                    listening = asyncio.create_task(self._listen(inbound, stream))
        finally:
            if listening is not None:
                await end(listening)
            self.ended(stream, "the peer went away")
        if listening is not None and not listening.cancelled():
            listening.result()

    async def _welcome(self, inbound: AsyncIterator[Envelope]) -> Stream:
        """Read who speaks; only a registered life of a worker may."""
        if self._closed:
            raise Unavailable("shutting down", peer=str(self.local().worker))
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                first = await anext(inbound, None)
        except TimeoutError:
            raise RemoteProtocolError(f"no hello within {HELLO_SECONDS:g} s") from None
        if first is None or not isinstance(first.body, Hello):
            raise RemoteProtocolError("the first message of a channel must be a hello")
        peer = first.body.worker
        if self._registered.get(peer.name) != peer:
            known = self._registered.get(peer.name, "no such worker")
            raise RemoteProtocolError(f"hello from {peer}, but registered is {known}: register this life first")
        stream = Stream(self.local().worker, peer, Opening.ACCEPTED)
        stream.accept_hello(first)
        return stream

    async def _listen(self, inbound: AsyncIterator[Envelope], stream: Stream) -> None:
        """Deliver until the peer ends the stream; then, or on an error, end our side of it too."""
        reason = "the peer closed the channel"
        try:
            async for envelope in inbound:
                self.deliver(stream, envelope)
        except Exception as error:
            reason = str(error)
            raise
        finally:
            self.ended(stream, reason)

    def _make_room(self, worker: WorkerId) -> None:
        """Forget the peer that registered longest ago and has no channel."""
        if worker.name in self._registered or len(self._registered) < MAX_PEERS:
            return
        live = {peer.name for peer in self._streams[Opening.ACCEPTED]}
        idle = next((name for name in self._registered if name not in live), None)
        if idle is None:
            text = f"{MAX_PEERS} peers have a channel to {self.local().worker}, no more are allowed"
            raise CapacityError(text, requested=(1,), available=(0,))
        del self._registered[idle]

    def _note_life(self, worker: WorkerId) -> None:
        """A newer life registered: the channel of the older one is dead."""
        known = self._registered.get(worker.name)
        self._registered[worker.name] = worker
        if known is not None and known != worker:
            stream = self._streams[Opening.ACCEPTED].get(known)
            if stream is not None:
                self.ended(stream, f"replaced by {worker}")

    # ---- life of streams, for links and for `channel`

    def opened(self, stream: Stream) -> None:
        """A stream works in both directions; an older one that the same end opened is over."""
        older = self._streams[stream.opening].get(stream.peer)
        if older is not None:
            self.ended(older, "replaced by a newer channel")
        self._streams[stream.opening] = self._streams[stream.opening] | {stream.peer: stream}
        log.info("channel with %s is up (%s)", stream.peer, stream.opening.value)
        self._sink.on_channel_up(stream.peer)
        self._paired_changed()

    def deliver(self, stream: Stream, envelope: Envelope) -> None:
        """Check a message and hand it on; after `on_channel_lost` none is. Raises RemoteProtocolError."""
        if stream.closed:
            return
        message = stream.accept(envelope)
        match message:
            case Grant():
                self._sink.on_grant(stream.peer, message)
            case Permit():
                self._sink.on_permit(stream.peer, message)
            case TransferResult():
                self._sink.on_result(stream.peer, message)
            case Cancel():
                self._sink.on_cancel(stream.peer, message)
            case Renewal():
                self._sink.on_renewal(stream.peer, message)

    def ended(self, stream: Stream, reason: str) -> None:
        """A stream is over: refuse messages for it first, then tell. Repeating it changes nothing."""
        if not stream.close(reason):
            return
        streams = self._streams[stream.opening]
        if streams.get(stream.peer) is stream:
            self._streams[stream.opening] = {peer: other for peer, other in streams.items() if other is not stream}
            log.info("channel with %s is lost (%s): %s", stream.peer, stream.opening.value, reason)
            self._sink.on_channel_lost(stream.peer, reason)
            self._paired_changed()

    def gone(self, link: Link) -> None:
        """A link will not dial again."""
        if self._links.get(link.entry.worker.name) is link:
            del self._links[link.entry.worker.name]

    def _paired_changed(self) -> None:
        paired = frozenset(peer for streams in self._streams.values() for peer in streams)
        if paired != self._paired:
            self._paired = paired
            if self._on_paired is not None:
                self._on_paired(paired)
