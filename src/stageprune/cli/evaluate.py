"""`stageprune eval`: quality against the dense model, on any text or on tasks of lm-evaluation-harness."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from stageprune.cli import channel_options, described, eval_settings, options, parse, prompts, show
from stageprune.cli.common import (
    UsageProblem,
    check_outputs,
    load_model,
    note,
    output,
    progress,
    set_threads,
)
from stageprune.cli.eval_tasks import TaskOptions, evaluate_tasks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stageprune.evaluate.bootstrap import Estimate
    from stageprune.evaluate.evaluation import Evaluation, Row
    from stageprune.evaluate.setting import Setting
    from stageprune.models import LoadedModel

PARTIAL = ("stageprune-eval-partial", 1)
"""Kind and version of the file that an interrupted run goes on from."""

_OF_TEXTS = ("data", "lengths", "count", "answer_tokens", "seed", "resamples", "confidence", "cache")
_OF_TASKS = ("limit", "batch_size", "include_path", "run_code")
_OPTIONS = {"count": "prompts"}


def evaluate(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help=options.MODEL_HELP)] = "demo",
    ratios: Annotated[
        Any,
        typer.Option(
            "--ratios",
            "--ratio",
            "-r",
            parser=parse.ratios,
            metavar="R,R,...",
            show_default=False,
            help="Shares of the layers to skip. Default: 1/3, or none with other settings. With --channel-ratio every "
            "combination is measured; a ratio of 0 leaves a method out.",
        ),
    ] = None,
    layers: options.LayersByRule = None,
    importance: options.Importance = None,
    contiguous: options.Contiguous = None,
    projections: options.Projections = None,
    channel_ratio: channel_options.ChannelRatios = None,
    partition_fraction: channel_options.PartitionFraction = None,
    selection: channel_options.SelectionRule = None,
    channel_preset: channel_options.Preset = None,
    channel_backend: channel_options.Backend = None,
    channel_setting: channel_options.Others = None,
    settings: Annotated[
        list[Path] | None,
        typer.Option(
            "--settings",
            metavar="FILE",
            show_default=False,
            help="Also prune as this file says, such as a stageprune.json. Can be given several times.",
        ),
    ] = None,
    baseline: Annotated[
        list[str] | None,
        typer.Option(
            "--baseline",
            metavar="NAME[=RATIO]",
            show_default=False,
            help="Also measure this one: layer-dropping, shortgpt, slicegpt, wanda, wanda-sp, flap, probe-pruning, "
            "magnitude or random-channels. Can be given several times.",
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            help="Prompts, with a response, reference or answer each if there are any: a .jsonl, .parquet or .txt "
            "file, or a data set of the hub. Default: built-in text that no calibration uses.",
            show_default=False,
        ),
    ] = None,
    lengths: Annotated[
        Any,
        typer.Option(
            "--lengths",
            parser=parse.counts,
            metavar="N,N,...",
            help="Prompt lengths, in tokens. With rows of --data: where buckets end; longer prompts are cut.",
        ),
    ] = "128,512,1024",
    count: Annotated[
        Any,
        typer.Option(
            "--prompts", parser=parse.count, metavar="N", help="How many: of each length, or of rows of --data in all."
        ),
    ] = "16",
    answer_tokens: Annotated[
        Any, typer.Option("--answer-tokens", parser=parse.count, metavar="N", help="Length of an answer at most.")
    ] = "48",
    seed: Annotated[
        Any, typer.Option("--seed", parser=parse.seed, metavar="N", help="Of the prompts drawn, and the intervals.")
    ] = "0",
    resamples: Annotated[
        Any, typer.Option("--resamples", parser=parse.count, metavar="N", help="Of the prompts, for the intervals.")
    ] = "1000",
    confidence: Annotated[
        Any, typer.Option("--confidence", parser=parse.confidence, metavar="C", help="Of the intervals.")
    ] = "0.95",
    tasks: Annotated[
        Any,
        typer.Option(
            "--tasks",
            parser=parse.names,
            metavar="T,T,...",
            show_default=False,
            help="Instead of a text: tasks of lm-evaluation-harness, or paper-prefill or paper-channels for those of "
            "the papers.",
        ),
    ] = None,
    limit: Annotated[
        Any,
        typer.Option(
            "--limit", parser=parse.count, metavar="N", help="Samples of each task at most.", show_default=False
        ),
    ] = None,
    batch_size: Annotated[
        Any, typer.Option("--batch-size", parser=parse.count, metavar="B", help="Of --tasks: rows at a time.")
    ] = "1",
    include_path: Annotated[
        Path | None,
        typer.Option("--include-path", metavar="DIR", help="A folder with more tasks.", show_default=False),
    ] = None,
    run_code: Annotated[
        bool,
        typer.Option("--run-code", help="Let tasks such as humaneval run what the model writes, on this machine."),
    ] = False,
    cache: Annotated[
        bool, typer.Option("--cache/--no-cache", help="Keep the dense model's answers for later evaluations, or not.")
    ] = True,
    output_file: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Write everything that was measured. An interrupted run goes on from FILE.partial.",
            metavar="FILE",
            show_default=False,
        ),
    ] = None,
    dtype: options.Dtype = "auto",
    device: options.Device = None,
    threads: options.Threads = None,
    as_json: options.Json = False,
) -> None:
    """Measure what settings cost: how far the pruned model's predictions are from the dense model's.

    On the dense model's own greedy answers, and on given ones: KL divergence per token, share of tokens whose likeliest
    prediction stays, perplexity, and how long the pruned model's own answer is the same; with confidence intervals.
    Or, with --tasks, the dense and the pruned model's results in tasks of lm-evaluation-harness.
    """
    _check_together(context, tasks is not None)
    files = settings or []
    check_outputs(
        {"--output": output_file},
        {"--data": data, "--importance": importance} | {f"--settings {file}": file for file in files},
    )
    channels = channel_options.channels_of(
        channel_ratio[0] if channel_ratio else None,
        partition_fraction,
        selection,
        channel_preset,
        channel_backend,
        channel_setting,
    )
    layer_options = options.LayerOptions(layers, importance, contiguous, projections)
    chosen = eval_settings.settings_of(ratios, layer_options, channel_ratio, channels, files, baseline or [])
    set_threads(threads)
    task_options = None if tasks is None else TaskOptions(tasks, limit, batch_size, include_path, run_code)
    prepared = None if task_options is None else task_options.check()
    loaded = load_model(model, dtype, device)
    eval_settings.check_files(loaded.model, layer_options, files)
    from stageprune.evaluate.setting import with_calibration

    chosen = with_calibration(chosen, loaded.tokenizer)
    if task_options is not None and prepared is not None:
        identity = {"model": described.model_of(loaded, model), "settings": described.environment_of(loaded)}
        evaluate_tasks(loaded, chosen, task_options, prepared, identity, output_file, as_json)
        return

    from stageprune.evaluate.bootstrap import Bootstrap
    from stageprune.evaluate.evaluation import Evaluation
    from stageprune.evaluate.examples import load_examples
    from stageprune.evaluate.samples import LEAST
    from stageprune.records import digest

    prompts.check_fits(loaded.model, max(lengths), answer_tokens, "--answer-tokens")
    if min(lengths) < LEAST:
        raise UsageProblem(f"--lengths must be at least {LEAST}, so that one token is prefill; got {min(lengths)}")
    found = load_examples(loaded.tokenizer, data, lengths, count, answer_tokens, seed)
    if len(found.examples) < found.wanted:
        note(f"{found.source} has {len(found.examples)} usable prompts, fewer than the {found.wanted} asked for")
    measured = {
        "data": found.source,
        "examples": digest([vars(example) for example in found.examples]),
        "count": len(found.examples),
        "lengths": sorted(lengths),
        "answer_tokens": answer_tokens,
        "seed": seed,
        **described.environment_of(loaded),
    }
    identity = {"model": described.model_of(loaded, model), "settings": measured}
    rows = _measure(loaded, found.examples, chosen, answer_tokens, identity, output_file, cache)
    bootstrap = Bootstrap(resamples, confidence, seed)
    buckets = tuple(example.bucket for example in found.examples)
    result = Evaluation(identity["model"], measured, bootstrap, buckets, rows)
    if output_file is not None:
        result.save(output_file)
        _checkpoint(output_file, identity, chosen).remove()
    if as_json:
        typer.echo(json.dumps(result.to_dict(), indent=2))
        return
    _show(result)
    if output_file is not None:
        note(f"written: {output_file}")


def _check_together(context: typer.Context, tasks: bool) -> None:
    """Refuse options that would have no effect."""
    for name in _OF_TEXTS if tasks else _OF_TASKS:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = f"--{_OPTIONS.get(name, name).replace('_', '-')}"
            raise UsageProblem(f"{option} cannot apply with --tasks" if tasks else f"{option} is for --tasks only")


def _checkpoint(output_file: Path, identity: dict[str, dict[str, Any]], chosen: Sequence[Setting]) -> Any:
    from stageprune.evaluate.checkpoint import Checkpoint
    from stageprune.evaluate.evaluating import Progress

    rows = {setting.name: setting.to_dict() for setting in chosen}
    return Checkpoint(output_file, *PARTIAL, {**identity, "rows": rows}, Progress.from_dict)


def _measure(
    loaded: LoadedModel,
    examples: Sequence[Any],
    chosen: Sequence[Setting],
    answer_tokens: int,
    identity: dict[str, dict[str, Any]],
    output_file: Path | None,
    cache: bool,
) -> tuple[Row, ...]:
    """All rows, going on from an earlier run or its answers."""
    from stageprune.evaluate.answers_cache import AnswersCache
    from stageprune.evaluate.evaluating import Progress, evaluate, steps_of

    checkpoint = None if output_file is None else _checkpoint(output_file, identity, chosen)
    done: Progress = (checkpoint and checkpoint.load()) or Progress()
    if done.steps:
        note(f"going on after {done.steps} of {steps_of(examples, chosen)} steps")
    known = None
    asked = [example.prompt for example in examples]
    if cache:
        names = ("device", "attention", "versions")
        environment = {name: identity["settings"][name] for name in names}
        known = AnswersCache([identity["model"]["fingerprint"], answer_tokens, environment])
        answers = known.answers(asked)
        if len(answers) > len(done.answers):
            done = replace(done, answers=answers)
    with progress("evaluating", steps_of(examples, chosen) - done.steps) as step:

        def on_step(state: Progress) -> None:
            nonlocal known
            if checkpoint is not None:
                checkpoint.save(state.to_dict())
            if known is not None and len(state.answers) == len(asked):
                known.add(asked, state.answers)
                known = None  # once: they do not change any more
            step()

        return evaluate(loaded.model, examples, chosen, answer_tokens=answer_tokens, done=done, on_step=on_step)


def _show(result: Evaluation) -> None:
    model, settings, intervals = result.model, result.settings, result.bootstrap
    output.print(
        f"{model['name']}: {model['architecture']}, {model['dtype']}\n{settings['count']} prompts of "
        f"{settings['data']}; answers of up to {settings['answer_tokens']} tokens; in brackets "
        f"{intervals.confidence:.0%} intervals over prompts",
        markup=False,
        soft_wrap=True,
    )
    titles = {"answers": "on the dense model's greedy answers", "references": "on the given references"}
    for kind, title in titles.items():
        if any(result.metrics(row, kind) for row in result.rows):
            output.print(_table(result, kind, title))


def _table(result: Evaluation, kind: str, title: str) -> Table:
    table = Table(title=title, title_justify="left")
    names = ["setting", "prompt tokens", "prompts", "KL", "agreement", "perplexity"]
    names += ["equal tokens"] if kind == "answers" else []
    for name in (*names, "ideal prefill / decode"):
        table.add_column(name, justify="left" if name == "setting" else "right")
    buckets = list(result.rows[0].ideal)
    for row in result.rows:
        for bucket in buckets if len(buckets) == 1 else [*buckets, None]:
            cells = _cells(result, row, kind, bucket)
            if cells is not None:
                table.add_row(*cells)
        table.add_section()
    return table


def _cells(result: Evaluation, row: Row, kind: str, bucket: int | None) -> list[str] | None:
    metrics = result.metrics(row, kind, bucket)
    if not metrics:
        return None
    scores = zip(row.scores, result.buckets, strict=True)
    count = sum(getattr(one, kind) is not None for one, other in scores if bucket in (None, other))
    cells = [
        row.name,
        "all" if bucket is None else f"{row.ideal[bucket].prompt_tokens:,}",
        str(count),
        _interval(metrics["kl"], ".3g"),
        _interval(metrics["agreement"], ".1%"),
        _interval(metrics["perplexity"], ".4g"),
    ]
    if kind == "answers":
        cells.append(_interval(metrics["matched"], ".1f"))
    ideal = None if bucket is None else row.ideal[bucket]
    return [*cells, "-" if ideal is None else f"{show.factor(ideal.prefill)} / {show.factor(ideal.decode)}"]


def _interval(estimate: Estimate, form: str) -> str:
    if estimate.lower is None or estimate.upper is None:
        return f"{estimate.value:{form}}"
    return f"{estimate.value:{form}} [{estimate.lower:{form}}, {estimate.upper:{form}}]"
