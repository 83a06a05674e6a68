"""Commands from any thread to an engine loop, which runs them between two turns."""

import queue
import threading
from collections.abc import Callable

from kvferry.cache.errors import CapacityError, KVError

Command = Callable[[], None]


class Inbox:
    """A bounded queue of commands that closes for good.

    Concurrency: `put`, `wake` and `close` from any thread; `run` and `wait` from the loop's.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._commands: queue.Queue[Command] = queue.Queue(limit)
        self._awake = threading.Event()
        self._gate = threading.Lock()
        self._refusal: Callable[[], KVError] | None = None

    @property
    def empty(self) -> bool:
        return self._commands.empty()

    def put(self, command: Command) -> None:
        """Queue a command. Raises what `close` says, or CapacityError when the queue is full."""
        with self._gate:
            if self._refusal is not None:
                raise self._refusal()
            try:
                self._commands.put_nowait(command)
            except queue.Full:
                raise CapacityError(
                    f"{self._limit} commands wait already: retry later, or raise max_waiting_requests",
                    requested=(1,),
                    available=(0,),
                ) from None
        self.wake()

    def run(self) -> None:
        """Run what was queued until now. No command raises: each deals with its own errors."""
        for _ in range(self._commands.qsize()):
            self._commands.get_nowait()()

    def wake(self) -> None:
        """End the present or next `wait`."""
        self._awake.set()

    def wait(self, timeout_seconds: float) -> None:
        """Return when woken, at the latest after the timeout."""
        self._awake.wait(timeout_seconds)
        self._awake.clear()

    def close(self, refusal: Callable[[], KVError]) -> None:
        """Refuse further commands with the error this makes. Whoever was before it is in the queue."""
        with self._gate:
            self._refusal = self._refusal or refusal
        self.wake()
