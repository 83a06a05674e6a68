"""The embedded directory: members with leases, in memory."""

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace

from kvferry.cache.errors import CapacityError, ConfigError, UnknownMember
from kvferry.transfer.control.handlers import Snapshot
from kvferry.transfer.inference import DirectoryEntry
from kvferry.transfer.types import WorkerId

MAX_WATCHERS = 1024
MAX_REPLACED = 4096
SWEEP_SECONDS = 1.0


@dataclass
class _Member:
    entry: DirectoryEntry
    lease_seconds: float
    expires_at: float


class Directory:
    """Who is there. A member that does not renew within its lease vanishes; a new life of a name replaces the old one.

    Watchers are woken through the loop they wait on, and overdue leases are dropped by every call and by
    every watcher once a second.
    Concurrency: all calls on one loop.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        max_members: int = 1024,
        min_lease_seconds: float = 1.0,
        max_lease_seconds: float = 60.0,
    ) -> None:
        self._clock = clock
        self._max_members = max_members
        self._lease_bounds = (min_lease_seconds, max_lease_seconds)
        self._members: dict[str, _Member] = {}
        self._replaced: OrderedDict[WorkerId, None] = OrderedDict()
        self._version = 0
        self._watchers: set[asyncio.Event] = set()
        self._closed = False

    @property
    def snapshot(self) -> Snapshot:
        """The members whose leases hold now."""
        self.expire()
        return Snapshot(self._version, tuple(self._members[name].entry for name in sorted(self._members)))

    async def join(self, entry: DirectoryEntry, lease_seconds: float) -> float:
        self.expire()
        self._check_room(entry.worker)
        known = self._members.get(entry.worker.name)
        if known is not None and known.entry.worker != entry.worker:
            self._remember_replaced(known.entry.worker)
        granted = min(max(lease_seconds, self._lease_bounds[0]), self._lease_bounds[1])
        self._members[entry.worker.name] = _Member(entry, granted, self._clock() + granted)
        if known is None or known.entry != entry:
            self._changed()
        return granted

    async def renew(self, worker: WorkerId, paired: tuple[WorkerId, ...]) -> None:
        self.expire()
        member = self._members.get(worker.name)
        if member is None or member.entry.worker != worker:
            raise UnknownMember(f"{worker} is not a member: its lease ran out or the directory restarted; join again")
        member.expires_at = self._clock() + member.lease_seconds
        if member.entry.paired != paired:
            member.entry = replace(member.entry, paired=paired)
            self._changed()

    async def leave(self, worker: WorkerId) -> None:
        member = self._members.get(worker.name)
        if member is not None and member.entry.worker == worker:
            del self._members[worker.name]
            self._changed()

    async def watch(self) -> AsyncIterator[Snapshot]:
        """Each watcher keeps one flag, not a queue: however slow it is, it costs nothing and skips to the newest."""
        if len(self._watchers) >= MAX_WATCHERS:
            text = f"{MAX_WATCHERS} watchers are connected, no more are allowed: retry later"
            raise CapacityError(text, requested=(1,), available=(0,))
        news = asyncio.Event()
        self._watchers.add(news)
        try:
            while not self._closed:
                news.clear()
                yield self.snapshot
                await self._news(news)
        finally:
            self._watchers.discard(news)

    def expire(self) -> None:
        """Drop members whose lease ran out."""
        now = self._clock()
        overdue = [name for name, member in self._members.items() if member.expires_at <= now]
        for name in overdue:
            del self._members[name]
        if overdue:
            self._changed()

    def close(self) -> None:
        """End every watch."""
        self._closed = True
        self._wake()

    async def _news(self, news: asyncio.Event) -> None:
        while not news.is_set():
            try:
                async with asyncio.timeout(self._until_next_expiry()):
                    await news.wait()
            except TimeoutError:
                self.expire()

    def _until_next_expiry(self) -> float:
        """At most a second, since the clock need not be the loop's; never so short that the wait becomes a spin."""
        first = min((member.expires_at for member in self._members.values()), default=math.inf)
        return min(max(first - self._clock(), 0.01), SWEEP_SECONDS)

    def _check_room(self, worker: WorkerId) -> None:
        if worker in self._replaced:
            raise ConfigError(
                f"{worker} was replaced by a newer worker of the same name: stop one of them, or give it another name"
            )
        if worker.name not in self._members and len(self._members) >= self._max_members:
            raise CapacityError(
                f"the directory has {len(self._members)} members, its limit: raise max_members or stop some workers",
                requested=(1,),
                available=(0,),
            )

    def _remember_replaced(self, worker: WorkerId) -> None:
        """Without this, two processes of one name would replace each other for ever."""
        self._replaced[worker] = None
        while len(self._replaced) > MAX_REPLACED:
            self._replaced.popitem(last=False)

    def _changed(self) -> None:
        self._version += 1
        self._wake()

    def _wake(self) -> None:
        for news in self._watchers:
            news.set()
