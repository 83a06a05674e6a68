"""Tasks that run beside the calls."""

import asyncio
import logging
from collections.abc import Coroutine

log = logging.getLogger(__name__)


def background(work: Coroutine[object, object, None], name: str) -> "asyncio.Task[None]":
    """Start a task on the running loop. An error that ends it is logged at once, not when the task is collected."""
    task = asyncio.get_running_loop().create_task(work, name=name)
    task.add_done_callback(_report)
    return task


async def end(task: "asyncio.Task[None]") -> None:
    """Cancel a task and wait until it unwound; its error was logged already."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _report(task: "asyncio.Task[None]") -> None:
    error = None if task.cancelled() else task.exception()
    if error is not None:
        log.error("%s ended: %s", task.get_name(), error, exc_info=error)
