"""What an engine does with the pools: size them, admit a request, compute it in chunks, leave its blocks for others."""

from collections.abc import Sequence

from kvferry.cache.admission import PoolOptions
from kvferry.cache.ids import LayerId
from kvferry.cache.layout import build_layout
from kvferry.cache.manager import KVCacheManager
from kvferry.cache.reservation import reserved_slots
from kvferry.cache.sequence import SequenceCache
from kvferry.cache.spec import BufferSpec, LayerSpec, ModelSpec
from kvferry.cache.workload import Batch, Workload, size_pools

CHUNK = 16  # most prompt tokens of one forward pass
KEPT = (BufferSpec("key", num_heads=2, head_dim=8), BufferSpec("value", num_heads=2, head_dim=8))
LAYERS = tuple(LayerSpec(LayerId(index), window, KEPT) for index, window in enumerate((16, None, 16, None)))

layout = build_layout(ModelSpec("example", "float32", LAYERS), tokens_per_block=8)
load = Workload(typical=Batch.of([(512, 511)]), prefill_tokens=CHUNK)
manager = KVCacheManager(layout, size_pools(layout, 1 << 20, load), "cpu", options=PoolOptions(max_sequences=8))


def forward(sequence: SequenceCache, end: int) -> None:
    """In place of a model: write something for the tokens [history, end) into every layer's pages."""
    for group in layout.life_cycles:
        slots = sequence.slots(group.id).tolist()
        for view in group.buffers:
            buffer = manager.buffer(view.layer_id, view.role)  # [slot, head, token in block, value]
            for position in range(sequence.history, end):
                block, place = divmod(position, layout.tokens_per_block)
                buffer[slots[block], :, place] = position


def serve(request_id: str, prompt: Sequence[int], max_new_tokens: int) -> int:
    """Answer one request. Returns how many tokens of the prompt were there already."""
    tokens = list(prompt)
    need = reserved_slots(layout, len(prompt) + max_new_tokens - 1, CHUNK)
    manager.fits_ever(need).require(request_id)  # raises a permanent CapacityError: refuse the request
    # Here a CapacityError means: not now. The last token of a prompt is always computed, for its logits.
    sequence = manager.create_sequence(request_id, need, token_ids=prompt[:-1])
    sequence.resume()
    while sequence.history < len(prompt):
        end = min(sequence.history + CHUNK, len(prompt))
        sequence.resize(capacity=end)
        forward(sequence, end)
        sequence.commit(tokens[sequence.committed : end])
    for new_token in range(1, max_new_tokens):
        tokens.append(new_token)
        sequence.resize(capacity=len(tokens))
        forward(sequence, len(tokens))
        sequence.commit(tokens[-1:])
    sequence.close()
    return sequence.reused_tokens


prompt = range(100, 160)
print("first time, reused:", serve("a", prompt, 8))
print("again, reused:", serve("b", prompt, 8))
print("longer, reused:", serve("c", [*prompt, *range(1, 8), 7, 7], 8))
print(manager.usage()[0])
manager.check_integrity()
