"""A tiny Llama as a GGUF file, so that conversion can be tested in a second."""

from pathlib import Path

import gguf
import numpy as np

_DIM, _HEADS, _KV_HEADS, _LAYERS, _FFN = 32, 4, 2, 2, 64


def write_tiny_gguf(path: Path, *, seed: int = 0) -> None:
    """Two layers, float32 weights from the seed, a byte-level vocabulary of 259 tokens."""
    writer = gguf.GGUFWriter(str(path), "llama")
    _write_sizes(writer)
    tokens = _write_vocabulary(writer)
    for name, shape in _shapes(len(tokens)).items():
        writer.add_tensor(name, np.random.default_rng(seed).normal(0, 0.3, shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_sizes(writer: gguf.GGUFWriter) -> None:
    writer.add_context_length(512)
    writer.add_embedding_length(_DIM)
    writer.add_block_count(_LAYERS)
    writer.add_feed_forward_length(_FFN)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_KV_HEADS)
    writer.add_rope_dimension_count(_DIM // _HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(259)
    writer.add_file_type(0)


def _write_vocabulary(writer: gguf.GGUFWriter) -> list[str]:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spelled = {byte: chr(byte) for byte in printable}
    spelled |= {byte: chr(256 + i) for i, byte in enumerate(b for b in range(256) if b not in spelled)}
    tokens = ["<s>", "</s>", *(spelled[byte] for byte in range(256)), "th"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * 257)
    writer.add_token_merges([f"{spelled[ord('t')]} {spelled[ord('h')]}"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    return tokens


def _shapes(vocab: int) -> dict[str, tuple[int, ...]]:
    kv = _DIM // _HEADS * _KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (vocab, _DIM),
        "output_norm.weight": (_DIM,),
        "output.weight": (vocab, _DIM),
    }
    for i in range(_LAYERS):
        shapes |= {
            f"blk.{i}.attn_norm.weight": (_DIM,),
            f"blk.{i}.ffn_norm.weight": (_DIM,),
            f"blk.{i}.attn_q.weight": (_DIM, _DIM),
            f"blk.{i}.attn_k.weight": (kv, _DIM),
            f"blk.{i}.attn_v.weight": (kv, _DIM),
            f"blk.{i}.attn_output.weight": (_DIM, _DIM),
            f"blk.{i}.ffn_gate.weight": (_FFN, _DIM),
            f"blk.{i}.ffn_up.weight": (_FFN, _DIM),
            f"blk.{i}.ffn_down.weight": (_DIM, _FFN),
        }
    return shapes
