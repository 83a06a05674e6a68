"""Tokens of one sequence found in its pages: the index arithmetic that engines share."""

from functools import cached_property

import numpy as np
import torch

from kvferry.cache.errors import ConfigError, InvariantError
from kvferry.cache.layout import CacheLayout, LifeCycleLayout, build_layout
from kvferry.cache.lifecycle import LifeCycle, ceil_div
from kvferry.cache.sequence import SequenceCache
from kvferry.cache.spec import ModelSpec


def check_layout(spec: ModelSpec, layout: CacheLayout) -> None:
    """Raise ConfigError unless the layout is the one this model's spec gives."""
    wanted = build_layout(spec, tokens_per_block=layout.tokens_per_block, order=layout.order)
    if layout.digest != wanted.digest:
        raise ConfigError(
            f"the pools were laid out for {_described(layout)}, the engine's model needs {_described(wanted)}: "
            "build the layout from the engine's spec"
        )


def _described(layout: CacheLayout) -> str:
    groups = ", ".join(f"{len(g.layer_ids)} layers {g.life_cycle} of {g.slot_bytes} bytes" for g in layout.life_cycles)
    return f"{layout.model} {layout.dtype} ({groups})"


def first_visible_token(life_cycle: LifeCycle, position: int) -> int:
    """The oldest token that a query at `position` looks back on."""
    return 0 if life_cycle.window is None else max(0, position + 1 - life_cycle.window)


class TokenSpan:
    """Tokens [start, end) of a sequence in one life cycle. Located once, then used for every layer.

    Valid while: the sequence is not resized.

    Raises:
        InvariantError: a block of the range has no page.
    """

    def __init__(
        self,
        sequence: SequenceCache,
        group: LifeCycleLayout,
        start: int,
        end: int,
        *,
        tokens_per_block: int,
        device: torch.device,
    ) -> None:
        self.start, self.end = start, end
        self._first_block = start // tokens_per_block
        self._tokens_per_block = tokens_per_block
        slots = sequence.slots(group.id)[self._first_block : ceil_div(end, tokens_per_block)]
        if len(slots) * tokens_per_block < end - self._origin or (slots < 0).any():
            raise InvariantError(
                f"sequence {sequence.request_id}, {group.life_cycle}: tokens [{start}, {end}) need pages for blocks "
                f"{self._first_block} to {ceil_div(end, tokens_per_block) - 1}, their slots are {slots.tolist()}"
            )
        self._slots = torch.from_numpy(slots.astype(np.int64)).to(device)

    def __len__(self) -> int:
        return self.end - self.start

    def read(self, buffer: torch.Tensor) -> torch.Tensor:
        """Copy the tokens out of one layer's buffer.

        Shapes: buffer [num_slots, num_heads, tokens_per_block, head_dim]; result [num_heads, len(self), head_dim],
        contiguous.
        """
        _, num_heads, tokens_per_block, head_dim = buffer.shape
        pages = torch.empty(
            (num_heads, len(self._slots), tokens_per_block, head_dim), dtype=buffer.dtype, device=buffer.device
        )
        torch.index_select(buffer, 0, self._slots, out=pages.transpose(0, 1))
        tokens = pages.view(num_heads, -1, head_dim)
        # A copy even where the slice is contiguous: matrix products round differently at another alignment.
        return tokens[:, self.start - self._origin : self.end - self._origin].clone(
            memory_format=torch.contiguous_format
        )

    def write(self, buffer: torch.Tensor, values: torch.Tensor) -> None:
        """Copy tokens into one layer's buffer. Shapes: as `read`, values like its result but with any strides."""
        slots, offsets = self._positions
        buffer[slots, :, offsets] = values.transpose(0, 1)

    @cached_property
    def _positions(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Slot and offset inside it of every token. Shapes: [len(self)] each."""
        tokens = torch.arange(self.start - self._origin, self.end - self._origin, device=self._slots.device)
        return self._slots[tokens // self._tokens_per_block], tokens % self._tokens_per_block

    @property
    def _origin(self) -> int:
        return self._first_block * self._tokens_per_block
