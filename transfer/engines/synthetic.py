"""An engine without a model: keys, values and states are a pure function of where they belong.

Every byte follows from (global layer, role, global head, all tokens up to its own), so a byte that went to the wrong
place, or was lost on the way, is found on the next step, whatever moved it and however it was split over ranks. Equal
prefixes have equal bytes, whichever request computed them: published pages can be reused, and pages of another prefix
are found.
"""

import hashlib
import json
from dataclasses import asdict
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from kvferry.cache.errors import InvariantError, LocalProtocolError
from kvferry.cache.layout import BufferView, LifeCycleLayout, StateView
from kvferry.cache.lifecycle import ceil_div
from kvferry.cache.protocol import CacheManager
from kvferry.cache.sequence import SequenceCache
from kvferry.cache.spec import ModelSpec
from kvferry.cache.storage import torch_dtype
from kvferry.transfer.engines.base import Engine, Tokenizer
from kvferry.transfer.engines.paged import TokenSpan, check_layout, first_visible_token, new_tokens
from kvferry.transfer.engines.text import ByteTokenizer

Words = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.uint8]

_PATTERN_VERSION = 2
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def prefix_words(token_ids: npt.NDArray[np.int64]) -> Words:
    """One word per token that stands for its position and all tokens up to it. Shapes: [n] both."""
    return np.cumsum(_mix(_mix(_counters(range(len(token_ids)))) + token_ids.astype(np.uint64)), dtype=np.uint64)


def expected(prefixes: Words, layer_id: int, role: str, heads: range, row_bytes: int) -> Bytes:
    """The bytes that belong to these heads and tokens of one buffer.

    Args:
        prefixes: of the tokens asked for, from `prefix_words`.
        layer_id: global index of the layer; `heads` are global too, so that any re-split can be checked.
        row_bytes: bytes of one head of one token.

    Shapes: [len(heads), len(prefixes), row_bytes].
    """
    head_keys = _mix(_named(layer_id, role) + _counters(heads))
    return _expand(head_keys[:, None] + prefixes, row_bytes)


def expected_state(prefix: np.uint64, layer_id: int, role: str, num_bytes: int) -> Bytes:
    """The bytes of one recurrent state after the token that `prefix` stands for. Shapes: [num_bytes]."""
    return _expand(_named(layer_id, role) + prefix, num_bytes).reshape(-1)


def _expand(keys: Words, num_bytes: int) -> Bytes:
    """Bytes drawn for every key. Shapes: [*keys, num_bytes]."""
    words = _mix(_mix(keys)[..., None] + _counters(range(ceil_div(num_bytes, 8))))
    drawn: Bytes = np.ascontiguousarray(words.astype("<u8")).view(np.uint8)[..., :num_bytes]
    return drawn


def _named(layer_id: int, role: str) -> Words:
    return _as_word(hashlib.blake2b(json.dumps([layer_id, role]).encode(), digest_size=8).digest())


def _as_word(digest: bytes) -> Words:
    return np.array([int.from_bytes(digest, "little")], np.uint64)


def _counters(numbers: range) -> Words:
    return np.arange(numbers.start, numbers.stop, dtype=np.uint64)


def _mix(counters: Words) -> Words:
    """A bijection on 64 bits in which every input bit reaches every output bit (the splitmix64 finaliser)."""
    x = (counters + np.uint64(1)) * _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(x ^ (x >> np.uint64(31)), np.uint64)


class SyntheticEngine(Engine):
    """Fills pages with `expected`, checks what it reads, and computes logits from a digest of it.

    The logits after a token depend on what that token sees, not on how the prompt was cut into chunks, on which worker
    computed it or for which request.
    """

    name: ClassVar[str] = "synthetic"

    def __init__(self, spec: ModelSpec, *, vocab_size: int = 384, max_seq_len_tokens: int = 1 << 20) -> None:
        self.spec = spec
        self.vocab_size = vocab_size
        self.max_seq_len_tokens = max_seq_len_tokens
        self.tokenizer: Tokenizer = ByteTokenizer()
        described = json.dumps([_PATTERN_VERSION, vocab_size, asdict(spec)], sort_keys=True)
        self.model_digest = hashlib.sha256(described.encode()).hexdigest()
        self._manager: CacheManager | None = None

    def bind(self, manager: CacheManager) -> None:
        """See `Engine.bind`."""
        if self._manager is not None:
            raise LocalProtocolError("the synthetic engine is already bound to a manager")
        check_layout(self.spec, manager.layout)
        self._manager = manager

    def forward(self, sequence: SequenceCache, token_ids: npt.NDArray[np.int64]) -> torch.Tensor:
        """See `Engine.forward`.

        Raises:
            InvariantError: a live token of the history, or a recurrent state, does not hold the bytes that belong
                there, or has no page.
        """
        if self._manager is None:
            raise LocalProtocolError("forward needs a bound manager")
        new_tokens(sequence, token_ids)
        prefixes, digest = prefix_words(token_ids), hashlib.blake2b(digest_size=8)
        for group in self._manager.layout.life_cycles:
            if group.life_cycle.recurrent:
                states = _StateStep(self._manager, sequence, prefixes)
                digest.update(b"".join(states.advance(view) for view in group.states))
            else:
                tokens = _TokenStep(self._manager, sequence, group, prefixes)
                digest.update(b"".join(tokens.advance(view) for view in group.buffers))
        return self._logits(digest.digest()).to(self._manager.storage.device)

    def _logits(self, digest: bytes) -> torch.Tensor:
        bits = _mix(_as_word(digest) + _counters(range(self.vocab_size)))
        return torch.from_numpy((bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-20))


class _TokenStep:
    """One attention life cycle's share of a forward step."""

    def __init__(self, manager: CacheManager, sequence: SequenceCache, group: LifeCycleLayout, prefixes: Words) -> None:
        self._manager = manager
        self._request_id = sequence.request_id
        self._prefixes = prefixes
        end = len(prefixes)
        self._new = self._span(sequence, group, sequence.history, end)
        self._live = self._span(sequence, group, first_visible_token(group.life_cycle, sequence.history), end)
        self._first_visible = first_visible_token(group.life_cycle, end - 1) - self._live.start

    def advance(self, view: BufferView) -> bytes:
        """Write the new tokens, check them and all that the first of them sees, and return what the last one sees.

        One buffer after the other: scratch pages hold a layer's tokens only until the next layer writes.
        """
        buffer = self._manager.paged_buffer(view.layer_id, view.role).view(torch.uint8)
        self._new.write(buffer, view.layer_id, torch.from_numpy(self._expected(view, self._new)).to(buffer.device))
        found: Bytes = self._live.read(buffer, view.layer_id).cpu().numpy()
        wanted = self._expected(view, self._live)
        if not np.array_equal(found, wanted):
            raise InvariantError(_first_difference(self._request_id, view, self._live.start, wanted, found))
        return found[:, self._first_visible :].tobytes()

    def _span(self, sequence: SequenceCache, group: LifeCycleLayout, start: int, end: int) -> TokenSpan:
        layout, device = self._manager.layout, self._manager.storage.device
        return TokenSpan(sequence, group, start, end, tokens_per_block=layout.tokens_per_block, device=device)

    def _expected(self, view: BufferView, span: TokenSpan) -> Bytes:
        prefixes, row_bytes = self._prefixes[span.start : span.end], view.head_dim * view.item_bytes
        return expected(prefixes, view.layer_id, view.role, range(view.num_heads), row_bytes)


class _StateStep:
    """The recurrent life cycle's share of a forward step."""

    def __init__(self, manager: CacheManager, sequence: SequenceCache, prefixes: Words) -> None:
        self._manager = manager
        self._request_id = sequence.request_id
        self._prefixes = prefixes
        self._history = sequence.history
        self._slot = sequence.state_slot

    def advance(self, view: StateView) -> bytes:
        """Check the state after the history, if there is any, replace it by the one after the new tokens, return it."""
        state = self._manager.state(view.layer_id, view.role)[self._slot]
        if self._history:
            self._check(view, state)
        wanted = self._expected(view, len(self._prefixes))
        state.copy_(torch.from_numpy(wanted.copy()).view(torch_dtype(view.dtype)).view(view.shape))
        return wanted.tobytes()

    def _check(self, view: StateView, state: torch.Tensor) -> None:
        found: Bytes = state.reshape(-1).view(torch.uint8).cpu().numpy()
        wanted = self._expected(view, self._history)
        if not np.array_equal(found, wanted):
            raise InvariantError(
                f"request {self._request_id}, layer {view.layer_id}, {view.role} after {self._history} tokens: "
                f"{int((wanted != found).sum())} wrong bytes of {len(wanted)} in this state, expected "
                f"{wanted[:8].tobytes().hex()}, found {found[:8].tobytes().hex()}"
            )

    def _expected(self, view: StateView, num_tokens: int) -> Bytes:
        num_bytes = int(np.prod(view.shape)) * torch_dtype(view.dtype).itemsize
        return expected_state(self._prefixes[num_tokens - 1], view.layer_id, view.role, num_bytes)


def _first_difference(request_id: str, view: BufferView, start: int, wanted: Bytes, found: Bytes) -> str:
    wrong = wanted != found
    head, token, byte = (int(index) for index in np.argwhere(wrong)[0])
    shown = slice(byte, byte + 8)
    return (
        f"request {request_id}, layer {view.layer_id}, {view.role}, head {head}, token {start + token}, "
        f"byte {byte}: expected {wanted[head, token, shown].tobytes().hex()}, "
        f"found {found[head, token, shown].tobytes().hex()}; {int(wrong.sum())} wrong bytes in this buffer"
    )
