"""Requests as the engine loop sees them, and where their events go."""

import threading
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvferry.cache.errors import KVError
from kvferry.cache.sequence import SequenceCache
from kvferry.transfer.engines.text import IncrementalText
from kvferry.transfer.inference import DecodeCall, GenerateEvent, PrefillReply, SamplingParams, Timings
from kvferry.transfer.types import TransferKey, WireReport


class RequestSink(Protocol):
    """Where the engine loop puts what a request produced. Called from the engine's thread; never blocks."""

    def put(self, event: GenerateEvent | PrefillReply) -> None: ...

    def finish(self, error: KVError | None) -> None:
        """The request is over; no call follows."""


@dataclass(eq=False)
class Request:
    """One prompt on one worker.

    Attributes:
        hand_over: prefill only and offer the pages; otherwise go on decoding here.
        decode: the call that fetches pages from a prefill worker; None when this worker computes the prompt.
        offer_key: the attempt under which a prompt that is handed over is to wait; None: it gets a new one.
        cache_salt: only requests with the same salt share pages.
        prefill_cached_tokens: tokens of the prompt that the worker that computed it had in its pools already.
        deadline: on the engine loop's clock, in seconds.
        cancelled: set from any thread; the loop drops the request at its next turn.
        prompt_bytes: of the slots that the computed prompt takes; None until somebody asked.
    """

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    sink: RequestSink
    arrived_at: float
    deadline: float
    hand_over: bool = False
    decode: DecodeCall | None = None
    offer_key: TransferKey | None = None
    cache_salt: str = ""
    cancelled: threading.Event = field(default_factory=threading.Event)
    sequence: SequenceCache | None = None
    prompt_bytes: int | None = None
    started_at: float = 0.0
    first_token_at: float = 0.0
    first_step_seconds: float = 0.0
    prefill_cached_tokens: int = 0
    transfer_seconds: float = 0.0
    wire: WireReport = field(default_factory=WireReport)
    new_tokens: list[int] = field(default_factory=list)
    text: IncrementalText | None = None

    def __post_init__(self) -> None:
        self._tokens = np.asarray(self.prompt, np.int64)

    @property
    def tokens(self) -> npt.NDArray[np.int64]:
        """The prompt and what has been generated. Shapes: [n]. Valid while: until the next `append`."""
        return self._tokens[: len(self.prompt) + len(self.new_tokens)]

    def append(self, tokens: list[int]) -> None:
        """Tokens were generated."""
        start = len(self.prompt) + len(self.new_tokens)
        if start + len(tokens) > len(self._tokens):
            longer = np.zeros(2 * (start + len(tokens)), np.int64)
            longer[:start] = self._tokens[:start]
            self._tokens = longer
        self._tokens[start : start + len(tokens)] = tokens
        self.new_tokens += tokens

    @property
    def reused_tokens(self) -> int:
        """Tokens of the prompt that were in the pools already."""
        return self.sequence.reused_tokens if self.sequence else 0

    @property
    def key(self) -> TransferKey | None:
        """The attempt it is part of from its arrival on, if any."""
        return self.decode.key if self.decode else self.offer_key

    def timings(self) -> Timings:
        """Seconds of each part; a decode worker leaves prefill to the frontend, which knows it from the reply."""
        computed_here = self.decode is None
        return Timings(
            queue_seconds=self.started_at - self.arrived_at,
            prefill_seconds=self.first_token_at - self.started_at if computed_here else 0.0,
            transfer_seconds=self.transfer_seconds,
            first_decode_step_seconds=self.first_step_seconds,
        )
