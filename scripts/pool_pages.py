"""The numbers, tables and traces of docs/pools.md, each taken from the pools themselves.

Managers here have a few small slots, or no bytes at all (device "meta"), so that a page is written in a second.
"""

import contextlib
import io
import runpy
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from pool_samples import (
    MODELS,
    ROOT,
    Rows,
    cells,
    columns,
    fenced,
    hybrid_layout,
    layers,
    prompt,
    real_model,
    refusal,
    run,
    small_layout,
    table,
    wrapped,
)

from kvferry.cache.admission import PoolOptions, Verdict
from kvferry.cache.holds import Access
from kvferry.cache.ids import LayerId, LifeCycleId
from kvferry.cache.layout import CacheLayout, build_layout, build_static_layout
from kvferry.cache.lifecycle import LifeCycle
from kvferry.cache.manager import KVCacheManager
from kvferry.cache.reservation import reserved_slots
from kvferry.cache.sizing import static_slots
from kvferry.cache.spec import ModelSpec
from kvferry.cache.static_manager import StaticKVCacheManager
from kvferry.cache.workload import Batch, Workload, size_pools

EXAMPLE = ROOT / "docs" / "examples" / "embedding.py"
FULL, WINDOWED = LifeCycleId(0), LifeCycleId(1)
GIB = 1 << 30


# ---- the regions, in the order of the page


def life_cycles() -> Rows:
    """Layers by life cycle of real models."""
    yield from table("model | life cycle | layers | bytes of one slot | pool group", life_cycle_rows(build_layout))


def life_cycle_rows(build: Callable[[ModelSpec], CacheLayout]) -> Iterator[Sequence[object]]:
    for name in MODELS:
        for group in build(real_model(name)).life_cycles:
            yield name, group.life_cycle, len(group.layer_ids), group.slot_bytes, group.pool_group


def slots() -> Rows:
    """What lies where in a slot of GPT-OSS."""
    layout = build_layout(real_model(MODELS[0]))
    group = layout.life_cycles[0]
    yield from fenced(slot_rows(group.slot_bytes, [(v.offset_bytes, v.layer_id, v.role) for v in group.buffers]))


def slot_rows(slot_bytes: int, views: Sequence[tuple[int, int, str]]) -> Rows:
    yield f"slot of life cycle 0, {slot_bytes:,} bytes, one block of 32 tokens:"
    yield ""
    for offset, layer_id, role in [*views[:4], *views[-1:]]:
        if (offset, layer_id, role) == views[-1]:
            yield f"  {'...':>9}"
        yield f"  {offset:>9,}  layer {layer_id:<2} {role:<5}  [8 heads][32 tokens][64 values]"


def stale() -> Rows:
    """The blocks of a window of 6 behind one sink block while history grows."""
    rule = LifeCycle(window=6, sink_blocks=1)
    yield from fenced(stale_rows(rule))


def stale_rows(rule: LifeCycle) -> Rows:
    widths = (7, 8, 24, 12)
    yield f"{rule}, 4 tokens per block; S sink, # live, . stale; a query sees its last 6 tokens"
    yield ""
    yield columns(widths, ("history", "sees", "blocks 0 1 2 ...", "stale range"))
    for history in (4, 8, 9, 12, 13, 16, 17, 21, 25):
        blocks, gone = history // 4 + 1, rule.stale_range(history, 4)
        marks = ["S" if block < 1 else "." if gone.start <= block < gone.end else "#" for block in range(blocks)]
        sees = f"{max(0, history - 5)}..{history}"
        yield columns(widths, (history, sees, " ".join(marks), f"[{gone.start}, {gone.end})"))


def bound() -> Rows:
    """Live pages of a window, counted and bounded."""
    yield from table(
        "window | tokens per block | capacity - history | ceil(window / block) | most, counted | bound", bound_rows()
    )


def bound_rows() -> Iterator[Sequence[object]]:
    for window, p, headroom in ((6, 4, 1), (128, 32, 1), (1024, 32, 1), (1024, 32, 512), (1, 32, 1)):
        rule = LifeCycle(window)
        history = np.arange(4 * (window + p), dtype=np.int64)
        counted = int(rule.live_counts(history, history + headroom, p).max())
        yield window, p, headroom, -(-window // p), counted, rule.max_live_blocks(headroom, p) or 0


def block_table() -> Rows:
    """One sequence from creation to a rewind."""
    yield from fenced(block_table_rows())


def block_table_rows() -> Rows:
    manager = KVCacheManager(small_layout(None, 6), [16])
    sequence = manager.create_sequence("a")
    yield "cursors: committed / history / capacity; numbers are slots of the one pool group"
    yield ""
    yield columns((26, 13, 17, 17), ("", "cursors", "full", "window 6"))

    def line(what: str) -> str:
        cursors = f"{sequence.committed:2} /{sequence.history:3} /{sequence.capacity:3}"
        return columns((26, 13, 17, 17), (what, cursors, cells(sequence.slots(FULL)), cells(sequence.slots(WINDOWED))))

    yield line("create_sequence")
    sequence.resume()
    sequence.resize(capacity=10)
    yield line("resize(capacity=10)")
    sequence.commit(prompt(10))
    yield line("commit(10 tokens)")
    sequence.resize(capacity=17)
    yield line("resize(capacity=17)")
    sequence.resize(capacity=12)
    yield line("resize(capacity=12) rewind")
    sequence.commit(prompt(1))
    yield line("commit(1 token)")
    sequence.resize(capacity=16, history=13)
    yield line("resize(16, history=13)")


def received() -> Rows:
    """A decode worker's first resize."""
    yield from fenced(received_rows())


def received_rows() -> Rows:
    manager = KVCacheManager(small_layout(None, 6), [16])
    sequence = manager.create_sequence("a")
    sequence.resume()
    sequence.resize(capacity=22, history=22)
    yield "resize(capacity=22, history=22) of a new sequence"
    yield f"  full      {cells(sequence.slots(FULL))}"
    yield f"  window 6  {cells(sequence.slots(WINDOWED))}"


def slot_life() -> Rows:
    """Free, held and cached while two sequences come and go."""
    yield from fenced(slot_life_rows())


def slot_life_rows() -> Rows:
    manager = KVCacheManager(small_layout(None), [8])
    widths = (44, 4, 4, 6, 8)
    yield columns(widths, ("8 slots, blocks of 4 tokens", "free", "held", "cached", "reserved"))

    def line(what: str) -> str:
        usage = manager.usage()[0]
        return columns(widths, (what, f"{usage.free:4}", f"{usage.held:4}", f"{usage.cached:6}", f"{usage.reserved:8}"))

    yield line("empty")
    first = manager.create_sequence("a", [4])
    first.resume()
    first.resize(capacity=10)
    yield line("a reserves 4, resize(capacity=10)")
    first.commit(prompt(10))
    yield line("a commits 10 tokens: blocks 0, 1 published")
    second = manager.create_sequence("b", [4], token_ids=prompt(10))
    yield line("b reserves 4, matches blocks 0, 1")
    first.close()
    yield line("a closes, publishing its partial block 2")
    second.close()
    yield line("b closes")
    manager.clear_reusable()
    yield line("clear_reusable")


def matching() -> Rows:
    """What prompts match of a published one."""
    yield from fenced(matching_rows())


def matching_rows() -> Rows:
    tokens = prompt(22)
    managers = [
        KVCacheManager(small_layout(None, 6), [32], options=PoolOptions(commit_policy=policy))
        for policy in ("all_reusable", "per_request")
    ]
    for manager, policy in zip(managers, ("all_reusable", "per_request"), strict=True):
        run(manager, "a", tokens, chunk=22).close()
        tree = manager.published.tree
        order = sorted(tree.nodes().tolist(), key=lambda node: int(tree.ordinals[node]))
        pages = tree.pages[[node for node in order if tree.ordinals[node] >= 0]]
        yield f"{policy}: pages of the blocks [0..3] [4..7] [8..11] [12..15] [16..19] [20..21]"
        yield f"  full      {cells(pages[:, FULL].tolist())}"
        yield f"  window 6  {cells(pages[:, WINDOWED].tolist())}"
        yield ""
    yield columns((52, 12, 11), ("tokens that a prompt has in common with it", "all_reusable", "per_request"))
    for common in (22, 21, 20, 16, 10):
        asked = [*tokens[:common], *prompt(8, 500)]
        found = [manager.probe(asked) for manager in managers]
        yield columns((52, 12, 11), (common, f"{found[0]:12}", f"{found[1]:11}"))


def eviction() -> Rows:
    """Cached pages going one by one."""
    yield from fenced(eviction_rows())


def eviction_rows() -> Rows:
    manager = KVCacheManager(small_layout(None), [8])
    run(manager, "low", prompt(12), priority=10).close()
    run(manager, "usual", prompt(12, 200)).close()
    yield "8 slots: prompt `low` (priority 10) has 3 cached blocks, `usual` (35) has 3, 2 slots are free"
    yield ""
    widths = (20, 6, 22, 9, 11)
    yield columns(widths, ("another takes", "free", "next to go (slots)", "low: hit", "usual: hit"))
    other = manager.create_sequence("other")
    other.resume()
    for blocks in range(2, 9):
        other.resize(capacity=4 * blocks)
        victims = manager.allocators[0].next_victims(8).tolist()
        hits = (manager.probe(prompt(12)), manager.probe(prompt(12, 200)))
        yield columns(widths, (f"{blocks} blocks", manager.usage()[0].free, cells(victims) or "-", *hits))


def broken_windows() -> Rows:
    """One page lost, and what goes with it."""
    yield from fenced(broken_window_rows())


def broken_window_rows() -> Rows:
    manager = KVCacheManager(small_layout(9), [8])
    tokens = prompt(20)
    run(manager, "a", tokens).close()
    tree = manager.published.tree

    def pages() -> str:
        path = tree.find(manager.block_keys(tokens))
        shown = tree.pages[path][:, 0].tolist()
        return f"{cells([*shown, *[-1] * (5 - len(shown))])}    hit {manager.probe(tokens):2}"

    yield "window 9, 4 tokens per block: a hit needs the 2 blocks before it, or all of them"
    yield ""
    yield f"cached                {pages()}"
    lost = tree.find(manager.block_keys(tokens))[3:4].copy()
    manager.published.drop(LifeCycleId(0), lost)
    yield f"block 3 is evicted    {pages()}"


def transfers() -> Rows:
    """A hold that outlives its sequence, and what it forbids."""
    yield from fenced(transfer_rows())


def transfer_rows() -> Rows:
    manager = KVCacheManager(small_layout(None), [4])
    widths = (42, 4, 4, 6, 12)
    yield columns(widths, ("4 slots", "free", "held", "cached", "transferring"))

    def line(what: str) -> str:
        usage = manager.usage()[0]
        return columns(
            widths, (what, f"{usage.free:4}", f"{usage.held:4}", f"{usage.cached:6}", f"{usage.transferring:12}")
        )

    sequence = run(manager, "a", prompt(8))
    hold = manager.hold(sequence.pages(8), Access.READ)
    yield line("a has 2 blocks, a transfer reads them")
    sequence.close()
    yield line("a closes")
    manager.release(hold)
    yield line("the transfer ends")
    sequence = manager.create_sequence("b")
    sequence.resume()
    sequence.resize(capacity=8, history=8)
    hold = manager.hold(sequence.pages(8), Access.WRITE)
    yield line("b takes 2 blocks, a transfer writes them")
    message = refusal(lambda: sequence.commit(prompt(8, 300)))
    yield ""
    yield "b commits too early:"
    yield from wrapped(message)
    manager.release(hold)


def scratch() -> Rows:
    """A long chunk with and without scratch pages, and where three layers find their blocks."""
    yield from table(
        "1,024 tokens at once, window 128 | blocks with their own page | on scratch pages | slots taken",
        scratch_rows(),
    )
    yield from fenced(scratch_places())


def scratch_rows() -> Iterator[Sequence[object]]:
    layout = small_layout(*[128] * 32, tokens_per_block=32)
    for on in (False, True):
        manager = KVCacheManager(layout, [64], "meta", options=PoolOptions(window_scratch=on))
        sequence = manager.create_sequence("a")
        sequence.resume()
        sequence.resize(capacity=1024)
        gone = layout.life_cycles[0].life_cycle.scratch_range(0, 1024, 32)
        live = int((sequence.slots(LifeCycleId(0)) >= 0).sum())
        on_scratch = f"[{gone.start}, {gone.end})" if on else "none"
        yield "with scratch" if on else "without", live, on_scratch, manager.usage()[0].held


def scratch_places() -> Rows:
    manager = KVCacheManager(small_layout(6, 6, 6), [16], options=PoolOptions(window_scratch=True))
    sequence = manager.create_sequence("a")
    sequence.resume()
    sequence.resize(capacity=28)
    yield "3 layers of window 6, blocks of 4 tokens, a chunk of 28: page_indices (slot * 3 + sub-page) of blocks 0 to 6"
    yield f"  slots    {cells(sequence.slots(LifeCycleId(0)).tolist())}"
    for layer in range(3):
        yield f"  layer {layer}  {cells(sequence.page_indices(LifeCycleId(0), LayerId(layer)).tolist())}"


def recurrent() -> Rows:
    """Where the state stands, and what later prompts match."""
    yield from fenced(recurrent_rows())


def recurrent_rows() -> Rows:
    manager = KVCacheManager(hybrid_layout(), [16, 8])
    sequence = manager.create_sequence("a")
    sequence.resume()
    widths = (44, 15, 15)
    yield columns(widths, ("full attention and a state, blocks of 4", "full", "recurrent"))

    def line(what: str) -> str:
        return columns(widths, (what, cells(sequence.slots(FULL).tolist()), cells(sequence.slots(WINDOWED).tolist())))

    sequence.resize(capacity=8)
    yield line("resize(capacity=8)")
    sequence.commit(prompt(8), snapshot=True)
    yield line("commit(8 tokens, snapshot=True)")
    sequence.resize(capacity=14)
    sequence.commit(prompt(6, 108))
    yield line("resize(capacity=14), commit(6 tokens)")
    sequence.close()
    usage = manager.usage()[1]
    yield f"closed: {usage.cached} snapshots are cached, after token 8 and after token 14"
    yield ""
    for common in (14, 13, 12, 8, 7):
        asked = [*prompt(common), *prompt(8, 500)]
        yield f"a prompt with {common:2} tokens in common reuses {manager.probe(asked):2}"


def admission() -> Rows:
    """Promises, refusals and their words."""
    yield from fenced(admission_rows())


def admission_rows() -> Rows:
    layout = small_layout(None, 6)
    manager = KVCacheManager(layout, [30], options=PoolOptions(max_sequences=3))
    yield "30 slots, window 6 and full attention in one pool group, blocks of 4, chunks of 8, max_sequences 3"
    yield ""
    need = {tokens: reserved_slots(layout, tokens, 8) for tokens in (200, 28, 24, 20)}
    for tokens, slots_needed in need.items():
        yield f"a request of {tokens:3} tokens in all holds at most {slots_needed[0]} slots"
    yield ""
    yield from said("fits_ever, 200 tokens", manager.fits_ever(need[200]))
    yield from said("can_admit, 24 tokens", manager.can_admit(need[24]))
    manager.create_sequence("a", need[24])
    manager.create_sequence("b", need[24])
    yield "two such requests are open"
    yield from said("can_admit, 28 tokens", manager.can_admit(need[28]))
    yield from said("can_admit, 20 tokens", manager.can_admit(need[20]))
    manager.create_sequence("c", need[20])
    yield "it is open, too"
    yield from said("can_admit, 1 slot", manager.can_admit((1,)))


def said(what: str, verdict: Verdict) -> Rows:
    yield f"{what}: " + ("admitted" if verdict.admitted else "permanent" if verdict.permanent else "not now")
    if verdict.reason:
        yield from wrapped(verdict.reason)


def versions() -> Rows:
    """Requests in decode that fit, and what later prompts match."""
    yield from table("model | pools of V2 | pools of V1 | V2 | V1 | V2 / V1", capacity_rows())
    yield from fenced(reuse_rows())


def capacity_rows() -> Iterator[Sequence[object]]:
    for name in MODELS:
        ours, other = build_layout(real_model(name)), build_static_layout(real_model(name))
        counts = []
        decoding = Workload(typical=Batch.of([(8192, 8191)]))
        for layout, num_slots in (
            (ours, size_pools(ours, 80 * GIB, decoding)),
            (other, static_slots(other, 80 * GIB)),
        ):
            need = reserved_slots(layout, 8192, 1)
            counts.append(min(have // each for have, each in zip(num_slots, need, strict=True)))
        yield name, len(ours.pool_groups), len(other.pool_groups), *counts, f"{counts[0] / counts[1]:.2f}"


def reuse_rows() -> Rows:
    spec = ModelSpec("small", "float32", layers(None, 6))
    managers = (
        KVCacheManager(build_layout(spec, tokens_per_block=4), [32]),
        StaticKVCacheManager(build_static_layout(spec, tokens_per_block=4), [16, 16]),
    )
    tokens = prompt(22)
    for manager in managers:
        run(manager, "a", tokens).close()
    yield "window 6 and full attention, blocks of 4 tokens      V2  V1"
    yield columns(
        (52, 2, 2), ("22 tokens published, the same prompt again", *(f"{m.probe(tokens):2}" for m in managers))
    )
    for manager in managers:
        first = manager.published.tree.find(manager.block_keys(tokens))[:1].copy()
        manager.published.drop(WINDOWED, first)
    yield columns(
        (52, 2, 2), ("after the window page of block 0 was evicted", *(f"{m.probe(tokens):2}" for m in managers))
    )


def embedding() -> Rows:
    """The example program and what it prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(EXAMPLE))
    yield from ("```python", EXAMPLE.read_text().rstrip(), "```", "", "It prints:", "")
    yield from fenced(iter(printed.getvalue().splitlines()))


REGIONS: Mapping[str, Callable[[], Rows]] = {
    function.__name__.replace("_", "-"): function
    for function in (
        life_cycles,
        slots,
        stale,
        bound,
        block_table,
        received,
        slot_life,
        matching,
        eviction,
        broken_windows,
        transfers,
        scratch,
        recurrent,
        admission,
        versions,
        embedding,
    )
}
