"""Calls from one thread into another that answer through a future."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def answer(future: "Future[Result]", function: Callable[[], Result]) -> None:
    """Run a function and put its result or error into the future, unless whoever waited for it has left.

    Never raises: the thread that runs it goes on, whatever the function did.
    """
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except Exception as error:  # noqa: BLE001 - whoever waits for the future gets it
        future.set_exception(error)
