"""Tasks for several settings: the harness's own numbers, in an order that can be interrupted."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness: pip install 'stageprune[eval]'")

from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM

import stageprune as sp
from local_tasks import write_tasks
from stageprune.evaluate.setting import setting_of
from stageprune.evaluate.task_presets import PRESETS, Task, tasks_of
from stageprune.evaluate.tasks import Metric, TaskResult, check_tasks, run_tasks, task_manager
from stageprune.models import LoadedModel, load
from tiny import write_gguf

pytestmark = pytest.mark.usefixtures("one_thread")

TASKS = [Task("local_choice", 0), Task("local_group"), Task("local_generate"), Task("local_rolling")]
SETTINGS = [
    setting_of(sp.PrefillOnlyPruning(layers=(0, 1))),
    setting_of(sp.OnlineChannelPruning(0.4, backend="masked")),
]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(str(write_gguf(tmp_path_factory.mktemp("tasks") / "tiny.gguf")), dtype="float32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("local") / "tasks")


@pytest.fixture(scope="module")
def results(loaded: LoadedModel, folder: Path) -> tuple[TaskResult, ...]:
    return run_tasks(loaded, SETTINGS, TASKS, task_manager(folder), batch_size=2)


def test_the_dense_numbers_are_the_harnesss(loaded: LoadedModel, folder: Path, results: tuple[TaskResult, ...]) -> None:
    model = HFLM(loaded.model, tokenizer=loaded.tokenizer, batch_size=2)
    for task in TASKS:
        (ours,) = [result for result in results if (result.setting, result.task) == ("dense", task.name)]
        theirs = simple_evaluate(model, tasks=[task.name], task_manager=task_manager(folder), bootstrap_iters=1000)
        assert theirs is not None
        values = {**theirs["results"], **theirs.get("groups", {})}[task.name]
        assert ours.metrics
        for name, metric in ours.metrics.items():
            key, _, kind = name.partition(",")
            assert metric.value == values[f"{key},{kind or 'none'}"]
            error = values[f"{key}_stderr,{kind or 'none'}"]
            assert metric.stderr == (error if isinstance(error, float) else None)
        assert (
            ours.samples == {"local_choice": 7, "local_group": 14, "local_generate": 7, "local_rolling": 4}[task.name]
        )


def test_the_order_and_the_parts_of_a_group(results: tuple[TaskResult, ...]) -> None:
    assert [(result.setting, result.task) for result in results] == [
        (setting, task.name) for setting in ("dense", "layers 0-1", "channels 0.4") for task in TASKS
    ]
    group = results[1]
    assert set(group.parts) == {"local_choice", "local_last_word"}
    assert group.parts["local_choice"]["acc"] == results[0].metrics["acc"]
    assert set(results[0].metrics) == {"acc", "acc_norm"}


def test_pruning_changes_what_has_a_prompt(results: tuple[TaskResult, ...]) -> None:
    by_name = {(result.setting, result.task): result for result in results}
    for setting in ("layers 0-1", "channels 0.4"):
        pruned, dense = (by_name[name, "local_group"].parts["local_last_word"] for name in (setting, "dense"))
        assert pruned["perplexity"].value != pytest.approx(dense["perplexity"].value, rel=1e-3)
        rolling = [by_name[name, "local_rolling"].metrics["byte_perplexity"].value for name in (setting, "dense")]
        assert rolling[0] == pytest.approx(rolling[1], rel=1e-5), "a text without a prompt is decode"


def test_it_goes_on_from_every_result(loaded: LoadedModel, folder: Path, results: tuple[TaskResult, ...]) -> None:
    for done in (3, 4, 11, 12):
        state = json.loads(json.dumps([result.to_dict() for result in results[:done]]))
        seen: list[Any] = []
        again = run_tasks(
            loaded,
            SETTINGS,
            TASKS,
            task_manager(folder),
            batch_size=2,
            done=[TaskResult.from_dict(one) for one in state],
            on_result=seen.append,
        )
        assert again == results
        assert len(seen) == 12 - done
    assert sp.handle_of(loaded.model) is None


def test_the_batch_does_not_matter(loaded: LoadedModel, folder: Path, results: tuple[TaskResult, ...]) -> None:
    other = run_tasks(loaded, SETTINGS, TASKS, task_manager(folder), batch_size=5)
    for a, b in zip(other, results, strict=True):
        for name, metric in a.metrics.items():
            assert metric.value == pytest.approx(b.metrics[name].value, rel=1e-4), (a.setting, a.task, name)


def test_a_limit(loaded: LoadedModel, folder: Path) -> None:
    (result,) = run_tasks(loaded, [], [Task("local_choice")], task_manager(folder), limit=3)
    assert (result.samples, result.shots) == (3, 0)
    assert set(result.metrics) == {"acc", "acc_norm"}
    assert isinstance(result.metrics["acc"], Metric)


def test_data_that_is_not_there(loaded: LoadedModel, folder: Path, tmp_path: Path) -> None:
    content = (folder / "choice.yaml").read_text().replace("questions.jsonl", "missing.jsonl")
    (tmp_path / "broken.yaml").write_text(content.replace("local_choice", "broken"))
    manager = task_manager(tmp_path)
    with pytest.raises(sp.DataError, match=r"the task 'broken' cannot be run: .*missing"):
        run_tasks(loaded, SETTINGS, [Task("broken")], manager)
    with pytest.raises(sp.DataError, match=r"knows no task 'nonsense', 'other'"):
        check_tasks(manager, [Task("nonsense"), Task("broken"), Task("other")])
    assert sp.handle_of(loaded.model) is None


def test_running_code_is_allowed_for_the_run_alone(
    loaded: LoadedModel, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_ALLOW_CODE_EVAL", raising=False)
    seen = []
    for allowed in (False, True):
        run_tasks(
            loaded,
            [],
            [Task("local_choice")],
            task_manager(folder),
            limit=1,
            run_code=allowed,
            on_start=lambda setting, task: seen.append(os.environ.get("HF_ALLOW_CODE_EVAL")),
        )
    assert seen == [None, "1"]
    assert "HF_ALLOW_CODE_EVAL" not in os.environ


def test_the_presets_are_tasks_of_the_harness() -> None:
    manager = task_manager()
    for tasks in PRESETS.values():
        check_tasks(manager, tasks)
    assert [task.name for task in tasks_of(("paper-prefill", "hellaswag", "mmlu"))].count("mmlu") == 2
    assert len(tasks_of(("paper-channels", "paper-channels"))) == 12


def test_torch_is_seeded_by_the_harness_alone(loaded: LoadedModel, folder: Path) -> None:
    """Results do not depend on what ran before."""
    runs = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        runs.append(run_tasks(loaded, [], [Task("local_rolling"), Task("local_group")], task_manager(folder)))
    assert runs[0] == runs[1]
