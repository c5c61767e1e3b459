"""Every metric against values computed by hand, step by step, from an independent forward pass."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import stageprune as sp
from helpers import tokens
from reference.prefill_oracle import gated_logits
from stageprune.evaluate import evaluating
from stageprune.evaluate.bootstrap import Bootstrap
from stageprune.evaluate.evaluating import Progress, evaluate, steps_of
from stageprune.evaluate.evaluation import Evaluation
from stageprune.evaluate.examples import Example
from stageprune.evaluate.score import greedy_answer
from stageprune.evaluate.setting import Setting, distinct, setting_of
from stageprune.methods import Method
from zoo import BY_NAME

pytestmark = pytest.mark.usefixtures("one_thread")

ANSWER = 5
HALF = setting_of(sp.PrefillOnlyPruning(0.5))
BOTH = setting_of(sp.PrefillOnlyPruning(0.5), sp.OnlineChannelPruning(0.4, backend="masked"))


@pytest.fixture(scope="module")
def model() -> Any:
    model = BY_NAME["llama"].build(torch.float32)
    model.generation_config.eos_token_id = 7
    model.generation_config.repetition_penalty = 5.0  # shall be without effect
    return model


@pytest.fixture(scope="module")
def examples() -> list[Example]:
    lengths = {8: [6, 8], 16: [16, 12, 11]}
    found = []
    for bucket, sizes in lengths.items():
        for size in sizes:
            ids = tuple(tokens(1, size, seed=size)[0].tolist())
            reference = tuple(tokens(1, 4, seed=100 + size)[0].tolist()) if size % 2 == 0 else ()
            found.append(Example(ids, reference, bucket))
    return found


@pytest.fixture(scope="module")
def rows(one_thread: None, model: Any, examples: list[Example]) -> Any:
    return evaluate(model, examples, [HALF, BOTH], answer_tokens=ANSWER)


@torch.no_grad()
def by_hand(model: Any, prompt: tuple[int, ...], answer: list[int]) -> dict[str, float]:
    """One token at a time; pruned with the gates of the last three of six layers closed at prefill positions."""
    sums = dict(kl=0.0, agreed=0.0, dense_nll=0.0, nll=0.0)
    for place, token in enumerate(answer):
        ids = torch.tensor([[*prompt, *answer[:place]]])
        dense = model(ids).logits[0, -1].double().softmax(-1)
        pruned = gated_logits(model, (3, 4, 5), len(prompt) - 1, input_ids=ids)[0, -1].double().softmax(-1)
        sums["kl"] += float((dense * (dense / pruned).log()).sum())
        sums["agreed"] += float(dense.argmax() == pruned.argmax())
        sums["dense_nll"] -= math.log(dense[token])
        sums["nll"] -= math.log(pruned[token])
    return sums


@torch.no_grad()
def greedy_by_hand(model: Any, prompt: tuple[int, ...], layers: tuple[int, ...]) -> list[int]:
    answer: list[int] = []
    while len(answer) < ANSWER and (not answer or answer[-1] != 7):
        ids = torch.tensor([[*prompt, *answer]])
        answer.append(int(gated_logits(model, layers, len(prompt) - 1, input_ids=ids)[0, -1].argmax()))
    return answer


def test_scores_by_hand(model: Any, examples: list[Example], rows: Any) -> None:
    differ = set()
    for example, scores in zip(examples, rows[1].scores, strict=True):
        answer = greedy_by_hand(model, example.prompt, ())
        assert greedy_answer(model, example.prompt, ANSWER) == answer
        for found, given in ((scores.answers, answer), (scores.references, list(example.reference))):
            if not given:
                assert found is None
                continue
            assert found.tokens == len(given)
            for name, expected in by_hand(model, example.prompt, given).items():
                assert getattr(found, name) == pytest.approx(expected, rel=1e-4, abs=1e-6), name
        pruned = greedy_by_hand(model, example.prompt, (3, 4, 5))
        common = next(
            (place for place, pair in enumerate(zip(answer, pruned, strict=False)) if pair[0] != pair[1]), len(answer)
        )
        assert scores.answers.matched == common
        differ.add(common)
    assert len(differ) > 1


def test_the_dense_row(rows: Any) -> None:
    assert [row.name for row in rows] == ["dense", "layers 0.5", "layers 0.5 + channels 0.4"]
    for scores, pruned in zip(rows[0].scores, rows[1].scores, strict=True):
        assert scores.answers.kl == 0
        assert scores.answers.agreed == scores.answers.matched == scores.answers.tokens
        assert scores.answers.dense_nll == scores.answers.nll == pruned.answers.dense_nll
    assert {(ideal.prefill, ideal.decode) for ideal in rows[0].ideal.values()} == {(1.0, 1.0)}


def test_both_methods_together(model: Any, examples: list[Example], rows: Any) -> None:
    """Each row is what the setting alone gives through the handle; the prompt is prefill up to its last token."""
    example, scores = examples[0], rows[2].scores[0].references
    answer = torch.tensor([example.reference])
    with torch.no_grad(), BOTH.attach(model) as handle, handle.stage(prefill=len(example.prompt) - 1):
        ids = torch.tensor([[*example.prompt, *example.reference[:-1]]])
        pruned = model(ids, logits_to_keep=4, use_cache=False).logits.double().log_softmax(-1)
    assert scores.nll == pytest.approx(-float(pruned.gather(-1, answer[..., None]).sum()), rel=1e-5)
    assert scores.nll != pytest.approx(rows[1].scores[0].references.nll, rel=1e-3)
    assert rows[2].ideal[8].decode > 1.0 == rows[1].ideal[8].decode
    assert rows[2].ideal[8].prefill >= rows[1].ideal[8].prefill > 1


def evaluation(examples: list[Example], rows: Any) -> Evaluation:
    return Evaluation({"name": "m"}, {}, Bootstrap(50), tuple(one.bucket for one in examples), rows)


def test_metrics_are_means_over_tokens(examples: list[Example], rows: Any) -> None:
    result = evaluation(examples, rows)
    for bucket, chosen in ((None, range(5)), (8, (0, 1)), (16, (2, 3, 4))):
        for kind in ("answers", "references"):
            found = [getattr(rows[1].scores[index], kind) for index in chosen]
            found = [one for one in found if one is not None]
            total = sum(one.tokens for one in found)
            metrics = result.metrics(rows[1], kind, bucket)
            assert metrics["kl"].value == pytest.approx(sum(one.kl for one in found) / total)
            assert metrics["agreement"].value == pytest.approx(sum(one.agreed for one in found) / total)
            assert metrics["perplexity"].value == pytest.approx(math.exp(sum(one.nll for one in found) / total))
            assert metrics["dense_perplexity"].value == pytest.approx(
                math.exp(sum(one.dense_nll for one in found) / total)
            )
            assert ("matched" in metrics) == (kind == "answers")
            assert metrics["kl"].lower <= metrics["kl"].value <= metrics["kl"].upper
    answers = [scores.answers for scores in rows[1].scores]
    assert result.metrics(rows[1], "answers")["matched"].value == pytest.approx(sum(a.matched for a in answers) / 5)
    assert result.metrics(rows[1], "answers", 99) == {}


def test_a_file_holds_everything(examples: list[Example], rows: Any, tmp_path: Path) -> None:
    result = evaluation(examples, rows)
    path = tmp_path / "r.json"
    result.save(path)
    assert Evaluation.load(path) == result
    path.write_text(path.read_text().replace('"agreed": 5', '"agreed": 4', 1))
    with pytest.raises(sp.ResultFileError, match="damaged"):
        Evaluation.load(path)


def test_it_goes_on_from_every_step(model: Any, examples: list[Example], rows: Any) -> None:
    states: list[str] = []
    settings = [HALF, BOTH]
    evaluate(
        model,
        examples,
        settings,
        answer_tokens=ANSWER,
        on_step=lambda state: states.append(json.dumps(state.to_dict())),
    )
    assert len(states) == steps_of(examples, settings) == 15
    for index, state in enumerate(states):
        done = Progress.from_dict(json.loads(state))
        assert done.steps == index + 1
        left: list[Progress] = []
        assert evaluate(model, examples, settings, answer_tokens=ANSWER, done=done, on_step=left.append) == rows
        assert len(left) == 15 - done.steps


def test_a_small_memory_gives_the_same(
    model: Any, examples: list[Example], rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluating, "CHUNK_BYTES", 1)
    assert evaluate(model, examples, [HALF, BOTH], answer_tokens=ANSWER) == rows


def test_what_cannot_be_applied_is_said_before_anything_is_computed(model: Any, examples: list[Example]) -> None:
    steps: list[Any] = []
    bad = setting_of(sp.PrefillOnlyPruning(layers=(99,)))
    with pytest.raises(sp.SettingError, match="99"):
        evaluate(model, examples, [HALF, bad], answer_tokens=ANSWER, on_step=steps.append)
    assert steps == []
    assert sp.handle_of(model) is None


@pytest.mark.parametrize(
    ("methods", "name"),
    [
        ((sp.PrefillOnlyPruning(),), "layers 0.333"),
        ((sp.PrefillOnlyPruning(0.5, "interleaved"),), "layers 0.5 (interleaved)"),
        ((sp.PrefillOnlyPruning(layers=(1, 2, 3, 5)),), "layers 1-3,5"),
        ((sp.PrefillOnlyPruning(kv_projection=False, boundary=False),), "layers 0.333 (no K/V, no boundary rule)"),
        ((sp.OnlineChannelPruning(0.4, selection="fixed"),), "channels 0.4 (fixed)"),
        ((sp.OnlineChannelPruning(mlp_ratio=0.4, partition_fraction=0.2),), "channels 0.4 (of the FFN, γ 0.2)"),
        ((sp.PrefillOnlyPruning(0), sp.OnlineChannelPruning(0.2)), "channels 0.2"),
        ((sp.PrefillOnlyPruning(0), sp.OnlineChannelPruning(0)), "dense"),
    ],
    ids=["last", "rule", "indices", "ablations", "fixed", "mlp", "one", "none"],
)
def test_names(methods: tuple[Method, ...], name: str) -> None:
    assert setting_of(*methods).name == name


def test_equal_settings_once_and_equal_names_numbered() -> None:
    other = Setting("layers 0.5", (sp.PrefillOnlyPruning(0.4),))
    found = distinct([HALF, setting_of(), HALF, other])
    assert [setting.name for setting in found] == ["layers 0.5", "layers 0.5 (2)"]
    assert [setting.methods[0].ratio for setting in found] == [0.5, 0.4]  # type: ignore[attr-defined]
