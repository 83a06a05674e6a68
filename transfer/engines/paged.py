"""Tokens of one sequence found in its pages: the index arithmetic that engines share."""

from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from kvferry.cache.errors import ConfigError, InvariantError, LocalProtocolError
from kvferry.cache.ids import LayerId
from kvferry.cache.layout import CacheLayout, LifeCycleLayout, build_layout, build_static_layout
from kvferry.cache.lifecycle import LifeCycle, ceil_div
from kvferry.cache.sequence import SequenceCache
from kvferry.cache.spec import ModelSpec


def check_layout(spec: ModelSpec, layout: CacheLayout) -> None:
    """Raise ConfigError unless the layout is one that this model's spec gives, for the V2 or the V1 manager."""
    wanted = [
        build(spec, tokens_per_block=layout.tokens_per_block, order=layout.order)
        for build in (build_layout, build_static_layout)
    ]
    if layout.digest not in {entry.digest for entry in wanted}:
        raise ConfigError(
            f"the pools were laid out for {_described(layout)}, the engine's model needs {_described(wanted[0])}: "
            "build the layout from the engine's spec"
        )


def _described(layout: CacheLayout) -> str:
    groups = ", ".join(f"{len(g.layer_ids)} layers {g.life_cycle} of {g.slot_bytes} bytes" for g in layout.life_cycles)
    return f"{layout.model} {layout.dtype} ({groups})"


def new_tokens(sequence: SequenceCache, token_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The tokens of a sequence that are not history yet. Raises LocalProtocolError when there are none."""
    if len(token_ids) <= sequence.history:
        raise LocalProtocolError(
            f"forward of request {sequence.request_id} with {len(token_ids)} tokens, {sequence.history} of them are "
            "history: give all of its tokens, and at least one new one"
        )
    return token_ids[sequence.history :]


def first_visible_token(life_cycle: LifeCycle, position: int) -> int:
    """The oldest token that a query at `position` looks back on."""
    return 0 if life_cycle.window is None else max(0, position + 1 - life_cycle.window)


class TokenSpan:
    """Tokens [start, end) of a sequence in one life cycle. Located once, for all of its layers.

    Layers may find a block at different indices: scratch pages, for blocks that leave the window within the step, give
    every layer the same bytes in turn. What a layer wrote there can be read until the next layer writes.

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
        blocks = slice(self._first_block, ceil_div(end, tokens_per_block))
        apart = group.layer_ids if group.sub_pages > 1 else group.layer_ids[:1]
        self._places = {layer: place % len(apart) for place, layer in enumerate(group.layer_ids)}
        pages = np.stack([sequence.page_indices(group.id, layer)[blocks] for layer in apart])
        if pages.shape[1] * tokens_per_block < end - self._origin or (pages < 0).any():
            raise InvariantError(
                f"sequence {sequence.request_id}, {group.life_cycle}: tokens [{start}, {end}) need pages for blocks "
                f"{blocks.start} to {blocks.stop - 1}, they are at {pages[0].tolist()}"
            )
        self._pages = torch.from_numpy(pages).to(device)

    def __len__(self) -> int:
        return self.end - self.start

    def read(self, buffer: torch.Tensor, layer_id: LayerId) -> torch.Tensor:
        """Copy the tokens out of one layer's buffer.

        Shapes: buffer [num_pages, num_heads, tokens_per_block, head_dim], as `KVCacheManager.paged_buffer`; result
        [num_heads, len(self), head_dim], contiguous.
        """
        _, num_heads, tokens_per_block, head_dim = buffer.shape
        found = self._pages[self._places[layer_id]]
        pages = torch.empty(
            (num_heads, len(found), tokens_per_block, head_dim), dtype=buffer.dtype, device=buffer.device
        )
        torch.index_select(buffer, 0, found, out=pages.transpose(0, 1))
        tokens = pages.view(num_heads, -1, head_dim)
        # A copy even where the slice is contiguous: matrix products round differently at another alignment.
        return tokens[:, self.start - self._origin : self.end - self._origin].clone(
            memory_format=torch.contiguous_format
        )

    def write(self, buffer: torch.Tensor, layer_id: LayerId, values: torch.Tensor) -> None:
        """Copy tokens into one layer's buffer. Shapes: as `read`, values like its result but with any strides."""
        blocks, offsets = self._positions
        buffer[self._pages[self._places[layer_id]][blocks], :, offsets] = values.transpose(0, 1)

    @cached_property
    def _positions(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Block of every token, counted from the first, and offset inside it. Shapes: [len(self)] each."""
        tokens = torch.arange(self.start - self._origin, self.end - self._origin, device=self._pages.device)
        return tokens // self._tokens_per_block, tokens % self._tokens_per_block

    @property
    def _origin(self) -> int:
        """Position of the first token of the first block."""
        return self._first_block * self._tokens_per_block
