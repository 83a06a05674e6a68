"""Hypothesis strategies for records that obey every rule."""

import math

import numpy as np
from hypothesis import strategies as st

from kvferry.cache.ids import LayerId
from kvferry.cache.layout import BufferView, StateView
from kvferry.cache.lifecycle import LifeCycle
from kvferry.cache.page_table import BlockLists, LayerGroupEntry, PageTable, PoolEntry
from kvferry.cache.spec import ITEM_BYTES
from kvferry.transfer.control.handlers import Snapshot
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
    TokenChunk,
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

names = st.text(st.characters(codec="ascii", categories=["L", "N", "P"]), min_size=1, max_size=30)
texts = st.text(max_size=30)
tokens = st.integers(0, 2**31 - 1)
token_lists = st.lists(tokens, max_size=20).map(tuple)
prompts = st.lists(tokens, min_size=1, max_size=20).map(tuple)
counts = st.integers(0, 2**63 - 1)
counts_32 = st.integers(0, 2**32 - 1)
seconds = st.floats(0, 1000)
timeouts = st.floats(0.001, 1000)
logprobs = st.floats(max_value=0, allow_nan=False)

workers = st.builds(WorkerId, names, st.integers(1, 2**63 - 1))
keys = st.builds(TransferKey, st.binary(min_size=16, max_size=16).map(bytes.hex), st.integers(1, 2**31 - 1))
usages = st.integers(1, 2**21).flatmap(lambda n: st.builds(Usage, st.just(n), st.integers(0, n)))
wires = st.builds(WireReport, counts_32, counts, counts, counts, seconds, names)
roles = st.sampled_from(Role)


def _blocks(pairs: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    slots = np.array([slot for slot, _ in pairs], np.int32)
    return slots, np.array([epoch if slot >= 0 else 0 for slot, epoch in pairs], np.uint32)


pairs = st.lists(st.tuples(st.integers(-1, 2**31 - 1), counts_32), max_size=20).map(_blocks)
pages = st.lists(pairs, min_size=1, max_size=4).map(lambda groups: BlockLists(*map(tuple, zip(*groups, strict=True))))
prompt_ids = st.builds(PromptId, st.integers(1, 2**21), st.binary(min_size=32, max_size=32))
request_ids = st.just("") | names
grants = st.builds(
    Grant, keys, workers, workers, prompt_ids, pages, timeouts, request_ids, st.sampled_from(Direction), st.booleans()
)
fences = st.integers(1, 2**64 - 1)
permits = st.builds(Permit, keys, workers, workers, fences, pages, timeouts)
failures = st.builds(
    Failure, names, st.sampled_from(Phase), texts, texts, st.lists(st.integers(0, 255), max_size=5).map(tuple)
)


@st.composite
def aux_records(draw: st.DrawFn) -> AuxRecord:
    first = draw(prompts)
    probabilities = draw(st.lists(logprobs, min_size=len(first), max_size=len(first)))
    return AuxRecord(first, tuple(probabilities), draw(usages), draw(token_lists))


@st.composite
def results(draw: st.DrawFn) -> TransferResult:
    status = draw(st.sampled_from(ResultStatus))
    aux = draw(aux_records()) if status is ResultStatus.OK else None
    optional = st.none() if status is ResultStatus.OK else st.none() | failures
    failure = draw(failures if status is ResultStatus.FAILED else optional)
    ends = draw(st.tuples(keys, workers, workers))
    fence = draw(fences if status is ResultStatus.OK else st.just(0) | fences)
    return TransferResult(*ends, status, fence, draw(st.booleans()), draw(wires), aux, failure)


cancels = st.builds(Cancel, keys, workers, failures, st.just(0) | fences, st.booleans())
renewals = st.builds(
    Renewal, workers, st.sampled_from(Side), st.lists(keys, min_size=1, max_size=5).map(tuple), timeouts
)
endpoints = st.builds("127.0.0.1:{}".format, st.integers(1, 65535)) | st.sampled_from(["[::1]:80", "localhost:7"])
entries = st.builds(DirectoryEntry, workers, roles, endpoints, texts, st.lists(workers, max_size=3).map(tuple))
snapshots = st.builds(Snapshot, counts, st.lists(entries, max_size=4).map(tuple))
samplings = st.builds(
    SamplingParams, st.integers(1, 2**21), st.floats(0, 1000), st.integers(-(2**63), 2**63 - 1), st.booleans()
)
salts = st.text(max_size=256)
_settings = (st.booleans(), samplings, timeouts, salts, st.none() | keys)
calls = st.builds(GenerateCall, request_ids, texts, st.none(), *_settings) | st.builds(
    GenerateCall, request_ids, st.none(), token_lists, *_settings
)
prefill_replies = prompts.flatmap(
    lambda p: st.builds(PrefillReply, keys, workers, st.just(p), seconds, seconds, timeouts, st.integers(0, len(p)))
)
decode_calls = st.builds(DecodeCall, request_ids, keys, workers, prompts, samplings, timeouts, salts, st.booleans())
chunks = st.lists(st.tuples(tokens, logprobs), max_size=10).flatmap(
    lambda drawn: st.builds(TokenChunk, st.just(tuple(t for t, _ in drawn)), st.just(tuple(p for _, p in drawn)), texts)
)
summaries = usages.flatmap(
    lambda usage: st.builds(
        GenerateSummary,
        names,
        st.just(usage),
        st.integers(0, 2**21),
        st.integers(0, 2**21),
        st.builds(Timings, seconds, seconds, seconds, seconds),
        wires,
        workers,
        workers,
        token_lists,
        st.integers(0, usage.prompt_tokens),
    )
)
pool_groups = st.builds(PoolGroupStatus, st.lists(names, max_size=3).map(tuple), *[counts] * 7)
statuses = st.builds(
    WorkerStatus,
    workers,
    roles,
    texts,
    names,
    names,
    names,
    st.lists(pool_groups, max_size=3).map(tuple),
    *[counts_32] * 4,
    st.lists(st.builds(PeerStatus, workers, roles, names), max_size=3).map(tuple),
    names,
    st.integers(1, 2**32 - 1),
    names,
)


dtypes = st.sampled_from(sorted(ITEM_BYTES))
layer_ids = counts_32.map(LayerId)
life_cycles = st.just(LifeCycle()) | st.builds(LifeCycle, st.integers(1, 2**32 - 1), counts_32)
shapes = st.lists(st.integers(1, 50), min_size=1, max_size=8).map(tuple)


@st.composite
def _buffer_views(draw: st.DrawFn, tokens_per_block: int, pool: int) -> BufferView:
    """Rows and heads may be padded; the first byte is anywhere."""
    dtype, heads, head_dim = draw(dtypes), draw(st.integers(1, 8)), draw(st.integers(1, 256))
    row = head_dim * ITEM_BYTES[dtype] + draw(st.integers(0, 9))
    head = row * tokens_per_block + draw(st.integers(0, 9))
    at, layer = draw(st.integers(0, 2**40)), draw(layer_ids)
    return BufferView(layer, draw(names), at, heads, head_dim, head, row, dtype, pool)


state_views = st.builds(StateView, layer_ids, names, st.integers(0, 2**40), shapes, dtypes)


def end_of(view: BufferView | StateView, tokens_per_block: int) -> int:
    """Bytes from the start of the slot to the end of a view."""
    if isinstance(view, StateView):
        return view.offset_bytes + math.prod(view.shape) * ITEM_BYTES[view.dtype]
    last = (view.num_heads - 1) * view.head_stride_bytes + (tokens_per_block - 1) * view.token_stride_bytes
    return view.offset_bytes + last + view.head_dim * view.item_bytes


devices = st.sampled_from(["cpu", "cuda", "cuda:0", "cuda:15"])


@st.composite
def page_tables(draw: st.DrawFn) -> PageTable:
    """One to four groups with pools of their own, each just as large as the views inside need, or larger."""
    tokens_per_block, groups = draw(st.integers(1, 64)), []
    pools: list[PoolEntry] = []
    for _ in range(draw(st.integers(1, 4))):
        recurrent = draw(st.booleans())
        num_pools, num_slots = 1 if recurrent else draw(st.integers(1, 3)), draw(st.integers(1, 1000))
        indices = tuple(range(len(pools), len(pools) + num_pools))
        buffers = tuple(draw(_buffer_views(tokens_per_block, pool)) for pool in range(0 if recurrent else num_pools))
        states = tuple(draw(st.lists(state_views, min_size=1, max_size=3))) if recurrent else ()
        for pool in range(num_pools):
            inside = [*states, *(view for view in buffers if view.pool == pool)]
            size = max(end_of(view, tokens_per_block) for view in inside) + draw(st.integers(0, 9))
            pools.append(PoolEntry(draw(st.integers(0, 2**48)), size, size + draw(st.integers(0, 9)), num_slots))
        life_cycle = LifeCycle(recurrent=True) if recurrent else draw(life_cycles)
        groups.append(LayerGroupEntry(life_cycle, indices, buffers, states))
    return PageTable(draw(names), draw(dtypes), tokens_per_block, draw(devices), tuple(pools), tuple(groups))


ranks = st.integers(1, 2**16).flatmap(
    lambda num_ranks: st.builds(
        RankInfo,
        workers,
        roles,
        st.integers(0, num_ranks - 1),
        st.just(num_ranks),
        names,
        names,
        st.binary(max_size=40),
        names,
        st.sampled_from(["V1", "V2"]) | names,
        page_tables(),
        st.integers(1, 2**32 - 1),
    )
)
