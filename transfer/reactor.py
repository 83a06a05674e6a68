"""The one thread that owns a transport: it runs commands, progresses writes and reads notifications.

It spins while writes are under way, looks every fraction of a millisecond while pages are granted (some lanes move
data only while the target polls), and otherwise sleeps until a command comes.
"""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeVar

from kvferry.cache.errors import CapacityError, TransportError
from kvferry.transfer.calls import answer
from kvferry.transfer.transport.base import Notification, Transport

log = logging.getLogger(__name__)

IDLE_SECONDS = 0.01
WAITING_SECONDS = 0.0002
MAX_COMMANDS = 65536

Result = TypeVar("Result")


class ReactorHandler(Protocol):
    """What the reactor drives. All calls come from its thread."""

    def on_notification(self, notification: Notification) -> None: ...

    def advance(self, now: float) -> float:
        """Do what is due and return the longest time in seconds until the next call; 0 while writes are under way."""

    def on_reactor_failed(self, error: Exception) -> None:
        """The thread ends because of this error; no other call follows."""


class Reactor:
    """Runs a transport on a thread of its own.

    Concurrency: `submit` and `call` from any thread; `start` and `stop` from the thread that made it.
    """

    def __init__(self, transport: Transport, handler: ReactorHandler, clock: Callable[[], float] = time.monotonic):
        self._transport = transport
        self._handler = handler
        self._clock = clock
        self._commands: queue.Queue[Callable[[], None]] = queue.Queue(MAX_COMMANDS)
        self._stopping = False
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=f"kvferry-reactor-{transport.agent_name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def failure(self) -> Exception | None:
        """Why the thread ended early; None while all is well."""
        return self._failure

    def submit(self, command: Callable[[], None]) -> None:
        """Run a command on the reactor's thread soon. Never blocks.

        Raises:
            TransportError: the reactor ended. CapacityError: too many commands wait.
        """
        if self._failure is not None or self._stopping:
            raise TransportError(self._transport.name, "STOPPED", f"the reactor ended: {self._failure or 'closed'}")
        try:
            self._commands.put_nowait(command)
        except queue.Full:
            raise CapacityError(
                f"{MAX_COMMANDS} commands wait for the transport thread: it cannot keep up, submit less",
                requested=(1,),
                available=(0,),
            ) from None

    def call(self, function: Callable[[], Result]) -> "Future[Result]":
        """Run a function on the reactor's thread; the future carries its result or error."""
        future: Future[Result] = Future()
        self.submit(lambda: answer(future, function))
        return future

    def stop(self, timeout_seconds: float) -> bool:
        """Let the thread finish its commands and end. Returns False when it did not end in time."""
        self._stopping = True
        with contextlib.suppress(queue.Full):
            # Wakes a sleeping thread; a full queue means that it is not asleep.
            self._commands.put_nowait(lambda: None)
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            wait = 0.0
            while not self._stopping:
                self._run_commands(wait)
                for notification in self._transport.notifications():
                    self._handler.on_notification(notification)
                wait = self._handler.advance(self._clock())
            self._run_commands(0.0)
        except Exception as error:
            self._failure = error
            log.exception("transport thread of %s failed", self._transport.agent_name)
            self._handler.on_reactor_failed(error)

    def _run_commands(self, wait: float) -> None:
        """Run all waiting commands; sleep at most `wait` seconds for the first."""
        try:
            command = self._commands.get(timeout=wait) if wait > 0 else self._commands.get_nowait()
            for _ in range(MAX_COMMANDS):
                command()
                command = self._commands.get_nowait()
        except queue.Empty:
            return
