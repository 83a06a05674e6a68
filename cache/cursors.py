"""How a serving loop moves the cursors of a sequence. Every function returns what to hand to `resize`.

    committed <= history <= capacity        history: tokens that need no query in the next step
                                            capacity: tokens that can be stored

Between steps capacity leads history by `extra` tokens. A step grows it by one token and its draft, and what was not
accepted is given back when the step's result is known. With several steps in flight, each has grown before the
first is given back.

Source: pools specification 3.9 and 4.6.
"""

from typing import NamedTuple

from kvferry.cache.lifecycle import ceil_div

_TABLE_MULTIPLE_BLOCKS = 4


class Resize(NamedTuple):
    """Arguments of a sequence's `resize`; None leaves the cursor where it is."""

    capacity: int | None
    history: int | None


class ChunkUndo(NamedTuple):
    """How a prompt chunk that was not computed is taken back.

    Attributes:
        resize: what to hand to `resize`; None: give up all pages and compute the prompt from its first token.
        position: where the next chunk starts.
    """

    resize: Resize | None
    position: int


def headroom(extra: int = 0, draft: int = 0, steps_in_flight: int = 1) -> int:
    """The most tokens by which capacity ever leads history: what bounds of live pages have to be asked with."""
    return extra + steps_in_flight * (1 + draft)


def context_capacity(capacity: int, position: int, chunk: int, *, extra: int = 0) -> int:
    """Capacity before `chunk` prompt tokens are computed from `position` on."""
    return max(capacity, position + chunk + extra)


def lookup_tokens(prompt: int, limit: int | None = None, *, match_backoff: int = 0) -> int:
    """Leading tokens of a prompt to look up when at most `limit` may be reused: a match falls short by the backoff.

    Source: pools specification 3.11 and 5.3.
    """
    return prompt if limit is None else min(prompt, limit + match_backoff)


def decode_start(capacity: int, prompt: int, *, drafts: int = 0, extra: int = 0) -> Resize:
    """Take up a received prompt: all of it is history, so that pages out of their window are never allocated.

    Args:
        drafts: draft tokens that came with the prompt.
    """
    return Resize(max(capacity, prompt + drafts + extra), prompt)


def draft_start(position: int, chunk: int, *, drafts: int, extra: int = 0) -> int:
    """Capacity of a draft model's sequence that computes its prompt to the end and drafts at once."""
    return position + chunk + drafts + extra


def effective_draft(sent: int | None, longest: int, *, speculating: bool = True) -> int:
    """Draft tokens of a request's first step after the transfer: those sent, or the longest draft when none were."""
    if not speculating:
        return 0
    return longest if sent is None else sent


def generation_capacity(capacity: int, *, draft: int = 0) -> int:
    """Capacity before a decode step of one token and its draft."""
    return capacity + 1 + draft


def padded_capacity(capacity: int, *, draft: int, padded_draft: int) -> int:
    """Capacity when a step that has already grown for `draft` is padded to a longer draft: only the difference."""
    return capacity + max(0, padded_draft - draft)


def undone_growth(capacity: int, tokens: int, *, draft: int = 0) -> int:
    """Capacity after a decode step that was grown for and did not run. Never below the `tokens` - 1 that are stored."""
    return max(capacity - 1 - draft, tokens - 1)


def undone_chunk(capacity_before: int, history: int) -> ChunkUndo:
    """Take back the growth for a chunk. A history beyond the old capacity cannot shrink: only a fresh start helps."""
    if history > capacity_before:
        return ChunkUndo(None, 0)
    return ChunkUndo(Resize(capacity_before, history), history)


def after_step(
    capacity: int,
    tokens: int,
    *,
    draft: int = 0,
    accepted: int = 0,
    finished: bool = False,
    moves_history: bool = True,
) -> Resize:
    """Cursors once the result of a decode step is known.

    Args:
        tokens: tokens of the request that are known now; the last of them is not stored yet.
        draft: what the step had grown for.
        accepted: how much of the draft was accepted.
        finished: the request ends here; its pages are given back as a whole.
        moves_history: False where something else decides what is history.
    """
    stored = tokens - 1
    history = stored if moves_history else None
    if finished:
        return Resize(None, history)
    return Resize(max(capacity - (draft - accepted), stored), history)


def max_blocks_per_sequence(max_seq_len: int, tokens_per_block: int, *, headroom: int) -> int:
    """Width of a block table: no sequence, however far it runs ahead, has more blocks. A multiple of 4."""
    blocks = ceil_div(max_seq_len + headroom, tokens_per_block)
    return ceil_div(blocks, _TABLE_MULTIPLE_BLOCKS) * _TABLE_MULTIPLE_BLOCKS


def index_rows(
    max_batch: int, *, pipeline: int = 1, overlap: bool = False, disaggregated: bool = False, reserved: int = 1
) -> int:
    """Rows of a block table: one per sequence that may be resident.

    They are doubled where the next sequence starts while an earlier one still has its row: one whose last step is in
    flight (overlap), or whose pages are on their way (disaggregated).

    Args:
        pipeline: stages that each work on a batch of their own.
        reserved: rows kept for padding sequences.
    """
    doubled = disaggregated or (overlap and pipeline == 1)
    return max_batch * pipeline * (2 if doubled else 1) + reserved
