"""`stageprune eval --tasks`: tasks of lm-evaluation-harness, on the dense model and with each setting."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table

from stageprune.cli.common import note, output

if TYPE_CHECKING:
    from stageprune.evaluate.checkpoint import Checkpoint
    from stageprune.evaluate.setting import Setting
    from stageprune.evaluate.task_presets import Task
    from stageprune.evaluate.tasks import Metric, TaskResult
    from stageprune.models import LoadedModel

PARTIAL = ("stageprune-eval-tasks-partial", 1)
"""Kind and version of the file that an interrupted run goes on from."""


@dataclass(frozen=True)
class TaskOptions:
    """What the options about tasks say.

    Attributes:
        names: `--tasks`.
        limit: `--limit`.
        batch_size: `--batch-size`.
        include: `--include-path`.
        run_code: `--run-code`.
    """

    names: tuple[str, ...]
    limit: int | None
    batch_size: int
    include: Path | None
    run_code: bool

    def check(self) -> tuple[Any, tuple[Task, ...]]:
        """The harness's task manager and the tasks, before anything long begins.

        Raises:
            StagePruneError: if the harness is not installed, or knows no such task.
        """
        from stageprune.evaluate.task_presets import tasks_of
        from stageprune.evaluate.tasks import check_tasks, task_manager

        tasks = tasks_of(self.names)
        manager = task_manager(self.include, [task.name for task in tasks])
        check_tasks(manager, tasks)
        return manager, tasks


def evaluate_tasks(
    loaded: LoadedModel,
    chosen: Sequence[Setting],
    options: TaskOptions,
    prepared: tuple[Any, tuple[Task, ...]],
    identity: dict[str, dict[str, Any]],
    output_file: Path | None,
    as_json: bool,
) -> None:
    """Run the tasks, show and write the results."""
    from dataclasses import asdict
    from importlib.metadata import version

    from stageprune.evaluate.tasks import KIND, VERSION, run_tasks
    from stageprune.records import write_record

    manager, tasks = prepared
    settings = {
        **identity["settings"],
        "tasks": [asdict(task) for task in tasks],
        "limit": options.limit,
        "batch_size": options.batch_size,
        "lm_eval": version("lm_eval"),
    }
    what = {**identity, "settings": settings, "rows": {setting.name: setting.to_dict() for setting in chosen}}
    checkpoint = None if output_file is None else _checkpoint(output_file, what)
    done: tuple[TaskResult, ...] = (checkpoint and checkpoint.load()) or ()
    total = len(tasks) * (1 + len(chosen))
    if done:
        note(f"going on after {len(done)} of {total} tasks")
    started = len(done)

    def on_start(setting: str, task: str) -> None:
        nonlocal started
        started += 1
        note(f"{task}, {setting} ({started} of {total})")

    def on_result(results: tuple[TaskResult, ...]) -> None:
        if checkpoint is not None:
            checkpoint.save({"results": [result.to_dict() for result in results]})

    results = run_tasks(
        loaded,
        chosen,
        tasks,
        manager,
        limit=options.limit,
        batch_size=options.batch_size,
        run_code=options.run_code,
        done=done,
        on_result=on_result,
        on_start=on_start,
    )
    data = {**what, "results": [result.to_dict() for result in results]}
    if output_file is not None:
        write_record(output_file, KIND, VERSION, data)
    if checkpoint is not None:
        checkpoint.remove()
    if as_json:
        typer.echo(json.dumps(data, indent=2))
        return
    _show(data, tasks, results)
    if output_file is not None:
        note(f"written: {output_file}")


def _checkpoint(output_file: Path, what: dict[str, dict[str, Any]]) -> Checkpoint[tuple[TaskResult, ...]]:
    from stageprune.evaluate.checkpoint import Checkpoint
    from stageprune.evaluate.tasks import TaskResult

    def read(data: dict[str, Any]) -> tuple[TaskResult, ...]:
        return tuple(map(TaskResult.from_dict, data["results"]))

    return Checkpoint(output_file, *PARTIAL, what, read)


def _show(data: dict[str, Any], tasks: Sequence[Task], results: Sequence[TaskResult]) -> None:
    model, limit = data["model"], data["settings"]["limit"]
    samples = "all samples" if limit is None else f"up to {limit} samples of each task"
    output.print(
        f"{model['name']}: {model['architecture']}, {model['dtype']}\nlm-evaluation-harness "
        f"{data['settings']['lm_eval']}, {samples}; ± is the standard error",
        markup=False,
        soft_wrap=True,
    )
    names = list(dict.fromkeys(result.setting for result in results))
    table = Table()
    for name in ("task", "metric", "shots", "samples"):
        table.add_column(name, justify="left" if name in ("task", "metric") else "right")
    for name in names:
        table.add_column(name, justify="right")
    for task in tasks:
        own = [result for result in results if result.task == task.name]
        metrics = [name for name in own[0].metrics if _is_shown(name, task)]
        for metric in metrics:
            shots = "-" if own[0].shots is None else str(own[0].shots)
            values = [_with_error(result.metrics[metric]) for result in own]
            table.add_row(task.name, metric, shots, str(own[0].samples), *values)
        table.add_section()
    output.print(table)


def _is_shown(name: str, task: Task) -> bool:
    """A metric goes under its name alone, or with the filter that its answers went through."""
    return task.metric in (None, name, name.partition(",")[0])


def _with_error(metric: Metric) -> str:
    return f"{metric.value:.4g}" if metric.stderr is None else f"{metric.value:.4g} ± {metric.stderr:.2g}"
