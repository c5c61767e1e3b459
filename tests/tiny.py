"""A tiny Llama-shaped GGUF file and checkpoint folder for the tests of loading."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

LAYERS, HIDDEN, HEADS, KV_HEADS, FFN = 2, 64, 4, 2, 96
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"


def write_gguf(path: Path, *, architecture: str = "llama", parts: int = 1, seed: int = 0) -> Path:
    """Writes a random model whose larger weights are Q8_0, as a llama.cpp converter would."""
    tokens, kinds = _vocabulary()
    writer = GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_file_type(7)  # mostly Q8_0
    writer.add_context_length(256)
    writer.add_block_count(LAYERS)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(["Ġ t", "Ġ a"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    if parts > 1:
        writer.add_uint16("split.count", parts)
    random = np.random.default_rng(seed)
    for name, shape in _shapes(len(tokens)).items():
        weight = random.normal(0, 0.1, shape).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(name, weight + 1)
        else:
            kind = GGMLQuantizationType.Q8_0
            writer.add_tensor(name, quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _vocabulary() -> tuple[list[str], list[int]]:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = [chr(byte) for byte in printable] + [chr(256 + index) for index in range(len(others))]
    return [*SPECIAL, *alphabet, "Ġt", "Ġa"], [3] * len(SPECIAL) + [1] * (len(alphabet) + 2)


def _shapes(vocabulary: int) -> dict[str, tuple[int, ...]]:
    kv = HIDDEN // HEADS * KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (vocabulary, HIDDEN),
        "output.weight": (vocabulary, HIDDEN),
        "output_norm.weight": (HIDDEN,),
    }
    for layer in range(LAYERS):
        for name, shape in {
            "attn_norm": (HIDDEN,),
            "attn_q": (HIDDEN, HIDDEN),
            "attn_k": (kv, HIDDEN),
            "attn_v": (kv, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN),
            "ffn_norm": (HIDDEN,),
            "ffn_gate": (FFN, HIDDEN),
            "ffn_up": (FFN, HIDDEN),
            "ffn_down": (HIDDEN, FFN),
        }.items():
            shapes[f"blk.{layer}.{name}.weight"] = shape
    return shapes
