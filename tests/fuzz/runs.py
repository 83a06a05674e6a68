"""A whole run: strangers that talk at the same time, and what must hold during it and after it."""

import asyncio
import gc
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from kvferry.transfer.control.directory import MAX_REPLACED
from kvferry.transfer.control.network import MAX_PEERS
from kvferry.transfer.ended import MAX_REMEMBERED
from tests.control.worlds import wait_until
from tests.fuzz import tables, verdict
from tests.fuzz.conversations import Case, Client, Talker
from tests.fuzz.rogue import RogueServer
from tests.fuzz.tables import Sizes
from tests.fuzz.world import World, world

NUM_STRANGERS = 16
WARM_UP_MESSAGES = 300
SETTLE_SECONDS = 20.0
MAX_CACHED_BLOCKS = 1000
"""More than the pools of a worker can keep for reuse."""

ALLOWED = {
    "_directory._replaced": MAX_REPLACED,
    "_network._registered": MAX_PEERS,
    "_ended_in._reasons": MAX_REMEMBERED,
    "_ended_out._reasons": MAX_REMEMBERED,
    "_peers._peers": 1 + 2 * NUM_STRANGERS,
    "_transport._peers": 1 + 2 * NUM_STRANGERS,
    "_transport._lists": 2 + 2 * NUM_STRANGERS,
    "published.tree": MAX_CACHED_BLOCKS,
}
"""Tables that keep something on purpose, by a part of their path, and their bounds."""


class Errors(logging.Handler):
    """Keeps what was logged as an error."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        self.stories: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if not _caller_left(record):
            self.stories.append(self.format(record))


def _caller_left(record: logging.LogRecord) -> bool:
    """The library says so loudly when a caller went away at the very moment of its answer."""
    kind = record.exc_info[0] if record.exc_info else None
    return record.name == "grpc._cython.cygrpc" and kind is not None and kind.__name__ == "ExecuteBatchError"


@contextmanager
def watched_log() -> Iterator[Errors]:
    errors = Errors()
    logging.getLogger().addHandler(errors)
    try:
        yield errors
    finally:
        logging.getLogger().removeHandler(errors)


class Run:
    """One stranger and one rogue per lane, each lane one case after the other; a context manager.

    A case is a function of the seed and its number; what else goes on at the time is not.
    """

    def __init__(self, made: World, client: Client, errors: Errors, seed: int) -> None:
        self._made = made
        self._client = client
        self._errors = errors
        self._seed = seed
        self._next = list(range(NUM_STRANGERS))
        self._open: dict[int, Case] = {}
        self._servers = [RogueServer() for _ in range(NUM_STRANGERS)]
        self._sent = 0

    async def __aenter__(self) -> "Run":
        for server in self._servers:
            await server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        for server in self._servers:
            await server.stop()

    async def talk(self, num_messages: int) -> None:
        """All lanes go on where they were. Raises AssertionError with what was said."""
        until = self._sent + num_messages
        async with asyncio.TaskGroup() as group:
            for lane in range(NUM_STRANGERS):
                group.create_task(self._talk(lane, until))

    async def _talk(self, lane: int, until: int) -> None:
        talker = Talker(self._made, lane, self._servers[lane], self._client, self._seed)
        while self._sent < until:
            case = self._open[lane] = Case(self._next[lane])
            self._next[lane] += NUM_STRANGERS
            await self._checked(talker, case)
            self._sent += len(case.said)

    async def _checked(self, talker: Talker, case: Case) -> None:
        try:
            await talker.run(case)
        except Exception as error:
            raise AssertionError(f"{type(error).__name__}: {error}\nseed {self._seed}, {case}") from error
        if self._errors.stories:
            stories = "\n".join(self._errors.stories[:5])
            told = "\n".join(str(other) for other in self._open.values())
            raise AssertionError(f"an error was logged:\n{stories}\nseed {self._seed}, under way were\n{told}")


async def settled(made: World, before: Sizes) -> None:
    """Wait until nothing holds more than before. Raises AssertionError with what does."""
    grown: dict[str, tuple[int, int]] = {}

    def is_as_before() -> bool:
        """Closed connections of the library are open until the objects that hold each other are collected."""
        grown.clear()
        grown.update(tables.grown(before, made.sizes(), ALLOWED))
        if grown and all(path.startswith("process.") for path in grown):
            gc.collect()
        return not grown

    try:
        await wait_until(is_as_before, "everything is as it was", SETTLE_SECONDS)
    except AssertionError:
        told = "\n".join(f"  {path}: {was} -> {now}" for path, (was, now) in sorted(grown.items()))
        raise AssertionError(f"these grew:\n{told}") from None


async def _check_health(made: World, client: Client) -> None:
    """Both workers answer, their books add up, and no page is kept from use."""
    for end in made.ends:
        status = verdict.status_of(await client.ask(Case(-1), end, verdict.GET_STATUS, b""))
        assert [group.quarantined for group in status.pool_groups] == [0] * len(status.pool_groups)
        assert (status.condition, status.waiting, status.running) == ("ok", 0, 0)


async def fuzz(num_messages: int, seed: int) -> Counter[tuple[str, str]]:
    """Talk and check; returns how often each method was answered how.

    A first run makes everything that is made once: connections, pairings, threads.
    """
    with watched_log() as errors:
        async with world(NUM_STRANGERS) as made:
            client = Client(made)
            try:
                async with Run(made, client, errors, seed) as run:
                    await run.talk(WARM_UP_MESSAGES)
                    gc.collect()
                    warm = made.sizes()
                    await run.talk(num_messages)
                    for stranger in made.strangers:
                        stranger.close()  # now nobody can touch what they were permitted to
                    await settled(made, warm)
                await _check_health(made, client)
            finally:
                await client.close()
        assert not errors.stories, errors.stories
    return client.tally
