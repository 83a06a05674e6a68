"""Carries a request's events from the engine's thread to the asyncio thread that answers the caller."""

import asyncio
from collections.abc import AsyncGenerator, Callable

from kvferry.cache.errors import KVError
from kvferry.transfer.inference import GenerateEvent, PrefillReply

StreamEvent = GenerateEvent | PrefillReply


class EventStream:
    """A RequestSink whose events are read on an event loop.

    Bounded by the request itself: at most one event per token asked for, and two more.

    Concurrency: `put` and `finish` from any thread; `events` on the loop it was made on.
    """

    def __init__(self, on_unread: Callable[[StreamEvent], None] = lambda event: None) -> None:
        """`on_unread` gets, on the loop, every event that came when nobody read any more."""
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[StreamEvent | KVError | None] = asyncio.Queue()
        self._on_unread = on_unread
        self._abandoned = False

    def put(self, event: StreamEvent) -> None:
        self._loop.call_soon_threadsafe(self._arrive, event)

    def finish(self, error: KVError | None) -> None:
        self._loop.call_soon_threadsafe(self._arrive, error)

    async def events(self) -> AsyncGenerator[StreamEvent, None]:
        """Events until the end. Raises the error the request ended with. The engine loop enforces the deadline."""
        try:
            while True:
                event = await self._queue.get()
                if event is None:
                    return
                if isinstance(event, KVError):
                    raise event
                yield event
        finally:
            self._abandon()

    def _arrive(self, event: StreamEvent | KVError | None) -> None:
        if not self._abandoned:
            self._queue.put_nowait(event)
        elif event is not None and not isinstance(event, KVError):
            self._on_unread(event)

    def _abandon(self) -> None:
        self._abandoned = True
        while not self._queue.empty():
            self._arrive(self._queue.get_nowait())
