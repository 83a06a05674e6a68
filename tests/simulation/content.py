"""What the pages and records of a simulated prompt hold, so that any byte out of place is seen."""

import hashlib
from functools import lru_cache

from kvferry.transfer.types import AuxRecord, PromptId, TransferKey, Usage

SLOT_BYTES = 16
TOKENS_PER_BLOCK = 4
FREE = b"\xee" * SLOT_BYTES
"""What a slot holds while nobody has it."""
FRESH = b"\xdd" * SLOT_BYTES
"""What a slot holds once it was handed out, before its new owner wrote to it."""


@lru_cache(maxsize=4096)
def page_bytes(key: TransferKey, group: int, block: int) -> bytes:
    """The bytes of one page of one prompt."""
    return hashlib.blake2b(f"{key}/{group}/{block}".encode(), digest_size=SLOT_BYTES).digest()


@lru_cache(maxsize=4096)
def prompt_of(key: TransferKey, num_blocks: int) -> PromptId:
    """A prompt that fills its blocks, the last one but for a token."""
    digest = hashlib.sha256(f"{key}/{num_blocks}".encode()).digest()
    return PromptId(num_blocks * TOKENS_PER_BLOCK - 1, digest)


@lru_cache(maxsize=4096)
def aux_of(key: TransferKey, num_blocks: int) -> AuxRecord:
    """What the sender says beside the pages."""
    token = int.from_bytes(page_bytes(key, 99, 0)[:2], "little")
    return AuxRecord((token,), (-0.5,), Usage(prompt_of(key, num_blocks).num_tokens))
