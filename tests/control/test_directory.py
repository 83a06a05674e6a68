import asyncio
from dataclasses import replace

import pytest

from kvferry.cache.errors import CapacityError, ConfigError, UnknownMember
from kvferry.transfer.control import directory as module
from kvferry.transfer.control.directory import Directory
from kvferry.transfer.control.handlers import Snapshot
from kvferry.transfer.inference import DirectoryEntry
from kvferry.transfer.types import WorkerId
from tests.control import samples
from tests.control.worlds import run, wait_until

ONE, TWO = WorkerId("one", 1), WorkerId("two", 2)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def members(directory: Directory) -> list[WorkerId]:
    return [entry.worker for entry in directory.snapshot.members]


class Watcher:
    """Reads a watch in the background, only while `reading` is set."""

    def __init__(self, directory: Directory) -> None:
        self.seen: list[Snapshot] = []
        self.reading = asyncio.Event()
        self.reading.set()
        self.task = asyncio.create_task(self._read(directory))

    async def _read(self, directory: Directory) -> None:
        async for snapshot in directory.watch():
            self.seen.append(snapshot)
            await self.reading.wait()


def test_member_vanishes_when_its_lease_runs_out() -> None:
    async def test() -> None:
        clock = Clock()
        directory = Directory(clock=clock)
        assert await directory.join(samples.entry(TWO), 10) == 10
        assert await directory.join(samples.entry(ONE), 20) == 20
        assert members(directory) == [ONE, TWO]

        clock.now += 9.5
        await directory.renew(TWO, ())
        clock.now += 9.5
        await directory.renew(TWO, ())
        assert members(directory) == [ONE, TWO]
        clock.now += 1.0
        assert members(directory) == [TWO]
        with pytest.raises(UnknownMember, match="join again"):
            await directory.renew(ONE, ())

    run(test)


@pytest.mark.parametrize("wished,granted", [(0.001, 1.0), (5.0, 5.0), (1e6, 60.0)])
def test_lease_is_kept_within_bounds(wished: float, granted: float) -> None:
    async def test() -> None:
        assert await Directory().join(samples.entry(ONE), wished) == granted

    run(test)


def test_newer_life_replaces_the_older_which_cannot_return() -> None:
    async def test() -> None:
        directory = Directory()
        newer = WorkerId(ONE.name, 9)
        await directory.join(samples.entry(ONE), 10)
        await directory.join(samples.entry(newer), 10)
        assert members(directory) == [newer]
        with pytest.raises(UnknownMember):
            await directory.renew(ONE, ())
        with pytest.raises(ConfigError, match="replaced by a newer worker"):
            await directory.join(samples.entry(ONE), 10)
        await directory.leave(ONE)
        assert members(directory) == [newer]

    run(test)


def test_version_counts_changes_only() -> None:
    async def test() -> None:
        directory = Directory()
        assert directory.snapshot == Snapshot(0, ())
        await directory.join(samples.entry(ONE), 10)
        await directory.join(samples.entry(ONE), 10)
        await directory.renew(ONE, ())
        assert directory.snapshot.version == 1
        await directory.renew(ONE, (TWO,))
        assert directory.snapshot == Snapshot(2, (replace(samples.entry(ONE), paired=(TWO,)),))
        await directory.leave(ONE)
        await directory.leave(ONE)
        assert directory.snapshot == Snapshot(3, ())

    run(test)


def test_full_directory_refuses_with_the_numbers() -> None:
    async def test() -> None:
        directory = Directory(max_members=1)
        await directory.join(samples.entry(ONE), 10)
        await directory.join(samples.entry(ONE), 10)
        with pytest.raises(CapacityError, match="1 members, its limit"):
            await directory.join(samples.entry(TWO), 10)

    run(test)


def test_watch_tells_at_once_and_after_every_change() -> None:
    async def test() -> None:
        directory = Directory()
        watcher = Watcher(directory)
        await wait_until(lambda: watcher.seen, "the first snapshot")
        await directory.join(samples.entry(ONE), 10)
        await wait_until(lambda: len(watcher.seen) == 2, "the second snapshot")
        directory.close()
        await wait_until(watcher.task.done, "the watch ended")
        assert [snapshot.version for snapshot in watcher.seen] == [0, 1]

    run(test)


def test_slow_watcher_gets_only_the_newest_snapshot() -> None:
    async def test() -> None:
        directory = Directory()
        watcher = Watcher(directory)
        watcher.reading.clear()
        await wait_until(lambda: watcher.seen, "the first snapshot")
        for incarnation in range(1, 51):
            await directory.join(samples.entry(WorkerId("one", incarnation)), 10)
        watcher.reading.set()
        await wait_until(lambda: len(watcher.seen) == 2, "the newest snapshot")
        directory.close()
        await wait_until(watcher.task.done, "the watch ended")
        assert [snapshot.version for snapshot in watcher.seen[:2]] == [0, 50]

    run(test)


def test_watch_sees_a_lease_run_out_by_itself() -> None:
    async def test() -> None:
        directory = Directory(min_lease_seconds=0.02)
        await directory.join(samples.entry(ONE), 0.02)
        watcher = Watcher(directory)
        await wait_until(lambda: watcher.seen and not watcher.seen[-1].members, "the member vanished")
        directory.close()
        await wait_until(watcher.task.done, "the watch ended")

    run(test)


def test_too_many_watchers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WATCHERS", 1)

    async def test() -> None:
        directory = Directory()
        watcher = Watcher(directory)
        await wait_until(lambda: watcher.seen, "the first snapshot")
        with pytest.raises(CapacityError, match="watchers"):
            await anext(aiter(directory.watch()))
        directory.close()
        await wait_until(watcher.task.done, "the watch ended")

    run(test)


def test_replaced_lives_are_remembered_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_REPLACED", 2)

    async def test() -> None:
        directory = Directory()
        entries: list[DirectoryEntry] = [samples.entry(WorkerId("one", incarnation)) for incarnation in range(1, 6)]
        for entry in entries:
            await directory.join(entry, 10)
        assert [worker.incarnation for worker in directory._replaced] == [3, 4]

    run(test)
