"""An engine without a model: keys and values are a pure function of where they belong.

Every byte of the KV follows from (request, global layer, role, global head, token), so a byte that went to the wrong
place, or was lost on the way, is found on the next step, whatever moved it and however it was split over ranks.
"""

import hashlib
import json
from dataclasses import asdict
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from kvferry.cache.errors import InvariantError, LocalProtocolError
from kvferry.cache.layout import BufferView, LifeCycleLayout
from kvferry.cache.lifecycle import ceil_div
from kvferry.cache.manager import KVCacheManager
from kvferry.cache.sequence import SequenceCache
from kvferry.cache.spec import ModelSpec
from kvferry.transfer.engines.base import Engine, Tokenizer
from kvferry.transfer.engines.paged import TokenSpan, check_layout, first_visible_token
from kvferry.transfer.engines.text import ByteTokenizer

Words = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.uint8]

_PATTERN_VERSION = 1
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def expected(request_id: str, layer_id: int, role: str, heads: range, tokens: range, row_bytes: int) -> Bytes:
    """The bytes that belong to these heads and tokens of one buffer of a request.

    Args:
        layer_id: global index of the layer; `heads` are global too, so that any re-split can be checked.
        row_bytes: bytes of one head of one token.

    Shapes: [len(heads), len(tokens), row_bytes].
    """
    named = hashlib.blake2b(json.dumps([request_id, layer_id, role]).encode(), digest_size=8).digest()
    head_keys = _mix(_as_word(named) + _counters(heads))
    token_keys = _mix(head_keys[:, None] + _counters(tokens))
    words = _mix(token_keys[:, :, None] + _counters(range(ceil_div(row_bytes, 8))))
    return np.ascontiguousarray(words.astype("<u8")).view(np.uint8)[:, :, :row_bytes]


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

    The logits after a token depend on the KV that token sees and on the token itself, not on how the prompt was cut
    into chunks or on which worker computed it.
    """

    name: ClassVar[str] = "synthetic"

    def __init__(self, spec: ModelSpec, *, vocab_size: int = 384, max_seq_len_tokens: int = 1 << 20) -> None:
        self.spec = spec
        self.vocab_size = vocab_size
        self.max_seq_len_tokens = max_seq_len_tokens
        self.tokenizer: Tokenizer = ByteTokenizer()
        described = json.dumps([_PATTERN_VERSION, vocab_size, asdict(spec)], sort_keys=True)
        self.model_digest = hashlib.sha256(described.encode()).hexdigest()
        self._manager: KVCacheManager | None = None

    def bind(self, manager: KVCacheManager) -> None:
        """See `Engine.bind`."""
        if self._manager is not None:
            raise LocalProtocolError("the synthetic engine is already bound to a manager")
        check_layout(self.spec, manager.layout)
        self._manager = manager

    def forward(self, sequence: SequenceCache, token_ids: npt.NDArray[np.int64]) -> torch.Tensor:
        """See `Engine.forward`.

        Raises:
            InvariantError: a live token of the history does not hold the bytes that belong there, or has no page.
        """
        manager = self._manager
        if manager is None or len(token_ids) == 0:
            raise LocalProtocolError("forward needs a bound manager and at least one token")
        history, end = sequence.history, sequence.history + len(token_ids)
        digest = hashlib.blake2b(int(token_ids[-1]).to_bytes(8, "little", signed=True), digest_size=8)
        for group in manager.layout.life_cycles:
            step = _GroupStep(manager, sequence, group, history, end)
            for view in group.buffers:
                step.check_history(view)
                step.write(view)
                digest.update(step.read_visible(view))
        return self._logits(digest.digest()).to(manager.storage.device)

    def _logits(self, digest: bytes) -> torch.Tensor:
        bits = _mix(_as_word(digest) + _counters(range(self.vocab_size)))
        return torch.from_numpy((bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-20))


class _GroupStep:
    """One life cycle's share of a forward step."""

    def __init__(
        self, manager: KVCacheManager, sequence: SequenceCache, group: LifeCycleLayout, history: int, end: int
    ) -> None:
        self._manager = manager
        self._request_id = sequence.request_id
        self._past = self._span(sequence, group, first_visible_token(group.life_cycle, history), history)
        self._new = self._span(sequence, group, history, end)
        self._visible = self._span(sequence, group, first_visible_token(group.life_cycle, end - 1), end)

    def check_history(self, view: BufferView) -> None:
        self._read_checked(view, self._past)

    def write(self, view: BufferView) -> None:
        buffer = self._buffer(view)
        self._new.write(buffer, torch.from_numpy(self._expected(view, self._new)).to(buffer.device))

    def read_visible(self, view: BufferView) -> bytes:
        return self._read_checked(view, self._visible).tobytes()

    def _span(self, sequence: SequenceCache, group: LifeCycleLayout, start: int, end: int) -> TokenSpan:
        layout, device = self._manager.layout, self._manager.storage.device
        return TokenSpan(sequence, group, start, end, tokens_per_block=layout.tokens_per_block, device=device)

    def _buffer(self, view: BufferView) -> torch.Tensor:
        """Shapes: [num_slots, num_heads, tokens_per_block, row_bytes], uint8."""
        return self._manager.buffer(view.layer_id, view.role).view(torch.uint8)

    def _expected(self, view: BufferView, span: TokenSpan) -> Bytes:
        row_bytes = view.head_dim * self._manager.layout.item_bytes
        tokens = range(span.start, span.end)
        return expected(self._request_id, view.layer_id, view.role, range(view.num_heads), tokens, row_bytes)

    def _read_checked(self, view: BufferView, span: TokenSpan) -> Bytes:
        found: Bytes = span.read(self._buffer(view)).cpu().numpy()
        wanted = self._expected(view, span)
        if not np.array_equal(found, wanted):
            raise InvariantError(_first_difference(self._request_id, view, span, wanted, found))
        return found


def _first_difference(request_id: str, view: BufferView, span: TokenSpan, wanted: Bytes, found: Bytes) -> str:
    wrong = wanted != found
    head, token, byte = (int(index) for index in np.argwhere(wrong)[0])
    shown = slice(byte, byte + 8)
    return (
        f"request {request_id}, layer {view.layer_id}, {view.role}, head {head}, token {span.start + token}, "
        f"byte {byte}: expected {wanted[head, token, shown].tobytes().hex()}, "
        f"found {found[head, token, shown].tobytes().hex()}; {int(wrong.sum())} wrong bytes in this buffer"
    )
