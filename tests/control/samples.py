"""Records that obey every rule, for tests to send and to bend."""

import numpy as np

from kvferry.cache.ids import LayerId
from kvferry.cache.layout import BufferView
from kvferry.cache.lifecycle import LifeCycle
from kvferry.cache.page_table import BlockLists, LayerGroupEntry, PageTable, PoolEntry
from kvferry.transfer.inference import (
    DirectoryEntry,
    GenerateCall,
    GenerateSummary,
    PeerStatus,
    PoolGroupStatus,
    SamplingParams,
    Timings,
    WorkerStatus,
)
from kvferry.transfer.types import (
    AuxRecord,
    Cancel,
    Grant,
    PromptId,
    RankInfo,
    ResultStatus,
    Role,
    TransferKey,
    TransferResult,
    Usage,
    WireReport,
    WorkerId,
)

PREFILL = WorkerId("prefill-0", 0x11)
DECODE = WorkerId("decode-0", 0x22)
KEY = TransferKey("0123456789abcdef" * 2, 1)
WIRE = WireReport(2, 5, 5 << 15, 3, 0.25, "cma")
USAGE = Usage(70, 32)


def page_table() -> PageTable:
    """Two layer groups of one layer each, two heads of 8 float32 values, 4 tokens per block."""
    views = [
        tuple(BufferView(LayerId(layer), role, at * 256, 2, 8, 128, 32) for at, role in enumerate(("key", "value")))
        for layer in (0, 1)
    ]
    groups = (LayerGroupEntry(LifeCycle(), 0, views[0]), LayerGroupEntry(LifeCycle(128, 1), 1, views[1]))
    pools = (PoolEntry(1 << 40, 512, 512, 100), PoolEntry(1 << 41, 512, 1024, 50))
    return PageTable("a" * 64, "float32", 4, "cpu", pools, groups)


def rank(worker: WorkerId, role: Role) -> RankInfo:
    return RankInfo(worker, role, 0, 1, "loopback", f"agent-{worker}", b"\x00\xff" * 20, "b" * 64, page_table())


def grant(key: TransferKey = KEY, sender: WorkerId = PREFILL, receiver: WorkerId = DECODE) -> Grant:
    slots = (np.array([3, 4, 9], np.int32), np.array([-1, -1, 7], np.int32))
    epochs = (np.array([1, 1, 2], np.uint32), np.array([0, 0, 4_000_000_000], np.uint32))
    return Grant(key, sender, receiver, PromptId.of(range(70)), BlockLists(slots, epochs), 12.5)


def result(key: TransferKey = KEY, sender: WorkerId = PREFILL, receiver: WorkerId = DECODE) -> TransferResult:
    aux = AuxRecord((17, 4), (-0.25, -1.5), USAGE, (9,))
    epochs = tuple(epochs.tobytes() for epochs in grant().pages.epochs)
    return TransferResult(key, sender, receiver, ResultStatus.OK, epochs, True, WIRE, aux)


def cancel(origin: WorkerId = DECODE, key: TransferKey = KEY) -> Cancel:
    return Cancel(key, origin, "client went away")


def status(worker: WorkerId = PREFILL) -> WorkerStatus:
    group = PoolGroupStatus(("full", "window 128"), 512, 100, 90, 8, 2, 20)
    peers = (PeerStatus(DECODE, Role.DECODE, "cma"),)
    return WorkerStatus(worker, Role.PREFILL, "tiny", "V2", "nixl", "PYTHON", (group,), 1, 2, 3, 4, peers, "ok", 4711)


def entry(worker: WorkerId, endpoint: str = "127.0.0.1:1", role: Role = Role.BOTH) -> DirectoryEntry:
    return DirectoryEntry(worker, role, endpoint, "tiny")


def call(timeout_seconds: float = 10.0, prompt: str = "hello") -> GenerateCall:
    return GenerateCall("r1", prompt, None, True, SamplingParams(4, 0.5, -3, True), timeout_seconds)


def summary() -> GenerateSummary:
    return GenerateSummary("length", USAGE, 4, 3, Timings(0.1, 0.2, 0.3, 0.4), WIRE, PREFILL, DECODE, (1, 2, 3))
