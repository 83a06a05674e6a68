"""The records two workers exchange about a transfer. Pure data; `control/convert.py` maps them to the wire."""

import enum
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvferry.cache.page_table import BlockLists, PageTable

PROTOCOL_VERSION = 2
"""Workers with different versions do not pair."""


class Role(enum.Enum):
    """What a worker does for others."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"

    @property
    def prefills(self) -> bool:
        return self is not Role.DECODE

    @property
    def decodes(self) -> bool:
        return self is not Role.PREFILL


class Phase(enum.Enum):
    """Where a transfer was when it failed."""

    ADMISSION = "admission"
    PREFILL = "prefill"
    GRANT = "grant"
    POST = "post"
    WIRE = "wire"
    RESULT = "result"
    DECODE = "decode"


class ResultStatus(enum.Enum):
    """How the sender ended an attempt."""

    OK = "ok"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class WorkerId:
    """One life of one worker process. A restart keeps the name and takes a new random incarnation (63 bits)."""

    name: str
    incarnation: int

    def __str__(self) -> str:
        return f"{self.name}#{self.incarnation:x}"


@dataclass(frozen=True)
class RankInfo:
    """All a peer needs to decide whether to pair and to plan transfers.

    Attributes:
        agent_metadata: opaque to everyone but the transport named beside it.
        model_digest: SHA-256 over what the model's configuration says of its computation.
        manager: version of the cache manager, "V1" or "V2".
    """

    worker: WorkerId
    role: Role
    rank: int
    num_ranks: int
    transport: str
    agent_name: str
    agent_metadata: bytes
    model_digest: str
    manager: str
    page_table: PageTable
    protocol_version: int = PROTOCOL_VERSION


@dataclass(frozen=True)
class Usage:
    """Token accounting of the prompt, in tokens.

    Attributes:
        cached_tokens: tokens that prefill found in its pools and did not compute.
    """

    prompt_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True)
class AuxRecord:
    """What decode needs beside the pages.

    Attributes:
        first_tokens: tokens sampled by prefill, in order; at least one when the attempt succeeded.
        first_logprobs: natural-log probability of each, same length.
        draft_tokens: speculative tokens after them; empty without speculation.
    """

    first_tokens: tuple[int, ...]
    first_logprobs: tuple[float, ...]
    usage: Usage
    draft_tokens: tuple[int, ...] = ()


@dataclass(frozen=True)
class TransferKey:
    """One attempt to move one prompt. `transfer_id` is 32 hex digits, minted by the prefill worker per attempt."""

    transfer_id: str
    attempt: int

    def __str__(self) -> str:
        return f"{self.transfer_id}/{self.attempt}"


@dataclass(frozen=True)
class PromptId:
    """Which prompt a transfer is about: its length in tokens and the SHA-256 of its tokens as little-endian int32."""

    num_tokens: int
    digest: bytes

    @classmethod
    def of(cls, token_ids: Sequence[int]) -> "PromptId":
        tokens = np.asarray(token_ids, "<i4")
        return cls(len(tokens), hashlib.sha256(tokens.tobytes()).digest())

    def __str__(self) -> str:
        return f"prompt {self.digest.hex()[:12]} of {self.num_tokens} tokens"


@dataclass(frozen=True)
class Grant:
    """The receiver's permission to write these pages, for this attempt and these two lives only.

    Attributes:
        prompt: what the receiver expects in these pages.
        pages: positional lists over the whole prompt, one per layer group of the receiver's page table; -1 where the
            receiver needs nothing: the block is out of its window, or it has it already.
        timeout_seconds: how long the receiver will wait from now; a duration, since clocks differ.
    """

    key: TransferKey
    sender: WorkerId
    receiver: WorkerId
    prompt: PromptId
    pages: BlockLists
    timeout_seconds: float


@dataclass(frozen=True)
class WireReport:
    """What moving the pages cost, as the sender saw it.

    Attributes:
        num_slices: posts the transfer was cut into; the receiver expects one notification for each.
        seconds: from the first post to the end of the last.
        lane: what the wire really was (rdma, cuda_ipc, cma, shm, tcp, memcpy), or unknown.
    """

    num_slices: int = 0
    num_pages: int = 0
    num_bytes: int = 0
    num_descriptors: int = 0
    seconds: float = 0.0
    lane: str = "unknown"


@dataclass(frozen=True)
class Failure:
    """Why an attempt failed: `code` is stable and greppable, `message` is for people."""

    code: str
    phase: Phase
    message: str


@dataclass(frozen=True)
class TransferResult:
    """The sender's last word on an attempt.

    Attributes:
        epochs: the grant's slot epochs, echoed, so that a result for an earlier life of a slot is refused; empty when
            the sender has no grant to echo.
        quiet: the sender proves that no byte of this attempt is or will be on its way: it never posted a write, or
            every write was done. That the transport let go of the source is not enough.
        aux: present exactly when status is OK.
    """

    key: TransferKey
    sender: WorkerId
    receiver: WorkerId
    status: ResultStatus
    epochs: tuple[bytes, ...]
    quiet: bool
    wire: WireReport = field(default_factory=WireReport)
    aux: AuxRecord | None = None
    failure: Failure | None = None


@dataclass(frozen=True)
class Cancel:
    """The receiver asks the sender to stop an attempt and to say whether its pages are quiet. Idempotent."""

    key: TransferKey
    origin: WorkerId
    reason: str
