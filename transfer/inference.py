"""What is asked of workers and answered by them: prompts, tokens, timings, status. Pure data."""

from dataclasses import dataclass, field

from kvferry.transfer.types import Role, TransferKey, Usage, WireReport, WorkerId


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen.

    Attributes:
        temperature: 0 is greedy; above 0 the draw depends only on (seed, position, logits).
        ignore_eos: go on to max_new_tokens even after an end-of-sequence token.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = False


@dataclass(frozen=True)
class GenerateCall:
    """A client's request. Exactly one of `prompt` and `prompt_token_ids` is given.

    Attributes:
        request_id: unique per request; minted by the frontend when empty.
        chat: wrap `prompt` as one user turn where the model has a chat template.
        timeout_seconds: the whole request must end within it.
        cache_salt: at most 256 characters; prompts with different salts never share cached pages.
        key: the attempt under which the pages are to wait; None: the worker that prefills makes one.
    """

    request_id: str = ""
    prompt: str | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    chat: bool = False
    sampling: SamplingParams = field(default_factory=SamplingParams)
    timeout_seconds: float = 120.0
    cache_salt: str = ""
    key: TransferKey | None = None


@dataclass(frozen=True)
class PrefillReply:
    """The prompt is computed and its pages wait for a grant under `key`.

    Attributes:
        queue_seconds: from arrival at the worker to the first chunk.
        prefill_seconds: from the first chunk to the first token sampled.
        lease_seconds: how long from now the pages are kept without a sign of life of a receiver.
        cached_tokens: tokens of the prompt that the worker found in its pools and did not compute.
    """

    key: TransferKey
    sender: WorkerId
    prompt_token_ids: tuple[int, ...]
    queue_seconds: float
    prefill_seconds: float
    lease_seconds: float
    cached_tokens: int = 0


@dataclass(frozen=True)
class DecodeCall:
    """Fetch the pages a prefill worker offers under `key` and go on from its first token.

    Attributes:
        cache_salt: as of the `GenerateCall` that the prompt comes from.
        early: the prompt may not be computed yet (generation-first): ask for its pages at once.
    """

    request_id: str
    key: TransferKey
    sender: WorkerId
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    timeout_seconds: float
    cache_salt: str = ""
    early: bool = False


@dataclass(frozen=True)
class TokenChunk:
    """Newly generated tokens, their natural-log probabilities, and the text they add."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str


@dataclass(frozen=True)
class Timings:
    """Seconds spent in each part of a request.

    Attributes:
        queue_seconds: waiting for a prefill slot and, on the decode side, for pages.
        prefill_seconds: computing the prompt and sampling the first token.
        transfer_seconds: from the grant to the last notification, as the receiver saw it; 0 without a transfer.
        first_decode_step_seconds: the first forward pass on the decode side; 0 when one token was asked for.
    """

    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    transfer_seconds: float = 0.0
    first_decode_step_seconds: float = 0.0


@dataclass(frozen=True)
class GenerateSummary:
    """The last event of every successful stream.

    Attributes:
        finish_reason: "length" or "eos".
        usage: its cached tokens are those of the prefill worker.
        num_blocks: blocks of the prompt; each may have a page per life cycle.
        sender: the worker that prefilled; equal to `receiver` when nothing had to move.
        decode_cached_tokens: tokens of the prompt that the decode worker had already and did not receive.
    """

    finish_reason: str
    usage: Usage
    new_tokens: int
    num_blocks: int
    timings: Timings
    wire: WireReport
    sender: WorkerId
    receiver: WorkerId
    prompt_token_ids: tuple[int, ...]
    decode_cached_tokens: int = 0


GenerateEvent = TokenChunk | GenerateSummary


@dataclass(frozen=True)
class PoolGroupStatus:
    """One pool group now. free + cached + in_use + quarantined == num_slots.

    Attributes:
        life_cycles: names of the life cycles that share it, e.g. "full", "window 128".
        slot_bytes: of one slot, all pools of the group together.
        cached: slots whose pages nobody uses, kept for reuse and given up when room is needed.
        reserved: slots promised to admitted requests, whether taken yet or not.
    """

    life_cycles: tuple[str, ...]
    slot_bytes: int
    num_slots: int
    free: int
    cached: int
    in_use: int
    quarantined: int
    reserved: int


@dataclass(frozen=True)
class PeerStatus:
    """One paired worker and the lane that writes to it, and reads from it, really take."""

    worker: WorkerId
    role: Role
    lane: str


@dataclass(frozen=True)
class WorkerStatus:
    """What a worker says of itself.

    Attributes:
        integrity: "ok", or the story of the invariant that does not hold.
        condition: "ok", or why the worker takes no requests now.
        holding: finished prompts whose pages wait for, or are in, a transfer out.
        receiving: transfers in whose pages are granted and not yet complete.
    """

    worker: WorkerId
    role: Role
    model: str
    manager: str
    transport: str
    runtime: str
    pool_groups: tuple[PoolGroupStatus, ...]
    waiting: int
    running: int
    holding: int
    receiving: int
    peers: tuple[PeerStatus, ...]
    integrity: str
    process_id: int
    condition: str = "ok"


@dataclass(frozen=True)
class DirectoryEntry:
    """One member as the directory knows it.

    Attributes:
        endpoint: HOST:PORT of its gRPC server.
        paired: workers it has a live transfer channel to, in either direction.
    """

    worker: WorkerId
    role: Role
    endpoint: str
    model: str
    paired: tuple[WorkerId, ...] = ()
