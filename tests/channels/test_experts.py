"""Channel pruning of routed experts against the oracle: every class, policy and way of generate()."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache

import stageprune as sp
from helpers import CACHE, close, generate, left_padded, surface, tokens
from reference.channel_oracle import channel_logits, greedy, mlp_ratio
from reference.prefill_oracle import layers_of
from stageprune.channels.experts import PrunedExperts
from stageprune.families.experts import StackedLinear
from stageprune.methods.online_channels import PRESETS
from zoo import BY_NAME, MIXTURES

pytestmark = pytest.mark.usefixtures("everything_in_float64")

METHOD = sp.OnlineChannelPruning(mlp_ratio=0.4, partition_fraction=0.3)
NAMES = [architecture.name for architecture in MIXTURES]
SELECTIONS = ("partition", "fixed", "full", "gate", "cascade")
POLICIES = ("weights", "layer", "dense")
LENGTHS, PREFILL = (9, 5), 6


@cache
def built(name: str) -> Any:
    """Shared between tests: pruned and given back."""
    return BY_NAME[name].build()


@torch.no_grad()
def one_pass(model: Any, method: sp.OnlineChannelPruning) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a padded batch, the library's logits at the decode positions and the oracle's."""
    ids, mask = left_padded(list(LENGTHS))
    inputs = dict(input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0))
    kv = {CACHE: DynamicCache(config=model.config)}
    with sp.prune(model, method) as handle, handle.stage(prefill=PREFILL):
        ours = model(**inputs, logits_to_keep=ids.shape[1] - PREFILL, **kv).logits
    return ours, channel_logits(model, method, PREFILL, **inputs)[:, PREFILL:]


def pruned_experts(handle: sp.Handle) -> list[PrunedExperts]:
    """What the handle put in the place of experts."""
    return [part for part in handle._channels.parts if isinstance(part, PrunedExperts)]


def only_to(model: Any, chosen: list[int], layer: int = 0) -> None:
    """Let the router of a layer send all tokens to these experts."""
    mlp = layers_of(model)[layer].mlp
    router = mlp.gate if hasattr(mlp, "gate") else mlp.router
    own = type(router).forward

    def forward(hidden: torch.Tensor) -> Any:
        logits, weights, index = own(router, hidden)
        return logits, weights, torch.tensor(chosen).expand_as(index)

    router.forward = forward


# -- against the oracle ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scope", ["batch", "sequence"])
def test_float64_equals_the_oracle(name: str, scope: str) -> None:
    settings = list(itertools.product(SELECTIONS, ("candidates", "budget", "dense"), POLICIES))
    some = settings[::2] if name == "qwen3-moe" else settings[NAMES.index(name) :: 7]
    for number, (selection, prefill, unseen) in enumerate(some):
        method = replace(
            METHOD,
            scope=scope,
            selection=selection,
            prefill=prefill,
            unseen=unseen,
            unseen_below=1 + 2 * (number % 2),
            routing_weights=number % 3 == 1,
            shared_experts=number % 3 == 2,
        )
        assert close(*one_pass(built(name), method)) < 1e-10, method


@pytest.mark.parametrize("name", NAMES)
def test_the_overall_ratio_counts_active_experts(name: str) -> None:
    for shared in (False, True):
        method = sp.OnlineChannelPruning(0.25, shared_experts=shared)
        assert close(*one_pass(built(name), method)) < 1e-10
        with sp.prune(built(name), method) as handle:
            for part in pruned_experts(handle):
                ratio = mlp_ratio(built(name), method, part.index)
                assert part.sizes.active == round((1 - ratio) * part.sizes.total + 1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_greedy_equals_the_oracle(name: str) -> None:
    ids, mask = left_padded([9, 6])
    model, before = built(name), surface(built(name))
    for scope, selection in (("batch", "partition"), ("sequence", "full")):
        method = replace(METHOD, scope=scope, selection=selection)
        expected, logits = greedy(model, method, ids, 3, attention_mask=mask)
        with sp.prune(model, method):
            sequences, ours = generate(model, ids, 3, attention_mask=mask)
        assert torch.equal(sequences, expected)
        assert close(ours, logits) < 1e-10
    assert surface(model) == before


@pytest.mark.parametrize("name", ["qwen2-moe", "mixtral", "gpt-oss"])
def test_sampled_tokens_have_the_oracles_probabilities(name: str) -> None:
    model, (ids, mask) = built(name), left_padded([8, 5])
    method = replace(METHOD, scope="sequence")
    torch.manual_seed(0)
    with sp.prune(model, method):
        sequences, ours = generate(model, ids, 4, attention_mask=mask, do_sample=True)
    assert close(ours, along(model, method, sequences, mask, 4)) < 1e-10


@pytest.mark.parametrize("name", ["olmoe", "qwen3-moe"])
def test_beams_have_the_oracles_scores(name: str) -> None:
    model, (ids, mask) = built(name), left_padded([8, 5])
    method = replace(METHOD, scope="sequence")
    with sp.prune(model, method):
        out = model.generate(
            ids, attention_mask=mask, num_beams=3, num_return_sequences=3, max_new_tokens=4, do_sample=False,
            length_penalty=0.0, output_scores=True, return_dict_in_generate=True,
        )  # fmt: skip
    logits = along(model, method, out.sequences, mask.repeat_interleave(3, 0), 4)
    chosen = torch.log_softmax(logits, -1).gather(-1, out.sequences[:, 8:, None])[..., 0].sum(-1)
    assert close(out.sequences_scores, chosen) < 1e-6


def along(model: Any, method: Any, sequences: torch.Tensor, mask: torch.Tensor, new: int) -> torch.Tensor:
    """The oracle's logits of each generated token."""
    full = torch.cat((mask, torch.ones(len(mask), new, dtype=mask.dtype)), dim=1)
    positions = (full.cumsum(-1) - 1).clamp(min=0)
    inputs: dict[str, Any] = dict(input_ids=sequences, attention_mask=full, position_ids=positions)
    prefill = mask.shape[1] - 1
    return channel_logits(model, method, prefill, **inputs)[:, prefill:-1]


@pytest.mark.parametrize("unseen", POLICIES)
def test_chunks_and_refreshed_partitions(unseen: str) -> None:
    model, (ids, mask) = built("qwen3-moe"), left_padded([9, 6])
    for scope in ("batch", "sequence"):
        method = replace(METHOD, scope=scope, unseen=unseen, unseen_below=2)
        expected, logits = greedy(model, method, ids, 2, attention_mask=mask, passes=range(0, 9, 3))
        with sp.prune(model, method):
            sequences, ours = generate(model, ids, 2, attention_mask=mask, prefill_chunk_size=3)
        assert torch.equal(sequences, expected)
        assert close(ours, logits) < 1e-10
        method = replace(method, refresh=2, selection="cascade")
        expected, logits = greedy(model, method, ids, 5, attention_mask=mask)
        with sp.prune(model, method):
            sequences, ours = generate(model, ids, 5, attention_mask=mask)
        assert torch.equal(sequences, expected)
        assert close(ours, logits) < 1e-10


@pytest.mark.parametrize("refresh", [None, 2])
def test_with_prefill_only_pruning(refresh: int | None) -> None:
    model, ids = built("qwen3-moe"), tokens(1, 8)
    method = replace(METHOD, refresh=refresh)
    expected, logits = greedy(model, method, ids, 5, skipped=(1,))
    with sp.prune(model, method, sp.PrefillOnlyPruning(layers=[1])):
        sequences, ours = generate(model, ids, 5)
    assert torch.equal(sequences, expected)
    assert close(ours, logits) < 1e-10


def test_sequence_scope_is_each_prompt_alone() -> None:
    """Also for a prompt of one token, which is dense alone."""
    lengths = [8, 5, 1]
    ids, mask = left_padded(lengths)
    model = built("qwen2-moe")
    with sp.prune(model, replace(METHOD, scope="sequence", shared_experts=True)):
        _, together = generate(model, ids, 3, attention_mask=mask)
        for row, length in enumerate(lengths):
            _, alone = generate(model, ids[row : row + 1, -length:], 3)
            assert close(together[row : row + 1], alone) < 1e-10, length


def test_a_prompt_of_one_token_is_dense() -> None:
    model, ids = built("mixtral"), tokens(2, 1)
    _, dense = generate(model, ids, 2)
    with sp.prune(model, METHOD):
        _, ours = generate(model, ids, 2)
    assert torch.equal(ours, dense)


# -- what a partition is made of ---------------------------------------------------------------------------------------


@torch.no_grad()
def orders(model: Any, method: sp.OnlineChannelPruning, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of layer 0 after this prompt: each expert's channels, best first, `[experts, h]`, and its number of tokens."""
    kv = {CACHE: DynamicCache(config=model.config)}
    with sp.prune(model, method) as handle:
        with handle.stage(prefill=ids.shape[1]):
            model(ids, **kv)
        part = pruned_experts(handle)[0]
        (memories,) = vars(kv[CACHE])["_stageprune_memories"].values()
        memory = memories["experts", 0]
        parts = [part._partition(memory, expert).partition for expert in range(len(part.experts.experts))]
        return torch.stack([one.order[0] for one in parts]), memory.sums[0, :, 0].long()


@pytest.mark.parametrize("unseen", POLICIES)
def test_a_partition_never_uses_other_experts_tokens(unseen: str) -> None:
    """Changing what an expert does not get leaves its partition as it was, bit for bit."""
    model, ids = BY_NAME["mixtral"].build(), tokens(1, 12)
    method = replace(METHOD, unseen=unseen)
    before, counts = orders(model, method, ids)
    mlp = layers_of(model)[0].mlp
    taken: list[torch.Tensor] = []
    hook = mlp.experts.register_forward_pre_hook(lambda module, args: taken.append(args[1]))
    with torch.no_grad():
        model(ids)
    hook.remove()
    assert torch.equal(taken[0].flatten().bincount(minlength=4), counts)
    for expert in range(4):
        own = (taken[0] == expert).any(1)
        if counts[expert] == 0 or bool(own.all()):
            continue

        def others_differ(module: Any, args: Any, own: torch.Tensor = own) -> Any:
            hidden, index, weights = args
            if len(hidden) != len(own):  # the check of the description, when pruning begins
                return args
            return torch.where(own[:, None], hidden, 3 - 7 * hidden.roll(1, 1)), index, weights

        hook = mlp.experts.register_forward_pre_hook(others_differ)
        after, again = orders(model, method, ids)
        hook.remove()
        assert torch.equal(again, counts)
        assert torch.equal(after[expert], before[expert])
        assert not torch.equal(after, before), "nothing changed at all: the test tests nothing"


@pytest.mark.parametrize("unseen", POLICIES)
def test_permuting_experts_permutes_partitions(unseen: str) -> None:
    model, ids = BY_NAME["mixtral"].build(), tokens(1, 4)
    method = replace(METHOD, unseen=unseen)
    before, counts = orders(model, method, ids)
    _, logits = one_pass(model, method)
    order = torch.tensor([2, 0, 3, 1])
    mlp = layers_of(model)[0].mlp
    with torch.no_grad():
        for weight in (mlp.gate.weight, mlp.experts.gate_up_proj, mlp.experts.down_proj):
            weight.copy_(weight[order].clone())
    after, permuted = orders(model, method, ids)
    assert torch.equal(permuted, counts[order])
    assert torch.equal(after, before[order])
    assert close(one_pass(model, method)[0], logits) < 1e-10


@pytest.mark.parametrize("unseen", POLICIES)
def test_all_tokens_to_one_expert_and_none_to_the_others(unseen: str) -> None:
    model = BY_NAME["mixtral"].build()
    model.model.layers[0].mlp.gate.top_k = 1
    only_to(model, [2])
    method = replace(METHOD, unseen=unseen)
    found, counts = orders(model, method, tokens(2, 5))
    assert counts.tolist() == [0, 0, 10, 0]
    norms = torch.linalg.vector_norm(layers_of(model)[0].mlp.experts.down_proj, dim=1)
    by_norm = norms.sort(dim=1, descending=True, stable=True).indices
    assert [torch.equal(found[expert], by_norm[expert]) for expert in (0, 1, 3)] == [unseen == "weights"] * 3 or (
        unseen == "dense"
    )
    assert not torch.equal(found[2], by_norm[2])
    for scope in ("batch", "sequence"):
        assert close(*one_pass(model, replace(method, scope=scope))) < 1e-10


@torch.no_grad()
def test_an_expert_that_only_generated_tokens_use() -> None:
    """The policies differ, and each is the oracle's."""
    ids = tokens(1, 8)
    answers = []
    for unseen in POLICIES:
        method = replace(METHOD, unseen=unseen)
        model = BY_NAME["mixtral"].build()
        kv = {CACHE: DynamicCache(config=model.config)}
        with sp.prune(model, method) as handle:
            only_to(model, [0, 1])
            with handle.stage(prefill=8):
                model(ids, **kv)
            only_to(model, [2, 3])
            with handle.stage(prefill=0):
                answers.append(model(tokens(1, 2, seed=5), **kv).logits)
            assert handle.report().channels[0].experts.unused == 2
            assert "did not use" in str(handle.report())
    assert all(close(a, b) > 1e-6 for a, b in itertools.combinations(answers, 2))


@pytest.mark.parametrize("name", ["qwen2-moe", "gpt-oss"])
@pytest.mark.parametrize("selection", SELECTIONS)
def test_a_token_uses_the_budget_exactly(name: str, selection: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the experts of a generated token, the channels that reach a down projection are the budget's."""
    model, ids = built(name), tokens(2, 8)
    used: list[int] = []
    own = StackedLinear.forward

    def counted(module: StackedLinear, inputs: torch.Tensor) -> torch.Tensor:
        if module._name == "down_proj":
            used.append(int((inputs != 0).sum()))
        return own(module, inputs)

    method = replace(METHOD, selection=selection, scope="sequence")
    kv = {CACHE: DynamicCache(config=model.config)}
    with sp.prune(model, method) as handle, torch.no_grad():
        with handle.stage(prefill=8):
            model(ids, **kv)
        monkeypatch.setattr(StackedLinear, "forward", counted)
        with handle.stage(prefill=0):
            model(tokens(2, 1, seed=3), **kv)
        parts = pruned_experts(handle)
    assert sum(used) == sum(2 * part.experts.per_token * part.sizes.active for part in parts)


@pytest.mark.parametrize("preset", PRESETS)
def test_presets(preset: str) -> None:
    assert close(*one_pass(built("olmoe"), sp.OnlineChannelPruning.preset(preset))) < 1e-10


# -- storage and implementations ---------------------------------------------------------------------------------------


class ListedExperts(nn.ModuleList):
    """The same experts, one module each."""

    def __init__(self, stacked: Any) -> None:
        super().__init__(
            _Expert(both, down) for both, down in zip(stacked.gate_up_proj, stacked.down_proj, strict=True)
        )

    def forward(self, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        outputs = torch.zeros_like(hidden)
        for expert, module in enumerate(self):
            tokens, slots = torch.where(top_k_index == expert)
            outputs.index_add_(0, tokens, module(hidden[tokens]) * top_k_weights[tokens, slots, None])
        return outputs


class _Expert(nn.Module):
    def __init__(self, both: torch.Tensor, down: torch.Tensor) -> None:
        super().__init__()
        self.act_fn = nn.SiLU()
        self.gate_proj, self.up_proj = (_linear(half) for half in both.detach().chunk(2))
        self.down_proj = _linear(down.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def _linear(weight: torch.Tensor) -> nn.Linear:
    module = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    module.weight = nn.Parameter(weight.clone())
    return module


def test_a_list_of_modules_is_as_stacked_parameters() -> None:
    stacked, listed = built("qwen3-moe"), BY_NAME["qwen3-moe"].build()
    for layer in layers_of(listed):
        layer.mlp.experts = ListedExperts(layer.mlp.experts)
    ids, mask = left_padded([8, 5])
    found, costs = [], []
    for model in (stacked, listed):
        with sp.prune(model, sp.OnlineChannelPruning(0.2, scope="sequence")) as handle:
            found.append(generate(model, ids, 3, attention_mask=mask)[1])
            report = handle.report()
            costs.append((report.dense_flops, report.pruned_step_values))
    assert close(*found) < 1e-10
    assert costs[0] == costs[1]
    assert close(*one_pass(listed, METHOD)) < 1e-10
