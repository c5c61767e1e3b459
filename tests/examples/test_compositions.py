"""Prefill-only pruning together with a prompt compressor and with somebody's attention, as the examples show it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import stageprune as sp
from helpers import close, generate, tokens
from reference.generation import greedy
from zoo import BY_NAME

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import custom_attention
import prompt_compressor

pytestmark = pytest.mark.usefixtures("everything_in_float64")
METHOD = sp.PrefillOnlyPruning(ratio=1 / 3)


@torch.no_grad()
def test_a_compressed_prompt_is_a_prompt_like_any_other() -> None:
    model, prompt = BY_NAME["llama"].build(), tokens(1, 40)
    with sp.prune(model, METHOD) as handle:
        with handle.dense():
            short = prompt_compressor.compressed(model, prompt, keep=0.6, window=4)
        sequences, logits = generate(model, short, 4)
    assert short.shape == (1, 24)
    assert torch.equal(short[:, :4], prompt[:, :4])
    assert torch.equal(short[:, -4:], prompt[:, -4:])
    expected, reference = greedy(model, (4, 5), short, 4)
    assert torch.equal(sequences, expected)
    assert close(logits, reference) < 1e-10


@torch.no_grad()
def test_the_hardest_tokens_stay() -> None:
    model, prompt = BY_NAME["llama"].build(), tokens(1, 12)
    logits = model(prompt).logits.log_softmax(-1)
    surprise = [float("inf")] + [-float(logits[0, i, prompt[0, i + 1]]) for i in range(11)]
    kept = sorted(sorted(range(12), key=lambda i: -(float("inf") if i in (0, 11) else surprise[i]))[:6])
    assert prompt_compressor.compressed(model, prompt, keep=0.5, window=1).tolist() == [prompt[0, kept].tolist()]


@pytest.mark.parametrize("layers", [(4, 5), (1, 3)], ids=str)
@torch.no_grad()
def test_attention_of_ones_own_runs_in_every_layer(monkeypatch: pytest.MonkeyPatch, layers: tuple[int, ...]) -> None:
    """Rows of the prompt see less; skipped layers have none but the last, which sees its window, too, in both."""
    monkeypatch.setattr(custom_attention, "SINK", 2)
    monkeypatch.setattr(custom_attention, "WINDOW", 5)
    model, prompt = BY_NAME["llama"].build(), tokens(1, 20)
    dense = generate(model, prompt, 1)[1]
    model.set_attn_implementation(custom_attention.NAME)
    assert close(generate(model, prompt, 1)[1], dense) > 1e-4, "the window is seen"

    seen: dict[int, list[int]] = {}
    own = custom_attention.a_shape

    def watching(module, query, *rest, **options):
        seen.setdefault(module.layer_idx, []).append(query.shape[2])
        return own(module, query, *rest, **options)

    monkeypatch.setitem(custom_attention.AttentionInterface._global_mapping, custom_attention.NAME, watching)
    with sp.prune(model, sp.PrefillOnlyPruning(layers=layers)):
        seen.clear()
        model.generate(prompt, max_new_tokens=3, do_sample=False)
    for layer in range(6):
        stops = layer in layers or layer == 5
        assert seen[layer] == ([1, 1, 1] if stops else [20, 1, 1]), layer
