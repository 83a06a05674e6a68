"""Carries a request's events from the engine's thread to the asyncio thread that answers the caller."""

import asyncio
from collections.abc import AsyncGenerator

from kvferry.cache.errors import KVError
from kvferry.transfer.inference import GenerateEvent, PrefillReply


class EventStream:
    """A RequestSink whose events are read on an event loop.

    Bounded by the request itself: at most one event per token asked for, and two more.

    Concurrency: `put` and `finish` from any thread; `events` on the loop it was made on.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[GenerateEvent | PrefillReply | KVError | None] = asyncio.Queue()

    def put(self, event: GenerateEvent | PrefillReply) -> None:
        self._loop.call_soon_threadsafe(self._queue.put_nowait, event)

    def finish(self, error: KVError | None) -> None:
        self._loop.call_soon_threadsafe(self._queue.put_nowait, error)

    async def events(self) -> AsyncGenerator[GenerateEvent | PrefillReply, None]:
        """Events until the end. Raises the error the request ended with. The engine loop enforces the deadline."""
        while True:
            event = await self._queue.get()
            if event is None:
                return
            if isinstance(event, KVError):
                raise event
            yield event
