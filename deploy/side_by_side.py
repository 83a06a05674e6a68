"""Prefill and decode of one request at the same time: the events of one, the end of both."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from kvferry.cache.errors import KVError, TransferCancelled, TransferError
from kvferry.transfer.control.background import end
from kvferry.transfer.inference import GenerateEvent, GenerateSummary, PrefillReply

CAUSE_SECONDS = 0.5
"""How long the other side has to say what went wrong; a worker answers at once."""


async def side_by_side(
    prefill: Coroutine[Any, Any, PrefillReply], events: AsyncGenerator[GenerateEvent, None]
) -> AsyncGenerator[GenerateEvent, None]:
    """Events of decode, its summary completed by prefill. The first failure of either ends both.

    Raises: what the worker says where the failure began; the other one knows only that its peer gave up.
    """
    reply = asyncio.get_running_loop().create_task(prefill)
    try:
        async with aclosing(events):
            while (event := await _next(events, reply)) is not None:
                yield with_prefill(event, await reply) if isinstance(event, GenerateSummary) else event
    finally:
        await end(reply)


def with_prefill(summary: GenerateSummary, reply: PrefillReply) -> GenerateSummary:
    """Add what only the prefill worker knows to the decode worker's summary."""
    timings = replace(
        summary.timings,
        queue_seconds=summary.timings.queue_seconds + reply.queue_seconds,
        prefill_seconds=reply.prefill_seconds,
    )
    return replace(summary, timings=timings)


async def _next(
    events: AsyncGenerator[GenerateEvent, None], reply: "asyncio.Task[PrefillReply]"
) -> GenerateEvent | None:
    """The next event, None after the last. Raises when decode failed, and when prefill did while it was waited for."""
    step = asyncio.get_running_loop().create_task(_first(events))
    try:
        await _one_of(step, reply)
        return await step
    except KVError as error:
        raise await _cause(error, reply) from None
    finally:
        await end(step)


async def _one_of(step: "asyncio.Task[GenerateEvent | None]", reply: "asyncio.Task[PrefillReply]") -> None:
    """Return when the step is done. Raises when prefill fails before."""
    # Both are calls with a deadline of their own.
    while not step.done() and not reply.done():
        await asyncio.wait({step, reply}, return_when=asyncio.FIRST_COMPLETED)
    if not step.done() and (error := reply.exception()) is not None:
        raise await _cause(error, step) if isinstance(error, KVError) else error


async def _first(events: AsyncGenerator[GenerateEvent, None]) -> GenerateEvent | None:
    async for event in events:
        return event
    return None


async def _cause(error: KVError, other: "asyncio.Task[Any]") -> KVError:
    """The error nearer to where the failure began: this one, or what the other side says within a moment."""
    if _distance(error):
        await asyncio.wait({other}, timeout=CAUSE_SECONDS)
    theirs = other.exception() if other.done() and not other.cancelled() else None
    return min(error, theirs, key=_distance) if isinstance(theirs, KVError) else error


def _distance(error: KVError) -> int:
    """A failure that began on this side has a name of its own; one that began at the peer ends a transfer."""
    if isinstance(error, TransferCancelled):
        return 2
    return int(isinstance(error, TransferError))
