"""The fast path against the oracle: every family, selection, prefill rule, scope and backend, and generate()'s ways."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, StaticCache

import stageprune as sp
from helpers import CACHE, close, exact_logits, generate, left_padded, tokens
from reference.channel_oracle import channel_logits, greedy
from reference.prefill_oracle import layers_of
from zoo import ARCHITECTURES, BY_NAME, MORE, Architecture

pytestmark = pytest.mark.usefixtures("everything_in_float64")

SELECTIONS = ("partition", "fixed", "full", "gate", "cascade")
PREFILLS = ("candidates", "budget", "dense")
SCOPES = ("batch", "sequence")
BACKENDS = ("masked", "sliced", "indexed")
METHOD = sp.OnlineChannelPruning(mlp_ratio=0.4, partition_fraction=0.3)
SMALL = [replace(BY_NAME[name], options=BY_NAME[name].options | dict(num_hidden_layers=2)) for name in ("llama", "phi")]
"""One with a gate and one without, biases and all."""

LENGTHS = (10, 6)
PREFILL = 7


@cache
def built(architecture_name: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> Any:
    """Shared between tests: pruned and given back."""
    return BY_NAME[architecture_name].build(dtype, seed=seed)


@pytest.fixture(scope="module")
def llama():
    return SMALL[0].build()


@pytest.fixture(scope="module", params=SMALL, ids=lambda architecture: architecture.name)
def model(request):
    return request.param.build()


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


def possible(selection: str, backend: str, gated: bool = True) -> bool:
    """Whether the library promises it: copies cannot follow choices that leave the partition."""
    return (gated or selection not in ("gate", "cascade")) and (
        backend != "sliced" or selection in ("partition", "fixed")
    )


@contextmanager
def pruned(model: Any, method: sp.OnlineChannelPruning, *others: Any) -> Iterator[sp.Handle]:
    """Pruned by exactly this backend, or skipped where this machine or this activation rules it out."""
    try:
        handle = sp.prune(model, method, *others)
    except sp.UnsupportedModelError as error:
        if method.backend == "indexed" and ("activation" in str(error) or "compile" in str(error)):
            pytest.skip(str(error))
        raise
    with handle:
        assert {part.backend for part in handle.report().channels} <= {method.backend} | (
            set(BACKENDS) if method.backend == "auto" else set()
        )
        yield handle


def padded_inputs() -> dict[str, torch.Tensor]:
    ids, mask = left_padded(list(LENGTHS))
    return dict(input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0))


@cache
def reference(name: str, dtype: torch.dtype, method: sp.OnlineChannelPruning) -> torch.Tensor:
    """The oracle's logits at the decode positions."""
    return channel_logits(built(name, dtype), method, PREFILL, **padded_inputs())[:, PREFILL:]


@torch.no_grad()
def one_pass(model: Any, method: sp.OnlineChannelPruning, *others: Any) -> torch.Tensor:
    """The library's: the context and four decode rows in one pass."""
    inputs = padded_inputs()
    kv = {CACHE: DynamicCache(config=model.config)}
    with pruned(model, method, *others) as handle, handle.stage(prefill=PREFILL):
        return model(**inputs, logits_to_keep=inputs["input_ids"].shape[1] - PREFILL, **kv).logits


def combinations(architecture: Architecture) -> list[sp.OnlineChannelPruning]:
    """All combinations for a few families, for the others a few combinations with every value in them."""
    ffn = layers_of(built(architecture.name))[0].mlp
    gated = hasattr(ffn, "gate_proj") or hasattr(ffn, "gate_up_proj")
    found = [
        replace(METHOD, selection=selection, prefill=prefill, scope=scope)
        for selection, prefill, scope in itertools.product(SELECTIONS, PREFILLS, SCOPES)
        if gated or selection not in ("gate", "cascade")
    ]
    if architecture.name in ("llama-bias", "phi3", "gpt-neox"):
        return found
    return found[list(BY_NAME).index(architecture.name) % 10 :: 10]


# -- one pass, every family --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES + MORE, ids=lambda architecture: architecture.name)
def test_float64_equals_the_oracle(architecture: Architecture, backend: str) -> None:
    tried = 0
    for method in combinations(architecture):
        if possible(method.selection, backend):
            ours = one_pass(built(architecture.name), replace(method, backend=backend))
            assert close(ours, reference(architecture.name, torch.float64, method)) < 1e-10, method
            tried += 1
    assert tried


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "phi3", "cohere", "gpt-neox", "falcon-7b", "phi"])
def test_float32_equals_the_oracle(name: str, backend: str) -> None:
    for method in combinations(BY_NAME[name])[::3]:
        if possible(method.selection, backend):
            ours = one_pass(built(name, torch.float32), replace(method, backend=backend))
            assert close(ours, reference(name, torch.float32, method)) < 1e-5, method


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda architecture: architecture.name)
def test_the_overall_ratio_is_turned_into_each_familys_own(architecture: Architecture) -> None:
    method = sp.OnlineChannelPruning(0.35, backend="masked")
    ours = one_pass(built(architecture.name), method)
    assert close(ours, reference(architecture.name, torch.float64, method)) < 1e-10


@pytest.mark.parametrize(
    "changes",
    [
        dict(pruned_share=0.2),
        dict(selection="cascade", pruned_share=0.0),
        dict(selection="cascade", pruned_share=0.0, up_share=0.7, scope="sequence"),
        dict(selection="cascade", up_share=0.0),  # never less than what is active
        dict(selection="cascade", up_share=1.0),  # never more than what is not pruned
        dict(pruned_share=0.0),
        dict(pruned_share=0.6),  # more is pruned than the budget leaves out
        dict(mlp_ratio=0.7, pruned_share=0.0, selection="partition"),
        dict(mlp_ratio=0.1, partition_fraction=0.6),  # r - delta < 0
        dict(mlp_ratio=0.9, partition_fraction=0.6),  # r + delta > 1
        dict(mlp_ratio=0.99, partition_fraction=0.0),  # one channel left
        dict(partition_fraction=0.0),
        dict(partition_fraction=1.0),
        dict(mlp_ratio=9.5 / 48, partition_fraction=4 / 48),  # halves go up
        dict(multiple=16),
        dict(multiple=7),
        dict(multiple=1000),
        dict(ratios=[0.0, 0.3, 0.9, 0.5, 0.0, 0.2]),
        dict(protect=[0, 3, 5]),
        dict(protect=range(6)),
    ],
    ids=str,
)
def test_sizes_equal_the_oracle(changes: dict[str, Any], backend: str) -> None:
    for scope, selection in (("batch", "partition"), ("sequence", "fixed"), ("batch", "gate"), ("sequence", "full")):
        method = replace(METHOD, **dict(scope=scope, selection=selection) | changes)
        if possible(method.selection, backend):
            ours = one_pass(built("llama"), replace(method, backend=backend))
            assert close(ours, reference("llama", torch.float64, method)) < 1e-10, method


@torch.no_grad()
def test_many_rows_at_once(backend: str) -> None:
    """More than kernels for few rows take."""
    ids = tokens(2, 19)
    for scope, selection in itertools.product(SCOPES, SELECTIONS):
        if not possible(selection, backend):
            continue
        method = replace(METHOD, scope=scope, selection=selection, backend=backend)
        kv = {CACHE: DynamicCache(config=built("llama").config)}
        with pruned(built("llama"), method) as handle, handle.stage(prefill=5):
            ours = built("llama")(ids, logits_to_keep=14, **kv).logits
        assert close(ours, channel_logits(built("llama"), method, 5, input_ids=ids)[:, 5:]) < 1e-10, method


@pytest.mark.parametrize("prefill", PREFILLS)
@torch.no_grad()
def test_long_prompts_leave_out_what_is_pruned(model, prefill: str) -> None:
    """From some length on their down projection is computed with the kept weights alone."""
    ids = tokens(2, 90)
    for scope in SCOPES:
        method = replace(METHOD, scope=scope, prefill=prefill)
        kv = {CACHE: DynamicCache(config=model.config)}
        with pruned(model, method) as handle, handle.stage(prefill=80):
            report = handle.report(90)
            ours = model(ids, logits_to_keep=10, **kv).logits
        assert close(ours, channel_logits(model, method, 80, input_ids=ids)[:, 80:]) < 1e-10, method
        unused = {"candidates": "pruned", "budget": "active", "dense": None}[prefill]
        saved = sum(
            0 if unused is None else part.sizes.pruned if unused == "pruned" else part.sizes.total - part.sizes.active
            for part in report.channels
        )
        assert report.dense_flops - report.pruned_flops == 2 * 89 * 32 * saved


@torch.no_grad()
def test_ties_go_to_the_lower_index(backend: str) -> None:
    """Channels in pairs with the same score and opposite effect; whoever breaks ties differently gets a wrong sum.

    Each channel reads two inputs and writes one output, without any rounding but that of one product: equal scores are
    equal in every bit, whatever computes them.
    """
    model = replace(SMALL[0], options=SMALL[0].options | dict(hidden_act="relu")).build()
    choose = torch.Generator().manual_seed(0)
    for layer in layers_of(model):
        for weight in (layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight, layer.mlp.down_proj.weight.T):
            weight.zero_()
            weight[range(24), torch.randint(32, (24,), generator=choose)] = 1
            weight[24:] = weight[:24]
        layer.mlp.up_proj.weight[24:] *= -1
    ids = tokens(1, 9)
    for selection, prefill in itertools.product(SELECTIONS, PREFILLS):
        # Odd sizes, so that each border separates a pair.
        method = replace(METHOD, mlp_ratio=19 / 48, partition_fraction=16 / 48, selection=selection, prefill=prefill)
        if not possible(selection, backend):
            continue
        kv = {CACHE: DynamicCache(config=model.config)}
        with pruned(model, replace(method, backend=backend)) as handle, handle.stage(prefill=2):
            ours = model(ids, logits_to_keep=7, **kv).logits
        assert close(ours, channel_logits(model, method, 2, input_ids=ids)[:, 2:]) < 1e-10, method


def test_everything_a_candidate_equals_full(model, backend: str) -> None:
    if backend == "sliced":
        pytest.skip("copies cannot follow choices that leave the partition")
    ids = tokens(2, 13)
    for scope in SCOPES:
        outputs = []
        for selection in ("partition", "full"):
            method = sp.OnlineChannelPruning(
                mlp_ratio=0.5, partition_fraction=1, selection=selection, scope=scope, backend=backend
            )
            with pruned(model, method):
                outputs.append(generate(model, ids, 4)[1])
        assert close(*outputs) < 1e-12


# -- generate() --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma3", "phi3", "mistral-sliding", "gpt-neox", "falcon-40b"])
def test_generate_equals_the_oracle_token_by_token(name: str) -> None:
    model = built(name)
    ids, mask = left_padded([11, 6])
    for selection, scope in (("partition", "batch"), ("full", "sequence")):
        method = replace(METHOD, selection=selection, scope=scope, backend="auto")
        expected, logits = greedy(model, method, ids, 4, attention_mask=mask)
        with pruned(model, method):
            sequences, ours = generate(model, ids, 4, attention_mask=mask)
        assert torch.equal(sequences, expected)
        assert close(ours, logits) < 1e-10


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
def test_sequence_scope_is_each_prompt_alone(model, backend: str, attn: str) -> None:
    """Also for a prompt of one token, which is dense alone, and of two."""
    model.set_attn_implementation(attn)
    lengths = [12, 7, 1, 2]
    ids, mask = left_padded(lengths)
    try:
        for selection, prefill in (("partition", "candidates"), ("fixed", "budget"), ("full", "candidates")):
            if not possible(selection, backend):
                continue
            method = replace(METHOD, scope="sequence", selection=selection, prefill=prefill, backend=backend)
            with pruned(model, method):
                _, together = generate(model, ids, 4, attention_mask=mask)
                for row, length in enumerate(lengths):
                    _, alone = generate(model, ids[row : row + 1, -length:], 4)
                    assert close(together[row : row + 1], alone) < 1e-10, (method, length)
    finally:
        model.set_attn_implementation("eager")


def test_a_batch_of_one_has_no_scope(model, backend: str) -> None:
    ids = tokens(1, 12)
    outputs = []
    for scope in SCOPES:
        with pruned(model, replace(METHOD, scope=scope, backend=backend)):
            outputs.append(generate(model, ids, 4)[1])
    assert torch.equal(*outputs)


def test_a_prompt_of_one_token_is_dense(model, backend: str) -> None:
    ids = tokens(2, 1)
    _, dense = generate(model, ids, 3)
    with pruned(model, replace(METHOD, backend=backend)):
        _, ours = generate(model, ids, 3)
    assert torch.equal(ours, dense)


@pytest.mark.parametrize("prefill", PREFILLS)
@pytest.mark.parametrize("chunk", [1, 5, 11, 100])
def test_chunked_prefill_of_any_size(model, chunk: int, prefill: str) -> None:
    """Each chunk is pruned by the statistics up to its own end."""
    ids, mask = left_padded([12, 7])
    for scope in SCOPES:
        method = replace(METHOD, prefill=prefill, scope=scope)
        expected, logits = greedy(model, method, ids, 2, attention_mask=mask, passes=range(0, 12, chunk))
        with pruned(model, method):
            sequences, ours = generate(model, ids, 2, attention_mask=mask, prefill_chunk_size=chunk)
        assert torch.equal(sequences, expected)
        assert close(ours, logits) < 1e-10


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("chunk", [None, 3])
def test_statistics_continue_in_a_further_turn(model, chunk: int | None, scope: str) -> None:
    if chunk and CACHE == "past_key_values":
        pytest.skip("transformers < 5.24 cannot chunk the prefill of a further turn (it restarts at position 0)")
    method = replace(METHOD, scope=scope)
    first, second = tokens(2, 9), tokens(2, 7, seed=1)
    expected, _ = greedy(model, method, first, 3)
    kv = DynamicCache(config=model.config)
    with pruned(model, method):
        sequences, _ = generate(model, first, 3, **{CACHE: kv})
        assert torch.equal(sequences, expected)
        past = kv.get_seq_length()
        whole = torch.cat((sequences, second), dim=1)
        options: dict[str, Any] = dict(prefill_chunk_size=chunk) if chunk else {}
        options["attention_mask"] = torch.ones_like(whole)  # else generated padding tokens count as padding
        again, ours = generate(model, whole, 3, **{CACHE: kv}, **options)
    length = whole.shape[1]
    context = torch.zeros(2, length, dtype=torch.bool)
    context[:, :8] = True  # the first turn's prompt
    context[:, past : length - 1] = True  # what was new in the second turn, but for its last token
    passes = range(past, length, chunk) if chunk else ()
    expected, logits = greedy(model, method, whole, 3, context=context, passes=passes)
    assert torch.equal(again, expected)
    assert close(ours, logits) < 1e-10


def test_two_conversations_do_not_mix(llama) -> None:
    prompts = [tokens(1, 9, seed=seed) for seed in (0, 1)]
    with pruned(llama, METHOD):
        alone = [generate(llama, ids, 3)[1] for ids in prompts]
        caches = [DynamicCache(config=llama.config) for _ in prompts]
        starts = [generate(llama, ids, 1, **{CACHE: kv})[0] for ids, kv in zip(prompts, caches, strict=True)]
        rows = [[], []]
        with torch.no_grad(), exact_logits(llama) as steps:
            for _ in range(2):
                for index, kv in enumerate(caches):
                    last = starts[index][:, -1:]
                    with sp.handle_of(llama).stage(prefill=0):
                        logits = llama(last, **{CACHE: kv}).logits
                    rows[index].append(steps[-1])
                    starts[index] = torch.cat((starts[index], logits[:, -1].argmax(-1, keepdim=True)), dim=1)
    for index in (0, 1):
        assert close(torch.stack(rows[index], dim=1), alone[index][:, 1:]) < 1e-12


@pytest.mark.parametrize("kind", ["static", "dynamic"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_every_kind_of_cache(name: str, kind: str) -> None:
    model = built(name)
    ids, mask = left_padded([12, 7])
    for scope in SCOPES:
        method = replace(METHOD, scope=scope)
        expected, logits = greedy(model, method, ids, 3, attention_mask=mask)
        with pruned(model, method):
            for _ in range(2):  # nothing of the first prompt may remain for the second
                sequences, ours = generate(model, ids, 3, attention_mask=mask, cache_implementation=kind)
                assert torch.equal(sequences, expected)
                assert close(ours, logits) < 1e-10


@pytest.mark.parametrize("name", ["llama", "mistral-sliding"])
def test_static_cache_without_padding(name: str) -> None:
    model = built(name)
    ids = tokens(2, 12)
    _, logits = greedy(model, METHOD, ids, 3)
    with pruned(model, METHOD):
        _, ours = generate(model, ids, 3, cache_implementation="static")
    assert close(ours, logits) < 1e-10


def test_a_cache_that_is_reset_forgets(llama) -> None:
    with pruned(llama, METHOD):
        _, fresh = generate(llama, tokens(1, 12), 3)
        kv = StaticCache(config=llama.config, max_cache_len=40)
        generate(llama, tokens(1, 15, seed=1), 3, **{CACHE: kv})
        kv.reset()
        _, ours = generate(llama, tokens(1, 12), 3, **{CACHE: kv})
    assert close(ours, fresh) < 1e-10


def test_a_copied_cache_remembers(llama) -> None:
    """The usual way to reuse a common beginning: encode it once, then generate from copies of the cache."""
    start = tokens(1, 9)
    kv = DynamicCache(config=llama.config)
    wholes = [torch.cat((start, tokens(1, 4, seed=seed)), dim=1) for seed in (1, 2)]
    with pruned(llama, METHOD) as handle:
        with torch.no_grad(), handle.stage(prefill=9):
            llama(start, **{CACHE: kv})
        ours = [generate(llama, whole, 3, **{CACHE: copy.deepcopy(kv)})[1] for whole in wholes]
    for whole, logits in zip(wholes, ours, strict=True):
        assert close(logits, greedy(llama, METHOD, whole, 3, passes=(9,))[1]) < 1e-10


@pytest.mark.parametrize("scope", SCOPES)
def test_without_a_cache(model, scope: str) -> None:
    method = replace(METHOD, scope=scope)
    ids, mask = left_padded([11, 6])
    expected, logits = greedy(model, method, ids, 3, attention_mask=mask)
    with pruned(model, method):
        sequences, ours = generate(model, ids, 3, attention_mask=mask, use_cache=False)
    assert torch.equal(sequences, expected)
    assert close(ours, logits) < 1e-10


def test_inputs_embeds(llama) -> None:
    ids = tokens(2, 11)
    expected, logits = greedy(llama, METHOD, ids, 3)
    with pruned(llama, METHOD), torch.no_grad(), exact_logits(llama) as steps:
        embeddings = llama.get_input_embeddings()(ids)
        sequences = llama.generate(inputs_embeds=embeddings, max_new_tokens=3, do_sample=False)
    assert torch.equal(sequences, expected[:, 11:])
    assert close(torch.stack(steps, dim=1), logits) < 1e-10


@pytest.mark.parametrize("selection", SELECTIONS)
def test_beams_are_scored_by_the_pruned_model(llama, selection: str) -> None:
    """Every beam's score is the oracle's log-probability of its tokens; for two prompts of different length."""
    # With a choice per step for the whole batch a score depends on the other beams; `fixed` has none.
    method = replace(METHOD, selection=selection, scope="batch" if selection == "fixed" else "sequence")
    ids, mask = left_padded([11, 7])
    with pruned(llama, method):
        out = llama.generate(
            ids,
            attention_mask=mask,
            num_beams=3,
            num_return_sequences=3,
            max_new_tokens=5,
            do_sample=False,
            length_penalty=0.0,
            output_scores=True,
            return_dict_in_generate=True,
        )
    wholes, scores = out.sequences.view(2, 3, -1), out.sequences_scores.view(2, 3)
    for beam in range(3):
        sequences = wholes[:, beam]
        full = torch.cat((mask, torch.ones(2, 5, dtype=mask.dtype)), dim=1)
        positions = (full.cumsum(-1) - 1).clamp(min=0)
        logits = channel_logits(llama, method, 10, input_ids=sequences, attention_mask=full, position_ids=positions)[
            :, 10:-1
        ]
        log_probabilities = torch.log_softmax(logits, -1).gather(-1, sequences[:, 11:, None])[..., 0].sum(-1)
        assert close(scores[:, beam], log_probabilities) < 1e-6


def test_return_sequences_share_the_prompt(llama) -> None:
    ids, mask = left_padded([11, 7])
    method = replace(METHOD, scope="sequence")
    torch.manual_seed(0)
    with pruned(llama, method):
        sequences, ours = generate(llama, ids, 3, attention_mask=mask, num_return_sequences=2, do_sample=True)
    full = torch.cat((mask.repeat_interleave(2, 0), torch.ones(4, 3, dtype=mask.dtype)), dim=1)
    inputs = dict(input_ids=sequences, attention_mask=full, position_ids=(full.cumsum(-1) - 1).clamp(min=0))
    assert close(ours, channel_logits(llama, method, 10, **inputs)[:, 10:-1]) < 1e-10


@pytest.mark.parametrize("kind", ["assistant", "prompt lookup"])
@pytest.mark.parametrize("selection", SELECTIONS)
def test_speculation_gives_the_same_tokens(llama, kind: str, selection: str) -> None:
    method = replace(METHOD, selection=selection)
    ids = tokens(1, 6).repeat(1, 3)  # repetitive, so that look-up finds candidates
    assistant = SMALL[0].build()
    options = dict(assistant_model=assistant) if kind == "assistant" else dict(prompt_lookup_num_tokens=4)
    lengths = []
    with pruned(llama, method):
        plain = llama.generate(ids, do_sample=False, max_new_tokens=12)
        hook = llama.register_forward_hook(lambda module, args, output: lengths.append(output.logits.shape[1]))
        sequences = llama.generate(ids, do_sample=False, max_new_tokens=12, **options)
        hook.remove()
    assert torch.equal(sequences, plain)
    assert torch.equal(plain[:, :20], greedy(llama, method, ids, 2)[0])
    assert any(length > 1 for length in lengths[1:]), "nothing was verified in bulk: the test tests nothing"


# -- forward() by hand -------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_rows_are_independent(model, backend: str) -> None:
    """One by one, some at once, and all in the pass of the context: the same logits."""
    ids = tokens(2, 15)
    for scope, selection in itertools.product(SCOPES, SELECTIONS):
        if not possible(selection, backend, gated=hasattr(layers_of(model)[0].mlp, "gate_proj")):
            continue
        method = replace(METHOD, scope=scope, selection=selection, backend=backend)
        outputs = []
        with pruned(model, method) as handle:
            for cuts in ([], [10], [10, 11, 12, 13, 14], [10, 13]):
                kv, rows = DynamicCache(config=model.config), []
                for start, stop in zip([0, *cuts], [*cuts, 15], strict=True):
                    prefill = max(0, 10 - start)
                    keep = stop - start - prefill
                    with handle.stage(prefill=prefill):
                        logits = model(ids[:, start:stop], logits_to_keep=keep, **{CACHE: kv}).logits
                    rows.append(logits[:, logits.shape[1] - keep :])
                outputs.append(torch.cat(rows, dim=1))
        reference = channel_logits(model, method, 10, input_ids=ids)[:, 10:]
        assert all(close(output, reference) < 1e-10 for output in outputs), method


@torch.no_grad()
def test_logits_are_those_of_the_positions_asked_for(llama) -> None:
    """As documented in `docs/stages.md`, and the same whether prefill-only pruning is there or not."""
    ids = tokens(1, 9)
    reference = channel_logits(llama, METHOD, 5, input_ids=ids)
    with pruned(llama, METHOD) as handle:
        with handle.stage(prefill=5):
            assert close(llama(ids, logits_to_keep=4).logits, reference[:, 5:]) < 1e-10
            assert close(llama(ids, logits_to_keep=torch.tensor([5, -1])).logits, reference[:, [5, 8]]) < 1e-10
        with handle.stage(prefill=9):
            assert llama(ids).logits.shape[1] == 0, "a chunk of context has no logits"


@torch.no_grad()
def test_a_plain_forward_and_a_dense_block_are_dense(llama) -> None:
    ids = tokens(2, 9)
    dense, (_, generated) = llama(ids).logits, generate(llama, ids, 3)
    with pruned(llama, METHOD) as handle:
        assert torch.equal(llama(ids).logits, dense)
        with handle.dense(), handle.stage(prefill=5):
            assert torch.equal(llama(ids).logits, dense)
            assert torch.equal(generate(llama, ids, 3)[1], generated)
        assert not torch.equal(generate(llama, ids, 3)[1], generated)


# -- numbers that are none ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("selection", SELECTIONS)
def test_nan_and_infinity_propagate_as_in_the_dense_model(value: float, selection: str, backend: str) -> None:
    """From one channel that is broken in the prompt, too: it ranks first, so it is never silently dropped."""
    if not possible(selection, backend):
        pytest.skip("copies cannot follow choices that leave the partition")
    for prefill in PREFILLS:
        model = SMALL[0].build()
        with pruned(model, replace(METHOD, selection=selection, backend=backend, prefill=prefill)) as handle:
            with torch.no_grad():  # only now, as prune() refuses a model that is broken
                layers_of(model)[1].mlp.up_proj.weight[17] = value
            with handle.dense():
                assert generate(model, tokens(2, 9), 2)[1].isnan().all()
            assert generate(model, tokens(2, 9), 2)[1].isnan().all(), prefill


@pytest.mark.parametrize("selection", SELECTIONS)
@torch.no_grad()
def test_nan_in_a_generated_token_propagates(selection: str, backend: str) -> None:
    """A sound prompt, then a token whose activations are all NaN."""
    if not possible(selection, backend):
        pytest.skip("copies cannot follow choices that leave the partition")
    model = SMALL[0].build()
    model.get_input_embeddings().weight[66] = float("nan")
    ids = tokens(1, 9).clamp(max=65)
    for scope in SCOPES:
        kv = {CACHE: DynamicCache(config=model.config)}
        with pruned(model, replace(METHOD, selection=selection, scope=scope, backend=backend)) as handle:
            with handle.stage(prefill=8):
                assert model(ids, logits_to_keep=1, **kv).logits.isfinite().all()
            with handle.stage(prefill=0):
                assert model(torch.tensor([[66]]), **kv).logits.isnan().all()


def test_nan_behind_padding_does_not_matter(llama, backend: str) -> None:
    """What padding computes is nobody's business, not even if it is broken."""
    ids, mask = left_padded([11, 6])
    broken = copy.deepcopy(llama)
    with torch.no_grad():
        broken.get_input_embeddings().weight[0] = 1e3
    for scope in SCOPES:
        method = replace(METHOD, scope=scope, backend=backend)
        outputs = []
        for model in (llama, broken):
            with pruned(model, method):
                outputs.append(generate(model, ids, 3, attention_mask=mask)[1])
        assert close(*outputs) < 1e-10


# -- attaching and detaching -------------------------------------------------------------------------------------------


def contents(model: Any) -> dict[str, Any]:
    """Everything that pruning could leave behind: attributes, own methods, hooks."""
    return {
        name: {key: len(value) if isinstance(value, dict) else None for key, value in vars(module).items()}
        for name, module in model.named_modules()
    }


@pytest.mark.parametrize(
    ("name", "backend"),
    [("llama", "masked"), ("llama", "sliced"), ("llama", "indexed"), ("phi3", "sliced"), ("gpt-neox", "indexed")],
)
def test_removed_is_the_original_bit_for_bit(name: str, backend: str) -> None:
    model = BY_NAME[name].build(torch.float32, "sdpa")
    ids = tokens(2, 11)
    weights = copy.deepcopy(model.state_dict())
    before, dense = contents(model), generate(model, ids, 4)[1]
    with pruned(model, replace(METHOD, backend=backend)):
        assert not torch.equal(generate(model, ids, 4)[1], dense)
    assert torch.equal(generate(model, ids, 4)[1], dense)
    assert contents(model) == before
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    assert sp.handle_of(model) is None


@pytest.mark.parametrize(
    "changes",
    [
        dict(mlp_ratio=0),
        dict(mlp_ratio=0, partition_fraction=1.0, pruned_share=0.5, multiple=7),
        dict(ratio=0, mlp_ratio=None),
        dict(ratios=[0] * 6),
        dict(protect=range(6)),
        dict(mlp_ratio=0.001),  # rounds to nothing
    ],
    ids=str,
)
def test_nothing_pruned_is_the_original_bit_for_bit(changes: dict[str, Any], backend: str) -> None:
    model = built("llama", torch.float32)
    ids, mask = left_padded([11, 6])
    dense = generate(model, ids, 4, attention_mask=mask)[1]
    for selection, prefill, scope in zip(SELECTIONS[:3], PREFILLS, ("batch", "sequence", "batch"), strict=True):
        if possible(selection, backend):
            method = replace(METHOD, **dict(selection=selection, prefill=prefill, scope=scope) | changes)
            with pruned(model, replace(method, backend=backend)):
                assert torch.equal(generate(model, ids, 4, attention_mask=mask)[1], dense), method


def all_tensors() -> list[torch.Tensor]:
    gc.collect()
    return [kept for kept in gc.get_objects() if type(kept) is torch.Tensor]


@pytest.mark.parametrize("backend", ["sliced", "indexed"])
def test_memory_of_a_prompt_dies_with_its_cache(llama, backend: str) -> None:
    """Sums, partitions and copied weights: no more tensors after three prompts than after one; nothing of a pass."""
    with pruned(llama, replace(METHOD, backend=backend)) as handle:
        generate(llama, tokens(2, 30), 2)
        before = all_tensors()
        assert not [kept for kept in before if kept.shape in ((2, 29, 48), (2, 29, 32))]
        for seed in (1, 2):
            generate(llama, tokens(2, 30, seed), 2)
        assert len(all_tensors()) <= len(before) + 1  # `kept`
    references = [weakref.ref(handle), weakref.ref(handle._tracker)]
    del handle
    gc.collect()
    assert [reference() for reference in references] == [None, None]


@pytest.mark.parametrize("backend", ["sliced", "indexed"])
def test_memory_of_a_handle_dies_with_it_though_the_cache_lives(llama, backend: str) -> None:
    kv = DynamicCache(config=llama.config)
    sequences, _ = generate(llama, tokens(2, 30), 2, **{CACHE: kv})
    before = len(all_tensors())
    with pruned(llama, replace(METHOD, backend=backend)) as handle:
        generate(llama, torch.cat((sequences, tokens(2, 9)), dim=1), 2, **{CACHE: kv})
        assert len(all_tensors()) > before
    del handle
    assert len(all_tensors()) <= before


# -- together with prefill-only pruning --------------------------------------------------------------------------------


@pytest.mark.parametrize("skipped", [(4, 5), (2, 3), (0, 1, 2), (5,), (0, 1, 2, 3, 4, 5)], ids=str)
def test_composed_with_prefill_only_pruning(skipped: tuple[int, ...]) -> None:
    """Skipped layers see no prompt, so their FFNs stay dense; so does the last layer's, whose output nobody needs."""
    ids, mask = left_padded([11, 6])
    for name, scope, selection in (("llama", "batch", "partition"), ("gpt-neox", "sequence", "full")):
        model = built(name)
        method = replace(METHOD, scope=scope, selection=selection)
        methods = [method, sp.PrefillOnlyPruning(layers=skipped)]
        expected, logits = greedy(model, method, ids, 2, attention_mask=mask, skipped=skipped)
        with sp.prune(model, *methods if name == "llama" else methods[::-1]) as handle:
            assert handle.report().skipped_layers == skipped
            sequences, ours = generate(model, ids, 2, attention_mask=mask)
        assert torch.equal(sequences, expected)
        assert close(ours, logits) < 1e-10
        assert not any("forward" in vars(module) for module in model.modules())


def test_composed_in_chunks_and_turns() -> None:
    model, skipped = built("llama"), (3, 4)
    first, second = tokens(1, 9), tokens(1, 7, seed=1)
    kv = DynamicCache(config=model.config)
    with sp.prune(model, METHOD, sp.PrefillOnlyPruning(layers=skipped)):
        sequences, ours = generate(model, first, 3, **{CACHE: kv}, prefill_chunk_size=4)
        past = kv.get_seq_length()
        whole = torch.cat((sequences, second), dim=1)
        _, again = generate(model, whole, 3, **{CACHE: kv}, attention_mask=torch.ones_like(whole))
    chunks = range(0, 9, 4)
    assert close(ours, greedy(model, METHOD, first, 3, passes=chunks, skipped=skipped)[1]) < 1e-10
    context = torch.zeros(1, whole.shape[1], dtype=torch.bool)
    context[:, :8] = True
    context[:, past:-1] = True
    logits = greedy(model, METHOD, whole, 3, context=context, passes=chunks, skipped=skipped)[1]
    assert close(again, logits) < 1e-10


def test_composed_where_nothing_is_skipped() -> None:
    ids = tokens(1, 11)
    with pruned(built("llama"), METHOD):
        _, alone = generate(built("llama"), ids, 3)
    with sp.prune(built("llama"), METHOD, sp.PrefillOnlyPruning(ratio=0)):
        assert torch.equal(generate(built("llama"), ids, 3)[1], alone)


# -- properties --------------------------------------------------------------------------------------------------------


@settings(max_examples=50)
@given(data=st.data())
def test_any_sizes_prompts_and_chunks(data) -> None:
    base = data.draw(st.sampled_from(SMALL))
    options = base.options | dict(intermediate_size=data.draw(st.integers(1, 40)), num_hidden_layers=2)
    model = replace(base, options=options).build()
    selection = data.draw(st.sampled_from(SELECTIONS if base.name == "llama" else SELECTIONS[:3]))
    method = sp.OnlineChannelPruning(
        mlp_ratio=data.draw(st.floats(0, 0.99)),
        partition_fraction=data.draw(st.floats(0, 1)),
        pruned_share=data.draw(st.none() | st.floats(0, 0.99)),
        selection=selection,
        prefill=data.draw(st.sampled_from(PREFILLS)),
        scope=data.draw(st.sampled_from(SCOPES)),
        backend=data.draw(st.sampled_from([name for name in ("auto", *BACKENDS[:2]) if possible(selection, name)])),
        multiple=data.draw(st.sampled_from([1, 1, 1, 4, 64])),
    )
    lengths = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=3))
    ids, mask = left_padded(lengths, seed=data.draw(st.integers(0, 100)))
    chunk = data.draw(st.none() | st.integers(1, ids.shape[1] + 1))
    passes = range(0, ids.shape[1], chunk) if chunk else ()
    _, logits = greedy(model, method, ids, 2, attention_mask=mask, passes=passes)
    with pruned(model, method):
        _, ours = generate(model, ids, 2, attention_mask=mask, prefill_chunk_size=chunk)
    assert close(ours, logits) < 1e-10


@settings(max_examples=40)
@given(data=st.data())
@torch.no_grad()
def test_any_split_into_forward_calls(llama, data) -> None:
    """Context in chunks, then decode rows in groups, through forward() by hand."""
    context = data.draw(st.integers(1, 12))
    decode = data.draw(st.integers(1, 6))
    selection = data.draw(st.sampled_from(SELECTIONS))
    method = replace(
        METHOD,
        selection=selection,
        scope=data.draw(st.sampled_from(SCOPES)),
        prefill=data.draw(st.sampled_from(PREFILLS)),
        backend=data.draw(st.sampled_from([name for name in ("auto", *BACKENDS[:2]) if possible(selection, name)])),
    )
    ids = tokens(data.draw(st.integers(1, 2)), context + decode, seed=data.draw(st.integers(0, 100)))
    cuts = sorted(data.draw(st.sets(st.integers(1, context + decode - 1), max_size=4)))
    reference = channel_logits(llama, method, context, passes=cuts, input_ids=ids)[:, context:]
    kv, rows = DynamicCache(config=llama.config), []
    with pruned(llama, method) as handle:
        for start, stop in zip([0, *cuts], [*cuts, context + decode], strict=True):
            prefill = max(0, min(stop, context) - start)
            keep = (stop - start - prefill) if prefill else 0
            with handle.stage(prefill=prefill):
                logits = llama(ids[:, start:stop], logits_to_keep=keep, **{CACHE: kv}).logits
            rows.append(logits[:, logits.shape[1] - keep :] if prefill else logits)
    assert close(torch.cat(rows, dim=1), reference) < 1e-10
