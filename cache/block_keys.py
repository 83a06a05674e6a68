"""Names of blocks: a SHA-256 chain from the reuse scope over the tokens.

A match is trusted on equality of keys, so the hash has to be cryptographic and long (docs/decisions/0003).
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kvferry.cache.errors import ConfigError

TokenIds = npt.NDArray[np.uint32]
BlockKey = bytes

MAX_TOKEN_ID = (1 << 31) - 1


@dataclass(frozen=True)
class ReuseScope:
    """Who may share pages: only sequences of one scope do.

    Attributes:
        adapter_id: the fine-tuned adapter that computed the pages; None for the base model.
        salt: an unsigned 64-bit number; None for no salt.
    """

    adapter_id: int | None = None
    salt: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("adapter_id", self.adapter_id), ("salt", self.salt)):
            if value is not None and not 0 <= value < 1 << 64:
                raise ConfigError(f"{name} is {value}: it must be a number of 64 bits without sign")

    @classmethod
    def of(cls, *, cache_salt: str = "", adapter_id: int | None = None) -> "ReuseScope":
        """The scope of a tenant's salt text; an empty text is no salt."""
        digest = hashlib.sha256(cache_salt.encode()).digest()
        return cls(adapter_id, int.from_bytes(digest[:8], "little") if cache_salt else None)

    @cached_property
    def key(self) -> BlockKey:
        """Key of the root of this scope's tree: which fields are there, then each as 64 bits, little endian."""
        present = [value for value in (self.adapter_id, self.salt) if value is not None]
        mask = (self.adapter_id is not None) | (self.salt is not None) << 1
        return hashlib.sha256(bytes([mask]) + b"".join(value.to_bytes(8, "little") for value in present)).digest()


def as_token_ids(token_ids: Sequence[int] | npt.NDArray[np.integer]) -> TokenIds:
    """Token ids as the array that keys are made of; a copy, since keys are made of it later, too.

    Raises ConfigError unless they are one row of integers from 0 to 2^31 - 1.
    """
    ids = np.asarray(token_ids)
    if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
        raise ConfigError(f"token ids are {ids.dtype} of shape {list(ids.shape)}: they must be one row of integers")
    if len(ids) and not (0 <= int(ids.min()) and int(ids.max()) <= MAX_TOKEN_ID):
        raise ConfigError(f"token ids {ids.min()} to {ids.max()}: they must lie between 0 and {MAX_TOKEN_ID}")
    return ids.astype("<u4")


def chain(parent: BlockKey, token_ids: TokenIds, tokens_per_block: int) -> list[BlockKey]:
    """Keys of the full blocks of `token_ids`, which follow the block named `parent`. Shapes: token_ids [n]."""
    step = 4 * tokens_per_block
    content = token_ids.tobytes()
    keys = []
    sha256 = hashlib.sha256
    for start in range(0, len(content) - step + 1, step):
        parent = sha256(parent + content[start : start + step]).digest()
        keys.append(parent)
    return keys


class KeyChain:
    """Keys of the full blocks of a prompt, each computed once and only when asked for. Shapes: token_ids [n]."""

    def __init__(
        self, root: BlockKey, token_ids: TokenIds, tokens_per_block: int, known: Sequence[BlockKey] = ()
    ) -> None:
        self.token_ids = token_ids
        self._root = root
        self._tokens_per_block = tokens_per_block
        self._keys = list(known[: self.num_blocks])

    @property
    def num_blocks(self) -> int:
        return len(self.token_ids) // self._tokens_per_block

    def keys(self, first: int, last: int) -> list[BlockKey]:
        """Keys of blocks [first, last)."""
        have = len(self._keys)
        if last > have:
            parent = self._keys[-1] if have else self._root
            p = self._tokens_per_block
            self._keys += chain(parent, self.token_ids[have * p : last * p], p)
        return self._keys[first:last]

    def names(self, first: int, token_ids: TokenIds) -> bool:
        """Whether the blocks from `first` on hold exactly these tokens, as far as the prompt goes."""
        start = first * self._tokens_per_block
        known = self.token_ids[start : start + len(token_ids)]
        return np.array_equal(known, token_ids[: len(known)])


def partial_key(parent: BlockKey, token_ids: TokenIds) -> BlockKey:
    """Key of a last block that is not full."""
    return hashlib.sha256(parent + token_ids.tobytes()).digest()
