"""Records that obey every rule, for tests to send and to bend."""

import numpy as np

from kvferry.cache.ids import LayerId
from kvferry.cache.layout import BufferView, StateView
from kvferry.cache.lifecycle import LifeCycle
from kvferry.cache.page_table import BlockLists, LayerGroupEntry, PageTable, PoolEntry
from kvferry.transfer.inference import (
    DecodeCall,
    DirectoryEntry,
    GenerateCall,
    GenerateSummary,
    PeerStatus,
    PoolGroupStatus,
    PrefillReply,
    SamplingParams,
    Timings,
    WorkerStatus,
)
from kvferry.transfer.types import (
    AuxRecord,
    Cancel,
    Direction,
    Failure,
    Grant,
    Permit,
    Phase,
    PromptId,
    RankInfo,
    Renewal,
    ResultStatus,
    Role,
    Side,
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
    """A group with two pools, one with a window, a recurrent one; 4 tokens per block, 2 heads of 8 values."""
    values = [
        tuple(
            BufferView(LayerId(layer), role, at * 256, 2, 8, 128, 32, "float32")
            for at, role in enumerate(("key", "value"))
        )
        for layer in (0, 1)
    ]
    scales = BufferView(LayerId(0), "key_block_scale", 0, 2, 8, 32, 8, "uint8", 1)
    states = (
        StateView(LayerId(2), "conv_state", 0, (4, 3), "float32"),
        StateView(LayerId(2), "ssm_state", 48, (2, 3, 4), "bfloat16"),
    )
    groups = (
        LayerGroupEntry(LifeCycle(), (0, 2), (*values[0], scales)),
        LayerGroupEntry(LifeCycle(128, 1), (1,), values[1]),
        LayerGroupEntry(LifeCycle(recurrent=True), (3,), (), states),
    )
    pools = (
        PoolEntry(1 << 40, 512, 512, 100),
        PoolEntry(1 << 41, 512, 1024, 50),
        PoolEntry(1 << 42, 64, 64, 100),
        PoolEntry(1 << 43, 96, 96, 10),
    )
    return PageTable("a" * 64, "float32", 4, "cpu", pools, groups)


def rank(worker: WorkerId, role: Role) -> RankInfo:
    return RankInfo(worker, role, 0, 1, "loopback", f"agent-{worker}", b"\x00\xff" * 20, "b" * 64, "V2", page_table())


def pages() -> BlockLists:
    slots = (np.array([3, 4, 9], np.int32), np.array([-1, -1, 7], np.int32))
    return BlockLists(slots, (np.array([1, 1, 2], np.uint32), np.array([0, 0, 4_000_000_000], np.uint32)))


def grant(key: TransferKey = KEY, sender: WorkerId = PREFILL, receiver: WorkerId = DECODE) -> Grant:
    return Grant(key, sender, receiver, PromptId.of(range(70)), pages(), 12.5, "r1", Direction.PULL, True)


def permit(key: TransferKey = KEY, sender: WorkerId = PREFILL, receiver: WorkerId = DECODE) -> Permit:
    return Permit(key, sender, receiver, grant().fence, pages(), 7.5)


def result(key: TransferKey = KEY, sender: WorkerId = PREFILL, receiver: WorkerId = DECODE) -> TransferResult:
    aux = AuxRecord((17, 4), (-0.25, -1.5), USAGE, (9,))
    return TransferResult(key, sender, receiver, ResultStatus.OK, grant().fence, True, WIRE, aux)


def failure() -> Failure:
    return Failure("post_failed", Phase.WIRE, "the post failed after 3 of 5 pages", "look at the network", (0, 2))


def cancel(origin: WorkerId = DECODE, key: TransferKey = KEY) -> Cancel:
    return Cancel(key, origin, failure(), grant().fence, quiet=False)


def renewal(origin: WorkerId = DECODE, side: Side = Side.RECEIVER) -> Renewal:
    return Renewal(origin, side, (KEY, TransferKey("0" * 32, 2)), 3.5)


def status(worker: WorkerId = PREFILL) -> WorkerStatus:
    group = PoolGroupStatus(("full", "window 128"), 512, 100, 70, 20, 8, 2, 20)
    peers = (PeerStatus(DECODE, Role.DECODE, "cma"),)
    return WorkerStatus(
        worker, Role.PREFILL, "tiny", "V2", "nixl", "PYTHON", (group,), 1, 2, 3, 4, peers, "ok", 4711, "busy"
    )


def entry(worker: WorkerId, endpoint: str = "127.0.0.1:1", role: Role = Role.BOTH) -> DirectoryEntry:
    return DirectoryEntry(worker, role, endpoint, "tiny")


def call(timeout_seconds: float = 10.0, prompt: str = "hello") -> GenerateCall:
    return GenerateCall("r1", prompt, None, True, SamplingParams(4, 0.5, -3, True), timeout_seconds, "tenant 1", KEY)


def prefill_reply() -> PrefillReply:
    return PrefillReply(KEY, PREFILL, (1, 2, 3), 0.25, 0.5, 30.0, 2)


def decode_call() -> DecodeCall:
    return DecodeCall("r1", KEY, PREFILL, (1, 2, 3), SamplingParams(8), 10.0, "tenant 1", True)


def summary() -> GenerateSummary:
    return GenerateSummary("length", USAGE, 4, 3, Timings(0.1, 0.2, 0.3, 0.4), WIRE, PREFILL, DECODE, (1, 2, 3), 16)
