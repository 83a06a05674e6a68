"""Bounds of one engine loop."""

from dataclasses import dataclass

from kvferry.transfer.types import Direction


@dataclass(frozen=True)
class LoopSettings:
    """What one engine loop may take on, and for how long.

    Attributes:
        max_waiting: requests that may wait for their turn; more are refused.
        max_running: requests that decode at once.
        max_held: finished prompts that may wait for, or be in, a transfer out; prefill pauses at the bound.
        transfer_timeout_seconds: from the grant of a computed prompt's pages to the end of the transfer.
        hold_seconds: how long a finished prompt is kept without a sign of life of its receiver.
        stall_seconds: how long a request may wait for room while nothing is under way that could make any.
        direction: who drives the wire when this worker receives.
        max_receiving_bytes: of pages granted and not yet complete; 0 for no limit.
        max_held_bytes: of pages that wait for, or are in, a transfer out; 0 for no limit.
        quarantine_limit: share of each pool group's slots; with more of them in quarantine nothing new is admitted.
    """

    prefill_chunk_tokens: int
    max_seq_len_tokens: int
    max_waiting: int
    max_running: int
    max_held: int
    transfer_timeout_seconds: float
    hold_seconds: float
    stall_seconds: float = 10.0
    direction: Direction = Direction.PUSH
    max_receiving_bytes: int = 0
    max_held_bytes: int = 0
    quarantine_limit: float = 0.25
