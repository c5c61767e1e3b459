"""Attaching and detaching: what is left behind, what is refused, several models and threads."""

from __future__ import annotations

import copy
import gc
import threading
import weakref

import pytest
import torch
from torch import nn

import stageprune as sp
from helpers import generate, surface, tokens
from zoo import BY_NAME

METHOD = sp.PrefillOnlyPruning(ratio=1 / 3)


@pytest.fixture
def model():
    return BY_NAME["llama"].build(torch.float32, "sdpa")


def test_removed_is_the_original_bit_for_bit(model) -> None:
    ids = tokens(2, 11)
    weights = copy.deepcopy(model.state_dict())
    before, dense = surface(model), generate(model, ids, 5)[1]
    with sp.prune(model, METHOD):
        pruned = generate(model, ids, 5)[1]
    assert not torch.equal(pruned, dense)
    assert torch.equal(generate(model, ids, 5)[1], dense)
    assert surface(model) == before
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    "method", [sp.PrefillOnlyPruning(0), sp.PrefillOnlyPruning(layers=[]), sp.PrefillOnlyPruning(0.1)]
)
def test_no_layer_skipped_is_the_original_bit_for_bit(model, method) -> None:
    ids = tokens(2, 11)
    dense = generate(model, ids, 5)[1]
    with sp.prune(model, method) as handle:
        assert handle.report().skipped_layers == ()
        assert handle.report().ideal_speedup == 1
        assert torch.equal(generate(model, ids, 5)[1], dense)


def test_an_attribute_from_before_comes_back(model) -> None:
    """As accelerate's hooks leave one on `forward`."""
    layer = model.model.layers[5]
    original = layer.forward
    layer.forward = lambda *args, **kwargs: original(*args, **kwargs)
    mine = layer.forward
    with sp.prune(model, METHOD):
        assert layer.forward is not mine
    assert vars(layer)["forward"] is mine


def test_somebody_elses_wrapper_survives_and_ours_is_inert(model) -> None:
    ids = tokens(1, 9)
    dense = generate(model, ids, 3)[1]
    handle = sp.prune(model, METHOD)
    ours, calls = model.forward, []

    def wrapper(*args, **kwargs):
        calls.append(1)
        return ours(*args, **kwargs)

    model.forward = wrapper
    handle.remove()
    assert model.forward is wrapper
    assert torch.equal(model(ids).logits, BY_NAME["llama"].build(torch.float32, "sdpa")(ids).logits)
    del model.forward
    assert torch.equal(generate(model, ids, 3)[1], dense)
    assert calls


def test_no_memory_is_left(model) -> None:
    handle = sp.prune(model, METHOD)
    generate(model, tokens(2, 30), 2)
    references = [weakref.ref(handle), weakref.ref(handle._tracker)]
    handle.remove()
    del handle
    gc.collect()
    assert [reference() for reference in references] == [None, None]


def test_nothing_of_a_pass_is_kept(model) -> None:
    """The hidden states that skipped layers hand to each other die with the pass."""
    with sp.prune(model, METHOD) as handle:
        generate(model, tokens(2, 30), 2)
        gc.collect()
        assert handle._tracker.current is None
        shape = (2, 29, 32)
        assert not [kept for kept in gc.get_objects() if isinstance(kept, torch.Tensor) and tuple(kept.shape) == shape]


def test_attaching_twice_is_an_error_and_changes_nothing(model) -> None:
    with sp.prune(model, METHOD) as handle:
        before = surface(model)
        with pytest.raises(sp.AlreadyPrunedError, match="remove"):
            sp.prune(model, METHOD)
        assert surface(model) == before
        assert sp.handle_of(model) is handle
    assert sp.handle_of(model) is None
    sp.prune(model, METHOD).remove()


def test_layers_shared_with_a_pruned_model(model) -> None:
    other = BY_NAME["llama"].build(torch.float32, "sdpa")
    other.model = model.model
    with sp.prune(model, METHOD), pytest.raises(sp.AlreadyPrunedError):
        sp.prune(other, METHOD)


def test_a_lost_handle_can_be_found(model) -> None:
    sp.prune(model, METHOD)
    gc.collect()
    sp.handle_of(model).remove()
    assert sp.handle_of(model) is None


def test_removing_twice_is_harmless(model) -> None:
    handle = sp.prune(model, METHOD)
    assert handle.attached
    handle.remove()
    handle.remove()
    assert not handle.attached


def test_training_mode_is_an_error(model) -> None:
    with pytest.raises(sp.UnsupportedModelError, match="eval"):
        sp.prune(model.train(), METHOD)
    assert sp.handle_of(model) is None


@pytest.mark.parametrize(
    ("methods", "message"),
    [((), "no method"), ((METHOD, METHOD), "once"), ((0.3,), "float"), (({"ratio": 0.3},), "dict"), (("x",), "str")],
)
def test_wrong_methods(model, methods, message: str) -> None:
    before = surface(model)
    with pytest.raises(sp.SettingError, match=message):
        sp.prune(model, *methods)
    assert surface(model) == before


def test_a_setting_that_does_not_fit_leaves_the_model_alone(model) -> None:
    before = surface(model)
    with pytest.raises(sp.SettingError, match="layer 6 does not exist"):
        sp.prune(model, sp.PrefillOnlyPruning(layers=[6]))
    assert surface(model) == before
    assert sp.handle_of(model) is None


@pytest.mark.parametrize("wrong", [None, 3, "gpt2", nn.Linear(2, 2)], ids=repr)
def test_no_model_at_all(wrong) -> None:
    with pytest.raises(sp.UnsupportedModelError):
        sp.prune(wrong, METHOD)


def test_an_error_inside_the_block_still_detaches(model) -> None:
    before = surface(model)
    with pytest.raises(ZeroDivisionError), sp.prune(model, METHOD):
        raise ZeroDivisionError
    assert surface(model) == before


def test_two_models_at_once(model) -> None:
    other = BY_NAME["qwen3"].build(torch.float32, "sdpa")
    ids = tokens(1, 12)
    with sp.prune(model, METHOD):
        alone = generate(model, ids, 4)[1]
    with sp.prune(model, METHOD), sp.prune(other, sp.PrefillOnlyPruning(0.5)):
        generate(other, ids, 4)
        assert torch.equal(generate(model, ids, 4)[1], alone)


@pytest.mark.parametrize("same_model", [False, True], ids=["two models", "one model"])
def test_threads(model, same_model: bool) -> None:
    models = [model, model if same_model else BY_NAME["llama"].build(torch.float32, "sdpa", seed=7)]
    prompts = [tokens(1, 40), tokens(1, 23, seed=1)]
    handles = [sp.prune(each, METHOD) for each in (models[:1] if same_model else models)]
    expected = [
        each.generate(ids, max_new_tokens=8, do_sample=False) for each, ids in zip(models, prompts, strict=True)
    ]
    wrong: list[str] = []

    def work(index: int) -> None:
        for _ in range(15):
            got = models[index].generate(prompts[index], max_new_tokens=8, do_sample=False)
            if not torch.equal(got, expected[index]):
                wrong.append(f"thread {index}")

    threads = [threading.Thread(target=work, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for handle in handles:
        handle.remove()
    assert wrong == []


def test_peft_adapters_stay_in_force(model) -> None:
    """A wrapper with get_base_model(), as PEFT's: the model inside is pruned."""

    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def get_base_model(self) -> nn.Module:
            return self.inner

    with sp.prune(Wrapper(model), METHOD) as handle:
        assert handle.model is model
        assert sp.handle_of(model) is handle


def test_weights_offloaded_by_accelerate(model) -> None:
    """Leaf modules whose weights live elsewhere until they are called."""
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    ids = tokens(1, 12)
    with sp.prune(model, METHOD):
        expected = generate(model, ids, 4)[1]
    offloaded = accelerate.cpu_offload(model, execution_device="cpu")
    assert offloaded.model.layers[5].self_attn.k_proj.weight.device.type == "meta"
    with sp.prune(offloaded, METHOD):
        assert torch.equal(generate(offloaded, ids, 4)[1], expected)


@pytest.mark.parametrize(("first", "cache"), [("prune", "static"), ("compile", "dynamic")])
def test_a_compiled_forward_keeps_its_stages(model, first: str, cache: str) -> None:
    """Decode steps run compiled; skipped layers and the stage bookkeeping stay outside the graphs."""
    ids, frames = tokens(1, 12), []

    def backend(graph, inputs):
        frames.append(len(graph.graph.nodes))
        return graph.forward

    with sp.prune(model, METHOD):
        expected = generate(model, ids, 4)[1]
    torch._dynamo.reset()
    plain = model.forward
    if first == "compile":
        model.forward = torch.compile(model.forward, backend=backend, dynamic=True)
    with sp.prune(model, METHOD):
        if first == "prune":
            model.forward = torch.compile(model.forward, backend=backend, dynamic=True)
        ours = generate(model, ids, 4, cache_implementation=cache)[1]
        again = generate(model, ids, 4, cache_implementation=cache)[1]
    model.forward = plain
    torch._dynamo.reset()
    assert torch.allclose(ours, expected, atol=1e-5)
    assert torch.allclose(again, expected, atol=1e-5)
    assert max(frames) > 50, "no decode step was compiled: the test tests nothing"


def test_the_report(model) -> None:
    with sp.prune(model, METHOD) as handle:
        report = handle.report(prompt_length=100)
    assert report.skipped_layers == (4, 5)
    assert report.extra_weight_bytes == 0
    assert report.to_dict()["methods"] == (METHOD.to_dict(),)
    assert 1 < report.ideal_speedup < 1.5
    assert "2 of 6 layers (4, 5)" in str(report)
