"""What is measured of a cache manager, at which sizes. The sides take turns, in one process."""

import gc
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from benchmarks.report import Bookkeeping, Comparison, Scaling
from benchmarks.side import Pool, Side
from benchmarks.stopwatch import Work, interleave, timed
from benchmarks.workload import Attention, Prompts, Shape, Tokens

ATTENTIONS: tuple[Attention, ...] = ("full", "hybrid")


@dataclass(frozen=True)
class Sizes:
    """How much work a run does.

    Attributes:
        num_rounds: measured rounds; figures are their medians.
        num_requests: requests served in one round.
        prompt_tokens: lengths of those requests.
        num_running: sequences that decode together.
        num_steps: decode steps; each is a round of its own.
        hit_tokens: leading tokens of the matched prompt that are cached; whole blocks of every size measured.
        cached_blocks: blocks cached while memory is counted.
        scaling_tokens: prompt lengths of the scaling table.
    """

    tokens_per_block: tuple[int, ...] = (16, 32)
    num_rounds: int = 7
    num_requests: int = 8
    prompt_tokens: tuple[int, ...] = (512, 8192)
    num_running: int = 1024
    num_steps: int = 256
    running_tokens: tuple[int, int] = (1024, 3072)
    match_tokens: int = 100_000
    hit_tokens: int = 90_112
    cached_blocks: int = 100_000
    scaling_tokens: tuple[int, ...] = (1_000, 10_000, 100_000, 1_000_000)


class LookUp(NamedTuple):
    """A way to look for a prompt's cached prefix.

    Attributes:
        hashed: the block hashes are computed beforehand.
        of: the operation of a pool.
    """

    name: str
    hashed: bool
    of: Callable[[Pool], Callable[[Any], int]]


MATCH = LookUp("hashing it", False, lambda pool: pool.match)
LOOK_UPS = (
    MATCH,
    LookUp("hashed before", True, lambda pool: pool.match_hashed),
    LookUp("hashed before, and use it", True, lambda pool: pool.adopt_hashed),
)

QUICK = Sizes(
    num_rounds=3,
    num_requests=2,
    prompt_tokens=(1024,),
    num_running=64,
    num_steps=16,
    running_tokens=(64, 256),
    match_tokens=4_000,
    hit_tokens=3_584,
    cached_blocks=2_000,
    scaling_tokens=(1_000, 4_000),
)
"""Shows that everything runs; the figures mean little."""


def admission(sides: Sequence[Side], sizes: Sizes) -> Iterator[Comparison]:
    """(a) Admit, commit and free prompts that are all different: with room for all, and evicting all the time."""
    all_rounds = (sizes.num_rounds + 1) * sizes.num_requests
    for num_tokens in sizes.prompt_tokens:
        for shape in _shapes(sizes):
            for state, num_requests in (("evicting", max(1, sizes.num_requests // 2)), ("never full", all_rounds)):
                pool_shape = _sized(shape, shape.blocks_of(num_tokens) * num_requests)
                works = {side.name: _serving(side.open(pool_shape), num_tokens, sizes.num_requests) for side in sides}
                timings = interleave(works, sizes.num_rounds)
                yield Comparison(f"admit {num_tokens} tokens, commit, free", f"{_words(shape)}, {state}", timings)


def _serving(pool: Pool, num_tokens: int, num_requests: int) -> Work:
    prompts = Prompts()

    def work() -> float:
        batch = [pool.prompt(prompts.take(num_tokens)) for _ in range(num_requests)]
        return timed(lambda: [pool.serve(prompt) for prompt in batch]) / num_requests

    return work


def growth(sides: Sequence[Side], sizes: Sizes) -> Iterator[Comparison]:
    """(b) One more token for all running sequences, whose lengths are spread so that 1/p of them start a block."""
    longest = sizes.running_tokens[1] + sizes.num_steps + 1
    for publish in (False, True):
        for shape in _shapes(sizes):
            num_blocks = (shape.blocks_of(longest) + 1) * sizes.num_running
            works: dict[str, Work] = {}
            for side in sides:
                pool = side.open(_sized(shape, num_blocks, publish=publish))
                pool.start(Prompts().take_some(sizes.num_running, *sizes.running_tokens))
                works[side.name] = pool.step
            what = f"decode step of {sizes.num_running}" + (", publish filled blocks" if publish else "")
            yield Comparison(what, _words(shape), interleave(works, sizes.num_steps))


def matching(sides: Sequence[Side], sizes: Sizes) -> Iterator[Comparison]:
    """(c) Look up a long prompt of which 90 % is cached."""
    cached, wanted = _overlapping(sizes.match_tokens, sizes.hit_tokens)
    for shape in _shapes(sizes):
        pools = {}
        for side in sides:
            pools[side.name] = side.open(_sized(shape, 2 * shape.blocks_of(sizes.match_tokens)))
            pools[side.name].serve(pools[side.name].prompt(cached))
        for look_up in LOOK_UPS:
            works = {name: _matching(pool, look_up, wanted, sizes.hit_tokens) for name, pool in pools.items()}
            timings = interleave(works, sizes.num_rounds)
            yield Comparison(f"match {sizes.match_tokens} tokens, {look_up.name}", _words(shape), timings)


def _matching(pool: Pool, look_up: LookUp, wanted: Tokens, hit_tokens: int) -> Work:
    operation = look_up.of(pool)
    prompt = pool.prompt(wanted)
    operand = pool.hashed(prompt) if look_up.hashed else prompt
    found = operation(operand)
    if found != hit_tokens:
        raise RuntimeError(f"{found} tokens matched where {hit_tokens} are cached: the sides would do different work")
    return lambda: timed(lambda: operation(operand))


def _overlapping(num_tokens: int, hit_tokens: int) -> tuple[Tokens, Tokens]:
    """A prompt to cache, and one of `num_tokens` that shares exactly its first `hit_tokens`.

    The first has one token more than they share: vLLM keeps of a window what a prompt with the same last but one
    token can start from.
    """
    prompts = Prompts(1)
    wanted = prompts.take(num_tokens)
    cached = wanted[: hit_tokens + 1].copy()
    cached[-1] += 1
    return cached, wanted


def bookkeeping(sides: Sequence[Side], sizes: Sizes) -> Iterator[Bookkeeping]:
    """(d) Bytes the books take per cached page of a pool that is full of cached pages."""
    for shape in _shapes(sizes):
        counts = {}
        for side in sides:
            counts[side.name] = _bytes_per_page(side, _sized(shape, sizes.cached_blocks))
        yield Bookkeeping(
            _words(shape),
            {name: count for name, (count, _) in counts.items()},
            {name: cached for name, (_, cached) in counts.items()},
        )


def _bytes_per_page(side: Side, shape: Shape) -> tuple[float, int]:
    """Bytes per cached page, and cached pages. The pool is filled one and a half times, in 16 prompts a fill."""
    prompts = Prompts()
    num_tokens = shape.num_blocks // len(shape.windows) * shape.tokens_per_block // 16
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        pool = side.open(shape)
        for _ in range(24):
            pool.serve(pool.prompt(prompts.take(num_tokens)))
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    num_cached = pool.num_cached()
    return (after - before) / num_cached, num_cached


def scaling(side: Side, sizes: Sizes) -> Iterator[Scaling]:
    """How one side's cost grows with the prompt: serving prompts that are all different, and matching 90 % of one."""
    for shape in _shapes(sizes):
        for num_tokens in sizes.scaling_tokens:
            pool = side.open(_sized(shape, 2 * shape.blocks_of(num_tokens)))
            hit_tokens = num_tokens * 9 // 10 // shape.tokens_per_block * shape.tokens_per_block
            cached, wanted = _overlapping(num_tokens, hit_tokens)
            serve = interleave({side.name: _serving(pool, num_tokens, 1)}, sizes.num_rounds)[side.name]
            pool.serve(pool.prompt(cached))
            match_it = _matching(pool, MATCH, wanted, hit_tokens)
            match = interleave({side.name: match_it}, sizes.num_rounds)[side.name]
            yield Scaling(_words(shape), num_tokens, serve, match)


def _shapes(sizes: Sizes) -> Iterator[Shape]:
    for attention in ATTENTIONS:
        for tokens_per_block in sizes.tokens_per_block:
            yield Shape(attention, tokens_per_block, 0)


def _sized(shape: Shape, num_blocks: int, *, publish: bool = True) -> Shape:
    return Shape(shape.attention, shape.tokens_per_block, num_blocks, publish)


def _words(shape: Shape) -> str:
    return f"{shape.attention}, block {shape.tokens_per_block}"
