"""What the pools must hold, kept the plain way: every token of every sequence, and bytes that follow from the tokens.

An engine computes the value of a token from all tokens up to it. Here that value is a number made from a hash of the
scope and of these tokens, so a page that belongs to another prompt, another position or another layer shows.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvferry.cache.block_keys import ReuseScope
from kvferry.cache.layout import CacheLayout, LifeCycleLayout
from kvferry.cache.lifecycle import ceil_div
from kvferry.cache.manager import KVCacheManager
from kvferry.cache.sequence import SequenceCache, SequenceState

Values = npt.NDArray[np.float64]
Hashes = npt.NDArray[np.uint64]

_MIX = np.uint64(0x9E3779B97F4A7C15)


def _mixed(values: Hashes, with_number: int) -> Hashes:
    """One round of a 64-bit mixing function."""
    mixed = (values ^ np.uint64(with_number)) * _MIX
    return (mixed ^ (mixed >> np.uint64(29))) * _MIX


def prefix_hashes(tokens: Sequence[int], scope: ReuseScope) -> Hashes:
    """A hash of the scope and the first n tokens, for every n. Shapes: [len(tokens) + 1]."""
    found = [np.frombuffer(scope.key[:8], np.uint64)]
    for token in tokens:
        found.append(_mixed(found[-1], token + 1))
    return np.concatenate(found)


class NaiveSequence:
    """A sequence and all its tokens that are history.

    Attributes:
        prompt: the tokens it will have.
        missing: first token that is still on its way from another worker; None: everything is there.
        has_state: its recurrent state is that after its tokens; otherwise it has to be received.
        finished: it publishes nothing any more.
    """

    def __init__(self, cache: SequenceCache, scope: ReuseScope, tokens: list[int], prompt: list[int]) -> None:
        self.cache = cache
        self.scope = scope
        self.tokens = tokens
        self.prompt = prompt
        self.missing: int | None = None
        self.has_state = True
        self.finished = False
        self.hashes = prefix_hashes(tokens, scope)

    def __repr__(self) -> str:
        return f"<{self.cache.request_id} of {len(self.tokens)} tokens>"

    def append(self, tokens: Iterable[int]) -> None:
        self.tokens = [*self.tokens, *tokens]
        self.hashes = prefix_hashes(self.tokens, self.scope)

    @property
    def num_present(self) -> int:
        """Tokens that can be read."""
        return len(self.tokens) if self.missing is None else self.missing


class NaiveEngine:
    """Writes and reads the pools of a manager like an engine whose results are the values described above."""

    def __init__(self, manager: KVCacheManager) -> None:
        self.manager = manager
        self._p = manager.layout.tokens_per_block
        layout: CacheLayout = manager.layout
        self._buffers = [
            (group, view, manager.buffer(view.layer_id, view.role).numpy(), self._paged(view.layer_id, view.role))
            for group in layout.life_cycles
            for view in group.buffers
        ]
        self._states = [
            (view, manager.state(view.layer_id, view.role).numpy())
            for group in layout.life_cycles
            for view in group.states
        ]

    def _paged(self, layer_id: int, role: str) -> npt.NDArray[np.generic]:
        paged: npt.NDArray[np.generic] = self.manager.paged_buffer(layer_id, role).numpy()
        return paged

    # ---- writing

    def compute(self, sequence: SequenceCache, hashes: Hashes) -> None:
        """Write tokens [history, history + n), layer by layer. Shapes: hashes [history + n + 1]."""
        history, end = sequence.history, len(hashes) - 1
        positions = np.arange(history, end)
        for number, (group, view, _, paged) in enumerate(self._buffers):
            indices = sequence.page_indices(group.id, view.layer_id)[positions // self._p]
            assert (indices >= 0).all(), "every token of a step needs a page in every layer"
            expected = self._token_values(number, view.num_heads, view.head_dim, hashes[positions + 1], paged.dtype)
            paged[indices, :, positions % self._p, :] = expected
            # Before the next layer runs, this one reads all of the step, scratch pages, too.
            assert np.array_equal(paged[indices, :, positions % self._p, :], expected)
        self.write_state(sequence, hashes[end])

    def write_state(self, sequence: SequenceCache, prefix_hash: np.uint64) -> None:
        if self._states and sequence.capacity:
            self._write_state(sequence.state_slot, prefix_hash)

    def _write_state(self, slot: int, prefix_hash: np.uint64) -> None:
        for number, (_, states) in enumerate(self._states):
            states[slot] = self._state_value(number, prefix_hash)

    def receive(self, group: LifeCycleLayout, ordinal: int, slot: int, hashes: Hashes) -> None:
        """Write all tokens that one block, or the state after them, as they come from another worker."""
        if group.life_cycle.recurrent:
            self._write_state(slot, hashes[-1])
            return
        positions = np.arange(ordinal * self._p, min((ordinal + 1) * self._p, len(hashes) - 1))
        for number, (owner, view, buffer, _) in enumerate(self._buffers):
            if owner is group:
                values = self._token_values(number, view.num_heads, view.head_dim, hashes[positions + 1], buffer.dtype)
                buffer[slot, :, positions % self._p, :] = values

    # ---- comparing

    def check(self, naive: NaiveSequence) -> None:
        """Everything the sequence can still read is what it computed, or what another one with its prefix did."""
        sequence = naive.cache
        for group in self.manager.layout.life_cycles:
            slots = sequence.slots(group.id)
            for ordinal in np.flatnonzero(slots >= 0).tolist():
                if naive.has_state or not group.life_cycle.recurrent:
                    self.check_block(group, ordinal, int(slots[ordinal]), naive.hashes, naive.num_present)
        for entry in sequence.borrowed:
            group = self.manager.layout.life_cycles[entry.life_cycle]
            self.check_block(group, entry.ordinal, entry.slot, naive.hashes, naive.num_present)
        if sequence.state is SequenceState.ACTIVE:
            self._check_reach(sequence)
            self._check_indices(naive)

    def check_block(
        self, group: LifeCycleLayout, ordinal: int, slot: int, hashes: Hashes, num_tokens: int | None = None
    ) -> None:
        """One page holds these tokens, or the state after them."""
        num_tokens = len(hashes) - 1 if num_tokens is None else num_tokens
        if group.life_cycle.recurrent:
            if num_tokens == len(hashes) - 1 and num_tokens:
                for number, (view, states) in enumerate(self._states):
                    assert (states[slot] == self._state_value(number, hashes[-1])).all(), f"state of {view.layer_id}"
            return
        positions = np.arange(ordinal * self._p, min((ordinal + 1) * self._p, num_tokens))
        for number, (owner, view, buffer, _) in enumerate(self._buffers):
            if owner is group:
                there = buffer[slot, :, positions % self._p, :]
                expected = self._token_values(number, view.num_heads, view.head_dim, hashes[positions + 1], there.dtype)
                assert np.array_equal(there, expected), f"layer {view.layer_id} {view.role} tokens {positions}"

    def _check_reach(self, sequence: SequenceCache) -> None:
        """The next query, at position history, finds every token that it looks back on, and the sinks."""
        for group in self.manager.layout.life_cycles:
            window = group.life_cycle.window
            if not group.life_cycle.recurrent:
                tokens = np.arange(sequence.history)
                sinks = tokens < group.life_cycle.sink_blocks * self._p
                read = tokens if window is None else tokens[sinks | (tokens + window > sequence.history)]
                assert (sequence.slots(group.id)[read // self._p] >= 0).all(), f"{group.life_cycle} lacks tokens"

    def _check_indices(self, naive: NaiveSequence) -> None:
        """`paged_buffer` by `page_indices` shows the same bytes as `buffer` by slot."""
        for group, view, buffer, paged in self._buffers:
            slots = naive.cache.slots(group.id)
            there = np.flatnonzero(slots >= 0)
            indices = naive.cache.page_indices(group.id, view.layer_id)
            assert len(indices) == ceil_div(naive.cache.capacity, self._p)
            assert buffer[slots[there]].tobytes() == paged[indices[there]].tobytes()

    # ---- values

    def _token_values(
        self, number: int, num_heads: int, head_dim: int, hashes: Hashes, dtype: "np.dtype[np.generic]"
    ) -> npt.NDArray[np.generic]:
        """Values of some tokens in one buffer. Shapes: hashes [n] -> [n, num_heads, head_dim]."""
        heads = [_mixed(hashes, (number << 8) + head + 1) for head in range(num_heads)]
        values = (np.stack(heads, axis=1) >> np.uint64(41))[:, :, None] + np.arange(head_dim, dtype=np.uint64)
        return (values & np.uint64(255) if dtype == np.uint8 else values).astype(dtype)

    def _state_value(self, number: int, prefix_hash: np.uint64) -> float:
        return float(_mixed(np.array([prefix_hash]), (number << 16) + 7)[0] >> np.uint64(41))
