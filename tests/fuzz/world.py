"""A frontend and two workers in this process, served over gRPC, and strangers that may speak to them."""

import asyncio
import dataclasses
import itertools
import os
import random
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import numpy as np

from kvferry.cache.page_table import BlockLists
from kvferry.cache.protocol import CacheManager
from kvferry.deploy.config import FrontendConfig, PoolConfig, TransferConfig, WorkerConfig
from kvferry.deploy.frontend import Frontend
from kvferry.deploy.pools import build_manager
from kvferry.deploy.worker import Parts, Worker, build_parts
from kvferry.transfer.transport.loopback import LoopbackTransport
from kvferry.transfer.types import Direction, RankInfo, Role, WorkerId
from tests.control.worlds import wait_until
from tests.fuzz.tables import Sizes, table_sizes

MODEL = "tiny-gemma3"
MAX_SEQ_LEN_TOKENS = 48
TOKENS_PER_BLOCK = 4
START_SECONDS = 20.0

_agents = itertools.count()


class Stranger:
    """A peer that has memory and an agent of its own and says what it likes.

    Attributes:
        info: what it tells of its present life.
        lives: how many it has had.
    """

    def __init__(self, name: str, manager: CacheManager, template: RankInfo) -> None:
        self._name = name
        self._manager = manager
        self._template = template
        self.lives = 0
        self.begin_life(1)

    @property
    def worker(self) -> WorkerId:
        return self.info.worker

    def begin_life(self, incarnation: int, role: Role = Role.BOTH) -> None:
        """Close the agent, which proves that this life's reads and writes are over, and go on with another."""
        if self.lives:
            self.close()
        self.lives += 1
        self.transport = LoopbackTransport(f"{self._name}-{os.getpid()}-{next(_agents)}")
        self.transport.register(self._manager.storage.pools)
        self.info = dataclasses.replace(
            self._template,
            worker=WorkerId(self._name, incarnation),
            role=role,
            agent_name=self.transport.agent_name,
            agent_metadata=self.transport.metadata(),
            page_table=self._manager.page_table(),
        )

    def close(self) -> None:
        self.transport.close()

    def pages(self, num_tokens: int, rng: random.Random) -> BlockLists:
        """Slots for a whole prompt, drawn from its pools without repetition; nobody else uses them."""
        table, num_blocks = self.info.page_table, -(-num_tokens // self.info.page_table.tokens_per_block)
        slots = []
        for group in table.layer_groups:
            stale = group.life_cycle.stale_range(num_tokens, table.tokens_per_block)
            ids = np.full(num_blocks, -1, np.int32)
            kept = [at for at in range(num_blocks) if not stale.start <= at < stale.end]
            ids[kept] = rng.sample(range(table.pools[group.pools[0]].num_slots), len(kept))
            slots.append(ids)
        epochs = tuple(np.where(ids >= 0, rng.randint(0, 9), 0).astype(np.uint32) for ids in slots)
        return BlockLists(tuple(slots), epochs)


@dataclass(frozen=True)
class End:
    """One of the workers under test, of role both."""

    worker: Worker
    endpoint: str
    id: WorkerId


@dataclass(frozen=True)
class World:
    """What the fuzz talks to.

    Attributes:
        directory: HOST:PORT of the frontend, which embeds the directory.
        ends: two workers that fetch prompts from each other: the first by push, the second by pull.
        strangers: peers that dial the workers.
        rogues: peers that the workers dial.
    """

    frontend: Frontend
    directory: str
    ends: tuple[End, End]
    strangers: list[Stranger]
    rogues: list[Stranger]

    def sizes(self) -> Sizes:
        """Everything that could grow: tables, tasks, threads, file descriptors."""
        first, second = (end.worker for end in self.ends)
        return {
            **table_sizes(frontend=self.frontend, first=first, second=second),
            "process.tasks": len(asyncio.all_tasks()),
            "process.threads": threading.active_count(),
            "process.descriptors": len(os.listdir("/proc/self/fd")),
        }


def _config(name: str, directory: str, direction: Direction) -> WorkerConfig:
    transfer = TransferConfig(
        transport="loopback",
        timeout_seconds=5.0,
        hold_seconds=2.0,
        lease_seconds=1.0,
        max_held_transfers=64,
        direction=direction,
        quarantine_limit=1.0,
    )
    return WorkerConfig(
        role=Role.BOTH,
        name=name,
        directory=directory,
        model=MODEL,
        engine="synthetic",
        pools=PoolConfig(quota_bytes="2MiB", tokens_per_block=TOKENS_PER_BLOCK),
        transfer=transfer,
        prefill_chunk_tokens=16,
        max_seq_len_tokens=MAX_SEQ_LEN_TOKENS,
        stall_seconds=2.0,
        lease_seconds=5.0,
    )


def _stranger(name: str, config: WorkerConfig, parts: Parts, template: RankInfo) -> Stranger:
    return Stranger(name, build_manager(config, parts.engine.spec, MAX_SEQ_LEN_TOKENS), template)


@asynccontextmanager
async def world(num_strangers: int) -> AsyncIterator[World]:
    """Start everything and wait until the two workers are paired; stop it in reverse."""
    async with AsyncExitStack() as stack:
        frontend = Frontend(
            FrontendConfig(listen="127.0.0.1:0", max_lease_seconds=5.0, max_request_timeout_seconds=5.0)
        )
        directory = await frontend.start()
        stack.push_async_callback(frontend.stop)
        ends = []
        for name, direction in (("first", Direction.PUSH), ("second", Direction.PULL)):
            config = _config(name, directory, direction)
            parts = build_parts(config)
            worker = Worker(config, parts, None)
            stack.push_async_callback(worker.stop)
            ends.append(End(worker, await worker.start(), parts.worker))
        networks = [end.worker._network for end in ends]
        await wait_until(
            lambda: all(len(streams) == 1 for network in networks for streams in network._streams.values()),
            "both channels of the workers are up",
            START_SECONDS,
        )
        strangers, rogues = (
            [_stranger(f"{kind}-{at}", config, parts, networks[0].local()) for at in range(num_strangers)]
            for kind in ("stranger", "rogue")
        )
        for stranger in (*strangers, *rogues):
            stack.callback(stranger.close)
        yield World(frontend, directory, (ends[0], ends[1]), strangers, rogues)
