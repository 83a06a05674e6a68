"""How many slots a request is promised: the most it can hold at any moment, whatever part of it is reused."""

from kvferry.cache.admission import as_count
from kvferry.cache.layout import CacheLayout, LifeCycleLayout
from kvferry.cache.lifecycle import ceil_div


def reserved_slots(
    layout: CacheLayout, total_tokens: int, headroom_tokens: int, *, max_rewind_tokens: int | None = None
) -> tuple[int, ...]:
    """The tight bound on the pages of a sequence, per pool group.

    A reused prefix may end anywhere, and with it every chunk starts anywhere: unlike `sizing.peak_slots`, which follows
    given steps, this holds for every alignment, and is attained by some.

    Args:
        total_tokens: longest the sequence gets.
        headroom_tokens: most tokens that are stored and not yet history: the prefill chunk, 1 while decoding.
        max_rewind_tokens: as `PoolOptions.max_rewind_tokens` when window scratch is on; None when it is off.

    Raises: ConfigError: not a number of tokens.

    Source: pools specification 3.7 and 3.8.
    """
    total_tokens, headroom_tokens = as_count("total_tokens", total_tokens), as_count("headroom_tokens", headroom_tokens)
    totals = [0] * len(layout.pool_groups)
    for group in layout.life_cycles:
        totals[group.pool_group] += _pages(
            group, layout.tokens_per_block, total_tokens, min(headroom_tokens, total_tokens), max_rewind_tokens
        )
    return tuple(totals)


def _pages(
    group: LifeCycleLayout, tokens_per_block: int, total_tokens: int, headroom: int, max_rewind_tokens: int | None
) -> int:
    blocks = ceil_div(total_tokens, tokens_per_block)
    bound = group.life_cycle.max_live_blocks(headroom, tokens_per_block)
    if bound is None:
        return blocks
    if group.life_cycle.window is not None and max_rewind_tokens is not None:
        bound = min(bound, _pages_with_scratch(group, tokens_per_block, headroom, max_rewind_tokens))
    return min(bound, blocks)


def _pages_with_scratch(group: LifeCycleLayout, tokens_per_block: int, headroom: int, max_rewind_tokens: int) -> int:
    """Old blocks of the window, new ones that stay in it or may be rewound, and scratch slots for those between."""
    old = group.life_cycle.max_live_blocks(0, tokens_per_block)
    new = group.life_cycle.max_live_blocks(max(1, max_rewind_tokens), tokens_per_block)
    assert old is not None
    assert new is not None
    return old + new + ceil_div(ceil_div(headroom, tokens_per_block), group.sub_pages)
