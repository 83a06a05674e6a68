"""May a request be admitted? Answers with numbers, and the rules an operator sets."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from kvferry.cache.errors import CapacityError, ConfigError
from kvferry.cache.lifecycle import Counts

MOST_TOKENS = 1 << 32


def as_count(name: str, value: object) -> int:
    """A number of tokens or slots. Raises ConfigError unless it is an integer from 0 to 2^32."""
    if not isinstance(value, (int, np.integer)) or not 0 <= value <= MOST_TOKENS:
        raise ConfigError(f"{name} is {value!r}: it must be an integer from 0 to {MOST_TOKENS}")
    return int(value)


def as_counts(name: str, values: npt.ArrayLike) -> Counts:
    """`as_count` of every value. Shapes: [n] -> [n]."""
    counts = np.asarray(values)
    if counts.size and (counts.dtype.kind not in "iu" or counts.min() < 0 or counts.max() > MOST_TOKENS):
        raise ConfigError(f"{name} is {counts.ravel()[:8].tolist()}: integers from 0 to {MOST_TOKENS} are needed")
    return counts.astype(np.int64)


CommitPolicy = Literal["off", "all_reusable", "per_request", "per_conversation"]
"""What sequences leave for others.

off: nothing. all_reusable: every block, its page kept also after it left the window. per_request: the pages needed to
go on from the committed length. per_conversation: as per_request, and the pages of an earlier turn go once a later
turn that was built on it has committed.
"""


@dataclass(frozen=True)
class PoolOptions:
    """How a manager admits and reuses.

    Attributes:
        max_util_for_resume: a sequence is not resumed while more than this share of any pool group is held by others.
        max_sequences: most sequences open at once, whatever the memory; None for no limit.
        match_backoff_tokens: tokens that every match falls short, for drafters that read ahead.
        window_scratch: share pages between the layers for prompt blocks that leave their window within one chunk. Such
            blocks are never published.
        max_rewind_tokens: tokens at the end of the capacity that may be rewound; scratch pages stay clear of them.
    """

    commit_policy: CommitPolicy = "all_reusable"
    max_util_for_resume: float = 1.0
    max_sequences: int | None = None
    match_backoff_tokens: int = 0
    window_scratch: bool = False
    max_rewind_tokens: int = 0

    def __post_init__(self) -> None:
        if self.commit_policy not in get_args(CommitPolicy):
            raise ConfigError(
                f"commit_policy is {self.commit_policy!r}: use one of {', '.join(get_args(CommitPolicy))}"
            )
        if not isinstance(self.window_scratch, bool):
            raise ConfigError(f"window_scratch is {self.window_scratch!r}: it must be True or False")
        limit = self.max_util_for_resume
        if math.isnan(limit) or not 0 < limit <= 1:
            raise ConfigError(f"max_util_for_resume is {limit}: it must lie above 0 and be at most 1")
        for name in ("max_sequences", "match_backoff_tokens", "max_rewind_tokens"):
            if getattr(self, name) is not None:
                as_count(name, getattr(self, name))
        if self.max_sequences is not None and self.max_sequences < 1:
            raise ConfigError(f"max_sequences is {self.max_sequences}: at least one sequence must be allowed")


DEFAULT_OPTIONS = PoolOptions()


class Verdict(NamedTuple):
    """Whether slots can be given, per pool group, and if not, why.

    Attributes:
        permanent: they never can, however long the caller waits.
    """

    admitted: bool
    requested: tuple[int, ...]
    available: tuple[int, ...]
    reason: str = ""
    permanent: bool = False

    def require(self, request_id: str) -> None:
        """Raise CapacityError with the numbers unless admitted."""
        if not self.admitted:
            raise CapacityError(
                f"request {request_id} {self.reason}",
                requested=self.requested,
                available=self.available,
                permanent=self.permanent,
            )


def judge_ever(requested: Sequence[int], totals: Sequence[int]) -> Verdict:
    """Whether even empty pools could hold this many slots."""
    fits = all(need <= total for need, total in zip(requested, totals, strict=True))
    reason = (
        f"needs {list(requested)} slots per pool group, the pools have {list(totals)}: raise the pool quota or shorten "
        "the request"
    )
    return Verdict(fits, tuple(requested), tuple(totals), "" if fits else reason, permanent=not fits)


def judge_now(requested: Sequence[int], unpromised: Sequence[int]) -> Verdict:
    """Whether this many slots are left beside all promises."""
    fits = all(need <= left for need, left in zip(requested, unpromised, strict=True))
    reason = (
        f"needs {list(requested)} slots per pool group, {list(unpromised)} are not spoken for: retry after a release"
    )
    return Verdict(fits, tuple(requested), tuple(unpromised), "" if fits else reason)


def judge_count(open_sequences: int, max_sequences: int | None) -> Verdict:
    """Whether one more sequence is within the cap."""
    fits = max_sequences is None or open_sequences < max_sequences
    reason = (
        f"is one too many: {open_sequences} sequences are open, max_sequences is {max_sequences}: retry when one closed"
    )
    return Verdict(fits, (1,), (0 if not fits else 1,), "" if fits else reason)


class StallWatch:
    """Notices that requests wait while nothing happens that could let them in.

    Args:
        patience_seconds: how long nothing must have changed.
    """

    def __init__(self, patience_seconds: float) -> None:
        self._patience_seconds = patience_seconds
        self._marks: tuple[int, ...] = ()
        self._since: float | None = None

    def stalled_seconds(self, now: float, marks: tuple[int, ...], *, waiting: bool) -> float | None:
        """How long requests have been waiting without progress, once that is longer than the patience; else None.

        Args:
            now: on the caller's clock, in seconds.
            marks: numbers that change whenever something moves: pages released, requests ended, transfers moving.
        """
        if not waiting or marks != self._marks or self._since is None:
            self._marks, self._since = marks, now if waiting else None
            return None
        stalled = now - self._since
        return stalled if stalled >= self._patience_seconds else None
