"""Random models, options and prompts: small, so that prefixes, windows and pools collide often."""

from enum import Enum
from typing import NamedTuple

from hypothesis import strategies as st

from kvferry.cache.admission import PoolOptions
from kvferry.cache.block_keys import ReuseScope
from kvferry.cache.spec import LayerSpec, ModelSpec
from tests.cache.specs import attention, model, recurrent

LONGEST = 48
SCOPES = (ReuseScope(), ReuseScope(adapter_id=1), ReuseScope(salt=2))
# Streams of few tokens that agree for a while: prompts cut from them share prefixes of every length.
STREAMS = tuple([int(c) for c in (head + tail) * 12] for head in ("1121", "112212") for tail in ("2", "131"))

attention_layers = st.builds(
    lambda window, sinks, dim, scale: attention(
        window, heads=1, head_dim=dim, sink_tokens=sinks if window else 0, scale_dim=scale
    ),
    window=st.one_of(st.none(), st.integers(1, 14)),
    sinks=st.sampled_from([0, 0, 1, 5]),
    dim=st.sampled_from([2, 2, 3]),
    scale=st.sampled_from([0, 0, 1]),
)
layers = st.one_of(*[attention_layers] * 5, st.just(recurrent(2, 3)))


def with_twins(kinds: list[LayerSpec], twice: bool) -> ModelSpec:
    return model(*(kind for kind in kinds for _ in range(1 + twice)))


models = st.builds(with_twins, st.lists(layers, min_size=1, max_size=4), st.booleans())
options = st.builds(
    PoolOptions,
    commit_policy=st.sampled_from(["all_reusable"] * 4 + ["per_request", "per_request", "per_conversation", "off"]),
    max_util_for_resume=st.sampled_from([1.0, 1.0, 0.5]),
    max_sequences=st.sampled_from([None, None, 3]),
    match_backoff_tokens=st.sampled_from([0, 0, 1, 3]),
    window_scratch=st.sampled_from([False, False, True]),
    max_rewind_tokens=st.sampled_from([0, 2]),
)


class Prompt(NamedTuple):
    """The first `length` of the tokens are known when the request comes, the others are generated."""

    tokens: list[int]
    length: int


class Serving(Enum):
    """How a request is served."""

    COMMIT_CHUNKS = "commit after every chunk"
    COMMIT_LATE = "commit once, at the end"
    SNAPSHOTS = "commit after every chunk with the recurrent state"
    STAY_OPEN = "commit after every chunk, do not end"


prompts = st.builds(
    lambda first, second, cut, length: Prompt(STREAMS[first][:cut] + STREAMS[second][cut:], length),
    st.integers(0, len(STREAMS) - 1),
    st.integers(0, len(STREAMS) - 1),
    st.integers(0, 12),
    st.integers(0, 24),
)
scopes = st.sampled_from([SCOPES[0]] * 6 + [*SCOPES])
