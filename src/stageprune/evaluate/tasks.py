"""Tasks of lm-evaluation-harness for several settings, one after the other, so that an interrupted run can go on."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

from stageprune.errors import DataError, StagePruneError
from stageprune.evaluate.setting import DENSE, Setting
from stageprune.evaluate.task_presets import Task
from stageprune.models import LoadedModel

KIND, VERSION = "stageprune-eval-tasks", 1

BOOTSTRAPS = 1000
"""Resamples for the standard error of metrics that are no means; the harness draws them with fixed seeds."""


@dataclass(frozen=True)
class Metric:
    """One number.

    Attributes:
        value: of all samples.
        stderr: its standard error; None where the harness has none.
    """

    value: float
    stderr: float | None


@dataclass(frozen=True)
class TaskResult:
    """One task with one setting.

    Attributes:
        setting: its name.
        task: its name.
        samples: how many were used, of the task or of all tasks of the group.
        shots: examples before each question; None for a group.
        metrics: by the harness's names, such as `"acc"` or `"exact_match,strict-match"`.
        parts: the tasks of a group, likewise.
    """

    setting: str
    task: str
    samples: int
    shots: int | None
    metrics: dict[str, Metric]
    parts: dict[str, dict[str, Metric]]

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """The inverse of `to_dict`.

        Raises:
            KeyError, TypeError, ValueError: if something is missing or wrong.
        """
        parts = {name: _metrics_from(part) for name, part in data["parts"].items()}
        shots = None if data["shots"] is None else int(data["shots"])
        return cls(
            str(data["setting"]), str(data["task"]), int(data["samples"]), shots, _metrics_from(data["metrics"]), parts
        )


def _metrics_from(data: dict[str, Any]) -> dict[str, Metric]:
    return {name: Metric(**metric) for name, metric in data.items()}


def task_manager(include: Path | None = None, names: Sequence[str] = ()) -> Any:
    """The harness's tasks, ours, and those in a folder of YAML files.

    Args:
        include: the folder.
        names: of the tasks that are needed. Without any that is the harness's own, its thousands of files are not read,
            which takes half a minute.

    Raises:
        StagePruneError: if lm-evaluation-harness is not installed.
    """
    folders = (str(Path(__file__).with_name("harness_tasks")), *([] if include is None else [str(include)]))
    few = _manager(folders, False) if names else None
    return few if few is not None and set(names) <= set(few.all_tasks) else _manager(folders, True)


@cache
def _manager(folders: tuple[str, ...], defaults: bool) -> Any:
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise StagePruneError("tasks need lm-evaluation-harness; run: pip install 'stageprune[eval]'") from error
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    return TaskManager(include_path=list(folders), include_defaults=defaults)


def check_tasks(manager: Any, tasks: Sequence[Task]) -> None:
    """Refuse unknown tasks.

    Raises:
        DataError: names them.
    """
    unknown = [task.name for task in tasks if task.name not in manager.all_tasks]
    if unknown:
        raise DataError(f"lm-evaluation-harness knows no task {', '.join(map(repr, unknown))}")


def run_tasks(
    loaded: LoadedModel,
    settings: Sequence[Setting],
    tasks: Sequence[Task],
    manager: Any,
    *,
    limit: int | None = None,
    batch_size: int = 1,
    run_code: bool = False,
    done: Sequence[TaskResult] = (),
    on_result: Callable[[tuple[TaskResult, ...]], object] = lambda results: None,
    on_start: Callable[[str, str], object] = lambda setting, task: None,
) -> tuple[TaskResult, ...]:
    """Run every task on the dense model, then with every setting.

    Args:
        loaded: the model, not pruned; it is dense again afterwards.
        settings: to measure.
        tasks: to run.
        manager: of `task_manager`.
        limit: samples of each task at most; None for all.
        batch_size: rows at a time; has no effect on the results but for rounding.
        run_code: whether tasks may run what the model writes, as HumanEval and MBPP do.
        done: of an earlier run with the same arguments.
        on_result: called with all results after each one.
        on_start: called before each with the names of setting and task.

    Raises:
        DataError: if a task cannot be run, such as because its data cannot be loaded.
        SettingError, UnsupportedModelError, ResultFileError: if a setting cannot be applied to the model.
    """
    for setting in settings:
        if setting.calibration is None:  # at once what cannot be applied, not after an hour
            setting.attach(loaded.model).remove()
    results = tuple(done)
    every = [(setting, task) for setting in (DENSE, *settings) for task in tasks]
    with _allowed_code(run_code):
        for setting, left in _by_setting(every[len(results) :]):
            with _adapter(loaded, setting, batch_size) as adapter:
                for task in left:
                    on_start(setting.name, task.name)
                    results += (_run(adapter, setting, task, manager, limit, batch_size, run_code),)
                    on_result(results)
    return results


def _by_setting(pairs: Sequence[tuple[Setting, Task]]) -> Iterator[tuple[Setting, list[Task]]]:
    for name in dict.fromkeys(setting.name for setting, _ in pairs):
        own = [pair for pair in pairs if pair[0].name == name]
        yield own[0][0], [task for _, task in own]


@contextmanager
def _adapter(loaded: LoadedModel, setting: Setting, batch_size: int) -> Iterator[Any]:
    from stageprune.evaluate.lm_eval_adapter import StagePruneLM

    adapter = StagePruneLM(loaded, setting=setting, batch_size=batch_size)
    try:
        yield adapter
    finally:
        adapter.remove()


@contextmanager
def _allowed_code(allowed: bool) -> Iterator[None]:
    """What the metric of code tasks asks for, for the time of the run."""
    name = "HF_ALLOW_CODE_EVAL"
    before = os.environ.get(name)
    if allowed:
        os.environ[name] = "1"
    try:
        yield
    finally:
        if allowed:
            os.environ.pop(name)
            if before is not None:
                os.environ[name] = before


def _run(
    adapter: Any, setting: Setting, task: Task, manager: Any, limit: int | None, batch_size: int, run_code: bool
) -> TaskResult:
    from lm_eval import simple_evaluate

    try:
        with redirect_stdout(sys.stderr):  # the harness prints what it does
            found = simple_evaluate(
                model=adapter,
                tasks=[task.name],
                num_fewshot=task.shots,
                batch_size=batch_size,
                limit=limit,
                bootstrap_iters=BOOTSTRAPS,
                log_samples=False,
                task_manager=manager,
                confirm_run_unsafe_code=run_code,
            )
    except StagePruneError:
        raise
    except (MemoryError, KeyboardInterrupt):
        raise
    except Exception as error:  # tasks are programs, and their data can come from anywhere
        problem = " ".join(str(error).split())[:400] or type(error).__name__
        raise DataError(f"the task {task.name!r} cannot be run: {problem}") from error
    assert found is not None
    values = {**found["results"], **found.get("groups", {})}
    parts = {name: _metrics(one) for name, one in sorted(values.items()) if name != task.name}
    return TaskResult(
        setting=setting.name,
        task=task.name,
        samples=sum(one["effective"] for one in found["n-samples"].values()),
        shots=found["n-shot"].get(task.name),
        metrics=_metrics(values.get(task.name, {})),
        parts=parts,
    )


def _metrics(values: dict[str, Any]) -> dict[str, Metric]:
    """From the harness's `"acc,none": 0.5, "acc_stderr,none": 0.1` to metrics by name; a filter `none` is left out."""
    found = {}
    for key, value in values.items():
        name, _, kind = key.partition(",")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not kind or name.endswith("_stderr"):
            continue
        error = values.get(f"{name}_stderr,{kind}")
        shown = name if kind == "none" else key
        found[shown] = Metric(float(value), float(error) if isinstance(error, (int, float)) else None)
    return found
