"""Prefill-only pruning with an attention function of your own: `python examples/custom_attention.py`.

Sparse attention saves work in the layers that run, pruning leaves layers out. Skipped layers run their own forward for
the last prompt token and the answer, through transformers' attention interface like all others; so whatever is
registered there is used. The function here keeps, for long prompts, the first tokens and a window of the last ones (the
A-shape of StreamingLLM, arXiv 2309.17453), and full attention while the answer is generated.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask

import stageprune as sp
from stageprune.evaluate.text import prompt_of

NAME = "a_shape"
SINK, WINDOW = 16, 256


def a_shape(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **options: Any) -> Any:
    """Attention `[batch, heads, rows, head_dim]` whose prompt rows see the first keys and a window.

    `attention_mask` is additive and has every row: `eager_mask` is registered with it.
    """
    rows, keys = query.shape[2], key.shape[2]
    if rows > 1 and attention_mask is not None:
        positions = torch.arange(keys, device=query.device)
        distance = positions[keys - rows :, None] - positions
        far = (distance >= WINDOW) & (positions >= SINK)
        attention_mask = attention_mask[..., :keys].masked_fill(far, torch.finfo(query.dtype).min)
    return sdpa_attention_forward(module, query, key, value, attention_mask, **options)


AttentionInterface.register(NAME, a_shape)
AttentionMaskInterface.register(NAME, eager_mask)


def main() -> None:
    loaded = sp.load("demo", dtype="bfloat16")
    model, tokenizer = loaded.model, loaded.tokenizer
    prompt = torch.tensor([prompt_of(tokenizer, 1024, "Summarise the text above in a few sentences.")])
    for attention in ("sdpa", NAME):
        model.set_attn_implementation(attention)
        for ratio in (0, 1 / 3):
            with sp.prune(model, sp.PrefillOnlyPruning(ratio=ratio)):
                answer = model.generate(prompt, max_new_tokens=24, do_sample=False)
            print(f"{attention}, {ratio:.0%} of the layers skipped: {tokenizer.decode(answer[0, 1024:])!r}")


if __name__ == "__main__":
    main()
