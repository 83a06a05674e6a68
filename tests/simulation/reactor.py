"""A reactor without a thread: what is submitted runs at once, and the world decides when the transport progresses."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from kvferry.transfer.calls import answer
from kvferry.transfer.reactor import ReactorHandler
from kvferry.transfer.transport.base import Transport

Result = TypeVar("Result")


class InlineReactor:
    """Stands in for `Reactor`; errors of commands reach the caller, which is the world."""

    def __init__(self, transport: Transport, handler: ReactorHandler, clock: Callable[[], float]) -> None:
        self._transport = transport
        self._handler = handler
        self._clock = clock
        self.failure: Exception | None = None

    def start(self) -> None:
        """Nothing to start."""

    def submit(self, command: Callable[[], None]) -> None:
        command()

    def call(self, function: Callable[[], Result]) -> "Future[Result]":
        future: Future[Result] = Future()
        answer(future, function)
        return future

    def stop(self, timeout_seconds: float) -> bool:
        return True

    def turn(self) -> None:
        """One round of the real thread's loop."""
        for notification in self._transport.notifications():
            self._handler.on_notification(notification)
        self._handler.advance(self._clock())
