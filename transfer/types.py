"""The records two workers exchange about a transfer. Pure data; `control/convert.py` maps them to the wire."""

import enum
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvferry.cache.page_table import BlockLists, PageTable

PROTOCOL_VERSION = 3
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


class Side(enum.Enum):
    """Which end of a transfer: the sender's pages are read, the receiver's are written."""

    SENDER = "sender"
    RECEIVER = "receiver"


class Direction(enum.Enum):
    """Who drives the wire: with push the sender writes granted pages, with pull the receiver reads permitted ones."""

    PUSH = "push"
    PULL = "pull"


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
    """One attempt to move one prompt.

    Attributes:
        transfer_id: 32 hex digits, minted per attempt: by the prefill worker, or generation-first by the frontend.
    """

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


def fence_of(pages: BlockLists) -> int:
    """64 bits that name these slots in this life of theirs: another grant of the same slots has other epochs."""
    digest = hashlib.blake2b(digest_size=8)
    for slots, epochs in zip(pages.slots, pages.epochs, strict=True):
        digest.update(len(slots).to_bytes(8, "little") + slots.astype("<i4").tobytes() + epochs.astype("<u4").tobytes())
    return int.from_bytes(digest.digest(), "little") or 1


@dataclass(frozen=True)
class Grant:
    """The pages a receiver wants filled, for this attempt and these two lives only.

    With push it is the permission to write them. With pull nobody but the receiver touches them, and the grant asks for
    a `Permit` to read the sender's.

    Attributes:
        prompt: what the receiver expects in these pages.
        pages: positional lists over the whole prompt, one per layer group of the receiver's page table; -1 where the
            receiver needs nothing: the block is out of its window, or it has it already.
        timeout_seconds: how long the receiver will wait from now; a duration, since clocks differ.
        request_id: the request whose prompt it is, as the sender knows it.
        early: the prompt may not be computed yet (generation-first): the sender keeps the grant until it is.
        fence: names the slots and their epochs; whatever is said about this grant later repeats it.
    """

    key: TransferKey
    sender: WorkerId
    receiver: WorkerId
    prompt: PromptId
    pages: BlockLists
    timeout_seconds: float
    request_id: str = ""
    direction: Direction = Direction.PUSH
    early: bool = False
    fence: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "fence", fence_of(self.pages))


@dataclass(frozen=True)
class Permit:
    """The sender's permission to read these pages (pull), for this attempt and these two lives only.

    Attributes:
        fence: of the grant it answers.
        pages: positional lists over the whole prompt, one per layer group of the sender's page table; -1 where the
            grant has none.
        timeout_seconds: how long the sender will wait from now for the reads to end.
    """

    key: TransferKey
    sender: WorkerId
    receiver: WorkerId
    fence: int
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
    """Why an attempt failed.

    Attributes:
        code: stable and greppable.
        message: for people: what happened, with the numbers.
        hint: for people: what to do about it; may be empty.
        layer_groups: indices of the layer groups whose pages are not complete because of it; empty: nothing was moved.
    """

    code: str
    phase: Phase
    message: str
    hint: str = ""
    layer_groups: tuple[int, ...] = ()

    def __str__(self) -> str:
        groups = f" (layer groups {', '.join(map(str, self.layer_groups))})" if self.layer_groups else ""
        return f"[{self.code}] {self.message}{groups}" + (f"; {self.hint}" if self.hint else "")


@dataclass(frozen=True)
class TransferResult:
    """The sender's last word on an attempt.

    Attributes:
        fence: of the grant it is about, so that a result for an earlier life of a slot is refused; 0 when the sender
            knows of no grant.
        quiet: the sender proves that no byte of this attempt is or will be on its way: it never posted a write, or
            every write was done. That the transport let go of the source is not enough. With
            pull: that its pages are read no more. When false, a receiver that knows nothing of the attempt answers.
        aux: present exactly when status is OK.
    """

    key: TransferKey
    sender: WorkerId
    receiver: WorkerId
    status: ResultStatus
    fence: int
    quiet: bool
    wire: WireReport = field(default_factory=WireReport)
    aux: AuxRecord | None = None
    failure: Failure | None = None


@dataclass(frozen=True)
class Cancel:
    """The receiver's last word, unless it succeeded: the sender is to stop. Idempotent.

    Attributes:
        failure: why.
        fence: of the grant; 0 when none was sent.
        quiet: the receiver proves that no read of its own is or will be under way, and needs no answer. Never with
            push, where the sender answers with a result.
    """

    key: TransferKey
    origin: WorkerId
    failure: Failure
    fence: int = 0
    quiet: bool = False


@dataclass(frozen=True)
class Renewal:
    """The origin stands by these attempts: the other side may count on it for that long from now.

    An attempt that is not, or no longer, open at the other side is answered at once: with a result by a sender, with a
    cancel by a receiver.

    Attributes:
        side: what the origin is in these attempts.
        keys: at most MAX_RENEWED.
    """

    origin: WorkerId
    side: Side
    keys: tuple[TransferKey, ...]
    lease_seconds: float


MAX_RENEWED = 4096
"""Attempts one renewal may name."""

Message = Grant | Permit | TransferResult | Cancel | Renewal
"""What two workers say to each other about attempts."""
