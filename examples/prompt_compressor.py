"""Prefill-only pruning behind a prompt compressor of your own: `python examples/prompt_compressor.py`.

The two save different work: the compressor leaves out tokens, pruning leaves out layers for those that remain. Any
function from token ids to fewer token ids will do, such as LLMLingua-2; the one here drops the tokens that the model
finds easiest to predict (in the spirit of selective context, arXiv 2310.06201).
"""

from __future__ import annotations

from typing import Any

import torch

import stageprune as sp
from stageprune.evaluate.clock import timed_generate
from stageprune.evaluate.text import prompt_of


@torch.no_grad()
def compressed(model: Any, input_ids: torch.Tensor, keep: float, window: int = 8) -> torch.Tensor:
    """The `keep` share of a prompt's tokens that are hardest to predict, in order.

    Args:
        model: dense, or inside `handle.dense()`: prompt positions of a pruned one have no predictions.
        input_ids: `[1, length]`.
        keep: above 0, at most 1.
        window: tokens at either end that stay whatever they are: the template and the question.
    """
    logits = model(input_ids, use_cache=False).logits[:, :-1].float()
    surprise = -logits.log_softmax(-1).gather(-1, input_ids[:, 1:, None])[0, :, 0]
    surprise = torch.cat((surprise.new_tensor([torch.inf]), surprise))
    surprise[:window] = surprise[-window:] = torch.inf
    count = max(round(keep * input_ids.shape[1]), 1)
    return input_ids[:, surprise.topk(count).indices.sort().values]


def main() -> None:
    loaded = sp.load("demo", dtype="bfloat16")
    model, tokenizer = loaded.model, loaded.tokenizer
    prompt = torch.tensor([prompt_of(tokenizer, 1024, "Summarise the text above in a few sentences.")])
    with sp.prune(model, sp.PrefillOnlyPruning(ratio=1 / 4)) as handle:
        with handle.dense():
            short = compressed(model, prompt, keep=0.8)
            timed_generate(model, prompt[:, :64], 1)  # warm up
            rows = {"dense": timed_generate(model, prompt, 24), "compressed": timed_generate(model, short, 24)}
        rows["pruned"] = timed_generate(model, prompt, 24)
        rows["both"] = timed_generate(model, short, 24)
    for name, answer in rows.items():
        print(f"{name:<11} first token after {answer.first_token_s * 1e3:5.0f} ms", end="  ")
        print(repr(tokenizer.decode(answer.tokens[0])))


if __name__ == "__main__":
    main()
