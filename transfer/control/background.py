"""Tasks that run beside the calls."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

log = logging.getLogger(__name__)

END_SECONDS = 10.0
"""Longest wait for a cancelled task."""


def background(work: Coroutine[object, object, None], name: str) -> "asyncio.Task[None]":
    """Start a task on the running loop. An error that ends it is logged at once, not when the task is collected."""
    task = asyncio.get_running_loop().create_task(work, name=name)
    task.add_done_callback(_report)
    return task


async def end(task: "asyncio.Task[Any]") -> None:
    """Cancel a task and wait until it unwound. Its result and its error are nobody's business any more."""
    task.cancel()
    await asyncio.wait({task}, timeout=END_SECONDS)
    if not task.done():
        log.error("%s was cancelled and has not ended within %g s", task.get_name(), END_SECONDS)
    elif not task.cancelled():
        task.exception()


def _report(task: "asyncio.Task[None]") -> None:
    error = None if task.cancelled() else task.exception()
    if error is not None:
        log.error("%s ended: %s", task.get_name(), error, exc_info=error)
