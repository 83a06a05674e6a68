import pytest

from kvferry.cache.errors import ConfigError, DeadlineExceeded, KVError, Unavailable
from kvferry.transfer.control.directory import Directory
from kvferry.transfer.control.directory_client import DirectoryClient
from kvferry.transfer.control.handlers import Snapshot
from kvferry.transfer.control.server import ControlServer
from kvferry.transfer.inference import DirectoryEntry
from kvferry.transfer.types import WorkerId
from tests.control import samples
from tests.control.worlds import closing, run, wait_until

ONE, TWO = WorkerId("one", 1), WorkerId("two", 2)


class Served:
    """A directory behind a server. `restart` forgets everything and listens on the same port again."""

    def __init__(self) -> None:
        self.address = "127.0.0.1:0"

    async def start(self) -> None:
        self.directory = Directory(min_lease_seconds=0.2)
        self.server = ControlServer(self.address, directory=self.directory)
        await self.server.start()
        self.address = self.server.address

    async def stop(self) -> None:
        self.directory.close()
        await self.server.stop(0.1)

    @property
    def members(self) -> tuple[DirectoryEntry, ...]:
        return self.directory.snapshot.members


class Member:
    def __init__(self, served: Served, worker: WorkerId, lease_seconds: float = 0.6) -> None:
        self.snapshots: list[Snapshot] = []
        self.replaced: list[KVError] = []
        self.client = DirectoryClient(
            served.address,
            on_snapshot=self.snapshots.append,
            entry=samples.entry(worker),
            lease_seconds=lease_seconds,
            on_replaced=self.replaced.append,
        )
        self.client.start()

    @property
    def sees(self) -> list[WorkerId]:
        return [entry.worker for entry in self.snapshots[-1].members] if self.snapshots else []


def test_members_join_see_each_other_and_leave() -> None:
    async def test() -> None:
        served = Served()
        await served.start()
        one, two = Member(served, ONE), Member(served, TWO)
        async with closing(two.client.leave, served.stop):
            await one.client.wait_joined(5)
            await wait_until(lambda: one.sees == two.sees == [ONE, TWO], "both see both")
            await one.client.leave()
            await wait_until(lambda: two.sees == [TWO], "one left")

    run(test)


def test_member_stays_longer_than_its_lease() -> None:
    async def test() -> None:
        served = Served()
        await served.start()
        one = Member(served, ONE, lease_seconds=0.3)
        async with closing(one.client.leave, served.stop):
            await one.client.wait_joined(5)
            joined_at = served.directory._members[ONE.name].expires_at
            await wait_until(lambda: served.directory._members[ONE.name].expires_at > joined_at + 0.6, "three renewals")
            assert [snapshot.version for snapshot in one.snapshots if snapshot.members] == [1]

    run(test)


def test_change_of_paired_workers_is_told_at_once() -> None:
    async def test() -> None:
        served = Served()
        await served.start()
        one = Member(served, ONE, lease_seconds=60)
        async with closing(one.client.leave, served.stop):
            await one.client.wait_joined(5)
            one.client.set_paired({TWO})
            await wait_until(lambda: served.members[0].paired == (TWO,), "the directory knows", timeout_seconds=2)
            one.client.set_paired([])
            await wait_until(lambda: served.members[0].paired == (), "the directory knows again", timeout_seconds=2)

    run(test)


def test_restarted_directory_is_joined_again() -> None:
    async def test() -> None:
        served = Served()
        await served.start()
        one = Member(served, ONE)
        async with closing(one.client.leave, served.stop):
            await one.client.wait_joined(5)
            one.client.set_paired({TWO})
            await served.stop()
            await served.start()
            await wait_until(lambda: [entry.paired for entry in served.members] == [(TWO,)], "joined with its pairs")
            await wait_until(lambda: one.sees == [ONE], "watching again")

    run(test)


def test_forgotten_member_joins_again() -> None:
    async def test() -> None:
        served = Served()
        await served.start()
        one = Member(served, ONE)
        async with closing(one.client.leave, served.stop):
            await one.client.wait_joined(5)
            await served.directory.leave(ONE)
            await wait_until(lambda: served.members, "joined again")

    run(test)


def test_watcher_without_entry_only_follows() -> None:
    async def test() -> None:
        served = Served()
        await served.start()
        snapshots: list[Snapshot] = []
        watcher = DirectoryClient(served.address, on_snapshot=snapshots.append)
        watcher.start()
        async with closing(watcher.leave, served.stop):
            await wait_until(lambda: snapshots, "the first snapshot")
            watcher.set_paired({ONE})
            assert served.members == ()

    run(test)


def test_missing_directory_is_reported_and_leaving_is_quick() -> None:
    async def test() -> None:
        client = DirectoryClient("127.0.0.1:1", on_snapshot=lambda _: None, entry=samples.entry(ONE))
        client.start()
        async with closing(client.leave):
            with pytest.raises((Unavailable, DeadlineExceeded)):
                await client.wait_joined(0.5)

    run(test)


def test_replaced_worker_is_told_once_that_it_is_out_of_service() -> None:
    async def test() -> None:
        served = Served()
        await served.start()
        one = Member(served, ONE, lease_seconds=0.3)
        await one.client.wait_joined(5)
        newer = Member(served, WorkerId(ONE.name, 9))
        async with closing(one.client.leave, newer.client.leave, served.stop):
            await newer.client.wait_joined(5)
            await wait_until(lambda: one.replaced, "the refusal arrived")
            assert isinstance(one.replaced[0], ConfigError)
            assert "replaced by a newer worker" in str(one.replaced[0])
            assert [entry.worker.incarnation for entry in served.members] == [9]

    run(test)
