"""The model of lm-evaluation-harness: equal to the harness's own without pruning, to one-by-one scoring with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness: pip install 'stageprune[eval]'")

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

import stageprune as sp
from local_tasks import QUESTIONS, write_tasks
from stageprune.evaluate.lm_eval_adapter import StagePruneLM
from stageprune.evaluate.setting import Setting, setting_of
from stageprune.models import LoadedModel, load
from tiny import write_gguf

pytestmark = pytest.mark.usefixtures("one_thread", "everything_in_float64")

TASKS = ["local_choice", "local_last_word", "local_rolling", "local_generate"]
SETTINGS = {
    "layers": setting_of(sp.PrefillOnlyPruning(0.5)),
    "channels": setting_of(sp.OnlineChannelPruning(0.4, backend="masked")),
    "both": setting_of(sp.PrefillOnlyPruning(0.5), sp.OnlineChannelPruning(0.4, backend="masked")),
    "refresh": setting_of(sp.OnlineChannelPruning(0.4, backend="masked", refresh=2)),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of four layers with large random weights, in float64."""
    path = tmp_path_factory.mktemp("adapter")
    loaded = load(str(write_gguf(path / "tiny.gguf")), dtype="float32")
    config = loaded.model.config
    config.num_hidden_layers = 4
    config.max_position_embeddings = 120
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(config).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.5 if parameter.ndim == 1 else 0, 0.3)
    model.save_pretrained(path / "model")
    loaded.tokenizer.save_pretrained(path / "model")
    return path / "model"


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load(str(folder))


@pytest.fixture(scope="module")
def manager(tmp_path_factory: pytest.TempPathFactory) -> TaskManager:
    tasks = write_tasks(tmp_path_factory.mktemp("local") / "tasks")
    return TaskManager(include_path=str(tasks), include_defaults=False)


def results(model: Any, manager: TaskManager, batch_size: int) -> dict[str, Any]:
    found = simple_evaluate(model, tasks=TASKS, task_manager=manager, batch_size=batch_size, bootstrap_iters=20)
    assert found is not None
    samples = {
        task: [(sample["doc_id"], sample["resps"], sample["filtered_resps"]) for sample in found["samples"][task]]
        for task in TASKS
    }
    return {"results": found["results"], "samples": samples}


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_without_pruning_it_is_the_harnesss_own_model(folder: Path, manager: TaskManager, batch_size: int) -> None:
    """Bit for bit, of all kinds of tasks."""
    theirs = results(HFLM(str(folder), device="cpu", batch_size=batch_size), manager, batch_size)
    for options in ({}, {"prefill_ratio": 0}, {"prefill_ratio": "0", "channel_ratio": 0.0}):
        ours = results(StagePruneLM(str(folder), device="cpu", batch_size=batch_size, **options), manager, batch_size)
        assert ours == theirs
    assert theirs["results"]["local_rolling"]["word_perplexity,none"] > 1


def requests() -> list[tuple[str, str]]:
    pairs = [(f"Question: {row['question']}", f" {choice}") for row in QUESTIONS for choice in row["choices"]]
    return [
        *pairs,
        ("", "no context"),
        ("x", " one token of context"),
        ("w " * 90 + "w", " a context that is cut off " * 2),
    ]


@torch.no_grad()
def one_by_one(loaded: LoadedModel, setting: Setting, pairs: list[tuple[str, str]], most: int) -> list[Any]:
    """Each alone, through the handle: token by token the log-probability of the continuation."""
    model, tokenizer = loaded
    found = []
    with setting.attach(model) as handle:
        for context, continuation in pairs:
            before = tokenizer(context).input_ids or [tokenizer.bos_token_id]
            whole = tokenizer(context + continuation).input_ids
            answer = whole[len(tokenizer(context).input_ids) :]
            before = before[max(0, len(before) + len(answer) - most - 1) :]
            ids = torch.tensor([[*before, *answer[:-1]]])
            with handle.stage(prefill=len(before) - 1):
                logits = model(ids, logits_to_keep=len(answer), use_cache=False).logits[0].log_softmax(-1)
            scores = [logits[place, token].item() for place, token in enumerate(answer)]
            found.append((sum(scores), logits.argmax(-1).tolist() == answer))
    return found


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("batch_size", [1, 4, 64])
def test_pruned_likelihoods_are_those_of_one_by_one_scoring(loaded: LoadedModel, name: str, batch_size: int) -> None:
    pairs = requests()
    expected = one_by_one(loaded, SETTINGS[name], pairs, 120)
    adapter = StagePruneLM(loaded, setting=SETTINGS[name], batch_size=batch_size)
    try:
        found = adapter.loglikelihood(instances("loglikelihood", pairs), disable_tqdm=True)
    finally:
        adapter.remove()
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], rel=1e-10, abs=1e-10)


def test_pruning_makes_a_difference(loaded: LoadedModel) -> None:
    pairs = requests()[:8]
    found = [[value for value, _ in one_by_one(loaded, SETTINGS[name], pairs, 120)] for name in ("layers", "channels")]
    adapter = StagePruneLM(loaded)
    plain = [value for value, _ in adapter.loglikelihood(instances("loglikelihood", pairs), disable_tqdm=True)]
    for values in found:
        assert max(abs(a - b) for a, b in zip(values, plain, strict=True)) > 1e-2
    assert found[0] != pytest.approx(found[1], rel=1e-3)


def instances(kind: str, arguments: list[Any]) -> list[Instance]:
    return [Instance(kind, {}, argument, index) for index, argument in enumerate(arguments)]


def test_ratio_0_through_our_own_scoring(loaded: LoadedModel) -> None:
    """A setting that prunes nothing, scored in batches of unequal contexts, is the harness's own model."""
    pairs = requests()
    nothing = Setting("nothing", (sp.PrefillOnlyPruning(0),))
    ours, theirs = StagePruneLM(loaded, setting=nothing, batch_size=5), StagePruneLM(loaded, batch_size=5)
    assert ours.handle is not None
    found = ours.loglikelihood(instances("loglikelihood", pairs), disable_tqdm=True)
    ours.remove()
    expected = theirs.loglikelihood(instances("loglikelihood", pairs), disable_tqdm=True)
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], rel=1e-10)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]


@pytest.mark.parametrize("name", ["layers", "both"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_rolling_requests_have_no_prefill(loaded: LoadedModel, name: str, batch_size: int) -> None:
    """All of the text is continuation, so neither method prunes anything; windows and all."""
    texts = [("Some words. " * count,) for count in (1, 5, 30)]
    pruned, dense = StagePruneLM(loaded, setting=SETTINGS[name], batch_size=batch_size), StagePruneLM(loaded)
    found = pruned.loglikelihood_rolling(instances("loglikelihood_rolling", texts), disable_tqdm=True)
    pruned.remove()
    assert found == pytest.approx(
        dense.loglikelihood_rolling(instances("loglikelihood_rolling", texts), disable_tqdm=True), rel=1e-10
    )


@pytest.mark.parametrize("name", ["layers", "both"])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_pruned_generation_is_that_of_each_prompt_alone(loaded: LoadedModel, name: str, batch_size: int) -> None:
    model, tokenizer = loaded
    prompts = [f"Question: {row['question']}" for row in QUESTIONS]
    expected = []
    with SETTINGS[name].attach(model):
        for prompt in prompts:
            ids = tokenizer(prompt, return_tensors="pt").input_ids
            answer = model.generate(ids, do_sample=False, max_new_tokens=5)[0, ids.shape[1] :]
            expected.append(tokenizer.decode(answer, skip_special_tokens=True).split("Q")[0])
    adapter = StagePruneLM(loaded, setting=SETTINGS[name], batch_size=batch_size)
    arguments = [(prompt, {"until": ["Q"], "max_gen_toks": 5, "do_sample": False}) for prompt in prompts]
    found = adapter.generate_until(instances("generate_until", arguments), disable_tqdm=True)
    adapter.remove()
    assert found == expected
    assert len(set(found)) > 1


def test_equal_inputs_are_computed_once(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = StagePruneLM(loaded, setting=SETTINGS["layers"], batch_size=64)
    rows: list[int] = []
    forward = adapter.model.forward
    monkeypatch.setattr(adapter.model, "forward", lambda *a, **k: rows.append(len(k["input_ids"])) or forward(*a, **k))
    pairs = [("Question: what?", f" {letter}") for letter in "bcde"]  # of " a" there is a token
    answers = adapter.loglikelihood(instances("loglikelihood", pairs), disable_tqdm=True)
    monkeypatch.undo()
    adapter.remove()
    assert len(set(answers)) == 4
    # A space and a letter are two tokens: what is read before the last one is the same.
    assert rows == [1]


def test_it_is_registered_and_reads_model_args(folder: Path, tmp_path: Path) -> None:
    kind = get_model("stageprune")
    assert kind is StagePruneLM
    adapter = kind.create_from_arg_string(
        f"pretrained={folder},prefill_ratio=1/2,channel_ratio=0.25,dtype=float64", {"device": "cpu", "batch_size": 2}
    )
    assert adapter.handle.methods == (
        sp.PrefillOnlyPruning(0.5),
        sp.OnlineChannelPruning(0.25, scope="sequence"),
    )
    assert adapter.batch_size == 2
    file = tmp_path / "s.json"
    sp.save_settings(file, sp.PrefillOnlyPruning(layers=(2, 3)), model=adapter.model)
    adapter.remove()
    adapter = kind.create_from_arg_string(f"pretrained={folder},settings={file},channel_scope=batch", {"device": "cpu"})
    assert adapter.handle.methods == (sp.PrefillOnlyPruning(layers=(2, 3)),)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefil_ratio": 0.5}, "has no option prefil_ratio"),
        ({"prefill_ratio": "a third"}, "prefill_ratio must be a number or a fraction such as 1/3, got 'a third'"),
        ({"prefill_ratio": "1/0"}, "prefill_ratio must be a number or a fraction"),
        ({"prefill_ratio": 2}, "0 <= ratio < 1"),
        ({"prefill_ratio": 0.5, "settings": "x.json"}, "give one of them"),
        ({"channel_ratio": 0.5, "channel_preset": "fast"}, "give one of them"),
        ({"channel_ratio": 0.5, "channel_scope": "row"}, "channel_scope must be"),
    ],
    ids=["unknown", "words", "zero", "range", "both", "preset", "scope"],
)
def test_bad_arguments(loaded: LoadedModel, options: dict[str, Any], message: str) -> None:
    with pytest.raises(sp.SettingError, match=message):
        StagePruneLM(loaded, **options)
    assert sp.handle_of(loaded.model) is None
