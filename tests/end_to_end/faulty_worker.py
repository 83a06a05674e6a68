"""The `kvferry` command whose NIXL agent kills or stops its own process at a chosen moment of a transfer.

    python -m tests.end_to_end.faulty_worker FILE worker --config ...

The file holds the fault, one line such as "SIGSTOP under_way"; while there is no file all goes well. It is removed
right before the fault happens, so each is for one transfer.
"""

import enum
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

from kvferry.deploy import cli
from kvferry.transfer.notice import Notice
from kvferry.transfer.transport import registry
from kvferry.transfer.transport.base import Post, PostState
from kvferry.transfer.transport.nixl import NixlTransport
from kvferry.transfer.types import TransferKey


class Moment(enum.Enum):
    """When a fault happens.

    GRANTED: the first slice is about to be posted. UNDER_WAY: it was, and no other. RENEWED: as long after it as both
    sides need to renew their leases, while the posts seem to be under way. DONE: all are done, and nobody knows.
    """

    GRANTED = "granted"
    UNDER_WAY = "under_way"
    RENEWED = "renewed"
    DONE = "done"


RENEWED_SECONDS = 1.5
"""With a lease of 3 seconds both sides renew within the first."""


def arm(file: Path, number: signal.Signals, moment: Moment) -> None:
    """Have the worker of this file send itself a signal at the next such moment."""
    written = file.with_suffix(".new")
    written.write_text(f"{number.name} {moment.value}")
    written.replace(file)


class FaultyTransport(NixlTransport):
    """Posts as NIXL does, until the file says otherwise."""

    name: ClassVar[str] = "nixl"
    file: ClassVar[Path]

    def __init__(self, agent_name: str, **options: Any) -> None:
        super().__init__(agent_name, **options)
        self._notices: dict[Post, Notice] = {}
        self._posted_at: dict[Post, float] = {}
        self._num_done: Counter[TransferKey] = Counter()

    def post(self, *arguments: Any) -> Post:
        *_, payload, _ = arguments
        notice = Notice.unpack(payload)
        if notice.slice_index == 0:
            self._reached(Moment.GRANTED)
        post = super().post(*arguments)
        self._notices[post], self._posted_at[post] = notice, time.monotonic()
        if notice.slice_index == 0:
            self._reached(Moment.UNDER_WAY)
        return post

    def poll(self, post: Post) -> PostState:
        state = super().poll(post)
        if post not in self._notices:
            return state
        if self._is_armed(Moment.RENEWED):
            if time.monotonic() < self._posted_at[post] + RENEWED_SECONDS:
                return PostState.IN_PROGRESS
            self._reached(Moment.RENEWED)
        if state is PostState.DONE:
            self._note_done(self._notices.pop(post))
            del self._posted_at[post]
        return state

    def _note_done(self, notice: Notice) -> None:
        self._num_done[notice.key] += 1
        if self._num_done[notice.key] == notice.num_slices:
            del self._num_done[notice.key]
            self._reached(Moment.DONE)

    def _is_armed(self, moment: Moment) -> bool:
        return self.file.exists() and self.file.read_text().split()[1] == moment.value

    def _reached(self, moment: Moment) -> None:
        if self._is_armed(moment):
            number = signal.Signals[self.file.read_text().split()[0]]
            self.file.unlink()
            # To this thread: sent to the process, another thread takes it, and this one may go on for a while.
            signal.pthread_kill(threading.get_ident(), number)


def main() -> None:
    FaultyTransport.file = Path(sys.argv.pop(1))
    registry.load = lambda name: FaultyTransport
    cli.main()


if __name__ == "__main__":
    main()
