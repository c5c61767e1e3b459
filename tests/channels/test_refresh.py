"""Partitions renewed from generated tokens (`refresh`) against the oracle, in each of generate()'s ways."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

import stageprune as sp
from helpers import CACHE, close, generate, left_padded, surface, tokens
from reference.channel_oracle import channel_logits, greedy
from zoo import BY_NAME

pytestmark = pytest.mark.usefixtures("everything_in_float64")

LLAMA = replace(BY_NAME["llama"], options=BY_NAME["llama"].options | dict(num_hidden_layers=2))
METHOD = sp.OnlineChannelPruning(mlp_ratio=0.5, partition_fraction=0.2, refresh=2, backend="masked")
SELECTIONS = ("partition", "fixed", "full", "gate", "cascade")


@pytest.fixture(scope="module")
def llama():
    return LLAMA.build()


@pytest.mark.parametrize("scope", ["batch", "sequence"])
@pytest.mark.parametrize("selection", SELECTIONS)
def test_generate_equals_the_oracle(llama, selection: str, scope: str) -> None:
    ids, mask = left_padded([9, 5])
    method = replace(METHOD, selection=selection, scope=scope, backend="auto", refresh=3)
    expected, logits = greedy(llama, method, ids, 8, attention_mask=mask)
    _, never = greedy(llama, replace(method, refresh=None), ids, 8, attention_mask=mask)
    with sp.prune(llama, method):
        sequences, ours = generate(llama, ids, 8, attention_mask=mask)
    assert torch.equal(sequences, expected)
    assert close(ours, logits) < 1e-10
    assert torch.equal(ours[:, :3], never[:, :3]) or close(ours[:, :3], never[:, :3]) < 1e-10
    if selection in ("partition", "fixed"):
        assert close(ours[:, 3:4], never[:, 3:4]) > 1e-9, "nothing was renewed: the test tests nothing"


def test_a_prompt_of_one_token_is_pruned_after_some(llama) -> None:
    ids = tokens(2, 1)
    expected, logits = greedy(llama, replace(METHOD, refresh=3), ids, 7)
    with sp.prune(llama, replace(METHOD, refresh=3)) as handle:
        sequences, ours = generate(llama, ids, 7)
        with handle.dense():
            _, dense = generate(llama, ids, 7)
    assert torch.equal(sequences, expected)
    assert close(ours, logits) < 1e-10
    assert close(ours[:, :3], dense[:, :3]) < 1e-12
    assert close(ours[:, 3:], dense[:, 3:]) > 1e-6


def test_skipped_layers_are_pruned_after_some_tokens() -> None:
    model, ids = BY_NAME["llama"].build(), tokens(1, 9)
    method = replace(METHOD, refresh=3)
    expected, logits = greedy(model, method, ids, 8, skipped=(3, 4, 5))
    with sp.prune(model, method, sp.PrefillOnlyPruning(layers=[3, 4, 5])):
        sequences, ours = generate(model, ids, 8)
    assert torch.equal(sequences, expected)
    assert close(ours, logits) < 1e-10
    _, without = greedy(model, replace(method, refresh=None), ids, 8, skipped=(3, 4, 5))
    assert close(ours, without) > 1e-6


def test_further_turns(llama) -> None:
    first, second = tokens(2, 7), tokens(2, 5, seed=1)
    expected, _ = greedy(llama, METHOD, first, 6)
    kv = DynamicCache(config=llama.config)
    with sp.prune(llama, METHOD):
        sequences, _ = generate(llama, first, 6, **{CACHE: kv})
        assert torch.equal(sequences, expected)
        past = kv.get_seq_length()
        whole = torch.cat((sequences, second), dim=1)
        again, ours = generate(llama, whole, 6, attention_mask=torch.ones_like(whole), **{CACHE: kv})
    context = torch.zeros(2, whole.shape[1], dtype=torch.bool)
    context[:, :6] = True
    context[:, past:-1] = True
    expected, logits = greedy(llama, METHOD, whole, 6, context=context)
    assert torch.equal(again, expected)
    assert close(ours, logits) < 1e-10


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("kind", ["assistant", "prompt lookup"])
def test_speculation_gives_the_same_tokens(llama, kind: str, selection: str) -> None:
    """What is verified in vain leaves no trace in the statistics."""
    method = replace(METHOD, selection=selection)
    ids = tokens(1, 6).repeat(1, 3)
    options = dict(assistant_model=LLAMA.build()) if kind == "assistant" else dict(prompt_lookup_num_tokens=4)
    lengths: list[int] = []
    with sp.prune(llama, method):
        plain = llama.generate(ids, do_sample=False, max_new_tokens=14)
        hook = llama.register_forward_hook(lambda module, args, output: lengths.append(output.logits.shape[1]))
        sequences = llama.generate(ids, do_sample=False, max_new_tokens=14, **options)
        hook.remove()
    assert torch.equal(sequences, plain)
    assert any(length > 1 for length in lengths[1:]), "nothing was verified in bulk: the test tests nothing"


@pytest.mark.parametrize("selection", SELECTIONS)
def test_statistics_follow_the_beams(llama, selection: str) -> None:
    """Every beam's score is the oracle's log-probability of its tokens, computed for that beam alone."""
    method = replace(METHOD, selection=selection, scope="sequence")
    ids, mask = left_padded([9, 6])
    before = surface(llama)
    with sp.prune(llama, method):
        out = llama.generate(
            ids, attention_mask=mask, num_beams=4, num_return_sequences=4, max_new_tokens=8, do_sample=False,
            length_penalty=0.0, output_scores=True, return_dict_in_generate=True,
        )  # fmt: skip
    assert surface(llama) == before
    assert not hasattr(llama, "_reorder_cache")
    full = torch.cat((mask.repeat_interleave(4, 0), torch.ones(8, 8, dtype=mask.dtype)), dim=1)
    positions = (full.cumsum(-1) - 1).clamp(min=0)
    inputs: dict[str, Any] = dict(input_ids=out.sequences, attention_mask=full, position_ids=positions)
    logits = channel_logits(llama, method, 8, **inputs)[:, 8:-1]
    chosen = torch.log_softmax(logits, -1).gather(-1, out.sequences[:, 9:, None])[..., 0].sum(-1)
    assert close(out.sequences_scores, chosen) < 1e-6
    assert len({tuple(row) for row in out.sequences[:4].tolist()}) == 4


def test_a_cropped_cache_generates_the_same_again(llama) -> None:
    ids = tokens(1, 9)
    kv = DynamicCache(config=llama.config)
    with sp.prune(llama, METHOD) as handle, torch.no_grad():
        with handle.stage(prefill=8):
            llama(ids, logits_to_keep=1, **{CACHE: kv})
        later = tokens(1, 7, seed=3)
        outputs = []
        for _ in range(2):
            with handle.stage(prefill=0):
                outputs.append(llama(later, **{CACHE: kv}).logits)
            kv.crop(-7)
    assert torch.equal(*outputs)


@settings(max_examples=30)
@given(data=st.data())
@torch.no_grad()
def test_any_split_into_forward_calls(llama, data) -> None:
    context, decode = data.draw(st.integers(0, 8)), data.draw(st.integers(1, 9))
    method = replace(
        METHOD,
        selection=data.draw(st.sampled_from(SELECTIONS)),
        scope=data.draw(st.sampled_from(["batch", "sequence"])),
        refresh=data.draw(st.integers(1, 4)),
        prefill=data.draw(st.sampled_from(["candidates", "dense"])),
    )
    ids = tokens(data.draw(st.integers(1, 2)), context + decode, seed=data.draw(st.integers(0, 100)))
    cuts = sorted(data.draw(st.sets(st.integers(1, max(context + decode - 1, 1)), max_size=5)) - {context + decode})
    reference = channel_logits(llama, method, context, passes=cuts, input_ids=ids)[:, context:]
    kv, rows = DynamicCache(config=llama.config), []
    with sp.prune(llama, method) as handle:
        for start, stop in itertools.pairwise([0, *cuts, context + decode]):
            prefill = max(0, min(stop, context) - start)
            keep = (stop - start - prefill) if prefill else 0
            with handle.stage(prefill=prefill):
                logits = llama(ids[:, start:stop], logits_to_keep=keep, **{CACHE: kv}).logits
            rows.append(logits[:, logits.shape[1] - keep :] if prefill else logits)
    assert close(torch.cat(rows, dim=1), reference) < 1e-10
