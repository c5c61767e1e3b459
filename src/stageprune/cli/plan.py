"""`stageprune plan`: the layers to skip for the largest speed-up at which quality holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.table import Table

from stageprune.cli import described, options, parse, prompts, show
from stageprune.cli.command_line import command_line
from stageprune.cli.common import (
    UsageProblem,
    check_outputs,
    load_model,
    note,
    output,
    progress,
    set_threads,
)
from stageprune.prefill.importance import Importance

if TYPE_CHECKING:
    from stageprune.evaluate.plan import Plan, Point

PARTIAL = ("stageprune-plan-partial", 1)
"""Kind and version of the file that an interrupted run goes on from."""


def plan(
    model: Annotated[str, typer.Argument(help=options.MODEL_HELP)] = "demo",
    max_kl: Annotated[
        Any,
        typer.Option(
            "--max-kl",
            parser=parse.nats,
            metavar="X",
            help="Bound: mean KL divergence from the dense model per answer token, in nats, such as 0.05.",
            show_default=False,
        ),
    ] = None,
    min_agreement: Annotated[
        Any,
        typer.Option(
            "--min-agreement",
            parser=parse.fraction,
            metavar="Y",
            help="Bound: share of answer tokens that stay the likeliest, such as 0.9.",
            show_default=False,
        ),
    ] = None,
    importance: Annotated[
        Path | None,
        typer.Option(
            "--importance",
            help="Scores that `stageprune analyze` wrote: also try the layers that they say matter least.",
            metavar="FILE",
            show_default=False,
        ),
    ] = None,
    search: Annotated[
        Literal["auto", "rules", "subsets"],
        typer.Option(
            "--search",
            help="What to measure: for each number of layers what the rules say, or all sets of layers, up to 13 "
            "layers. auto: all sets up to 7 layers.",
        ),
    ] = "auto",
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            help="Prompts to measure on, others than those for calibration: a .jsonl, .parquet or .txt file, or a "
            "data set of the hub. Default: built-in text that no calibration uses.",
            show_default=False,
        ),
    ] = None,
    count: Annotated[
        Any, typer.Option("--prompts", parser=parse.count, metavar="N", help="How many prompts to measure on.")
    ] = "24",
    seed: Annotated[Any, typer.Option("--seed", parser=parse.seed, metavar="N", help="Of the prompts drawn.")] = "0",
    prompt_tokens: Annotated[
        Any,
        typer.Option(
            "--prompt-tokens",
            parser=parse.count,
            metavar="N",
            help="Length of a prompt (with --data: at most), for which the speed-up is counted, too.",
        ),
    ] = "384",
    answer_tokens: Annotated[
        Any, typer.Option("--answer-tokens", parser=parse.count, metavar="N", help="Length of an answer.")
    ] = "48",
    output_file: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Write the best setting, such as stageprune.json, for --settings and load_settings(). An interrupted "
            "run goes on from FILE.partial.",
            metavar="FILE",
            show_default=False,
        ),
    ] = None,
    dtype: options.Dtype = "auto",
    device: options.Device = None,
    threads: options.Threads = None,
    as_json: options.Json = False,
) -> None:
    """Find the layers to skip for the largest speed-up of the prompt at which measured quality stays within a bound.

    Every candidate is measured on held-out text, against the dense model's own answers; the speed-up is counted in
    floating-point operations.
    """
    if max_kl is None and min_agreement is None:
        raise UsageProblem("a plan needs a bound: --max-kl, such as 0.05, or --min-agreement, such as 0.9")
    check_outputs({"--output": output_file}, {"--importance": importance, "--data": data})
    scores = None if importance is None else Importance.load(importance)
    set_threads(threads)
    loaded = load_model(model, dtype, device)

    from stageprune.evaluate.candidates import FEW_LAYERS, rule_candidates, subset_candidates
    from stageprune.evaluate.checkpoint import Checkpoint
    from stageprune.evaluate.fingerprint import check_identity
    from stageprune.evaluate.plan import Bound, Plan
    from stageprune.evaluate.planning import Progress, measure
    from stageprune.evaluate.samples import LEAST, load_prompts
    from stageprune.evaluate.system import system_info
    from stageprune.evaluate.text import held_out_prompts
    from stageprune.families.costs import prompt_flops
    from stageprune.families.decoder import find_decoder
    from stageprune.records import digest

    decoder = find_decoder(loaded.model)
    total = len(decoder.layers)
    prompts.check_fits(loaded.model, prompt_tokens, answer_tokens, "--answer-tokens")
    if prompt_tokens < LEAST:
        raise UsageProblem(f"--prompt-tokens must be at least {LEAST}, so that one is prefill; got {prompt_tokens}")
    means = None
    if importance is not None and scores is not None:
        check_identity(scores.model, loaded.model, importance)
        means = [estimate.mean for estimate in scores.scores("prefill")]
    if search == "auto":
        search = "subsets" if total <= FEW_LAYERS else "rules"
    candidates = (subset_candidates if search == "subsets" else rule_candidates)(total, means)
    if data is None:
        source, held_out = "built-in held-out text", held_out_prompts(loaded.tokenizer, count, prompt_tokens)
    else:
        drawn = load_prompts(loaded.tokenizer, data, count, prompt_tokens, seed)
        source, held_out = drawn.source, [list(tokens) for tokens in drawn.tokens]
        if len(held_out) < count:
            note(f"{source} has {len(held_out)} usable prompts, fewer than --prompts {count}")
        if scores is not None and scores.settings.get("data") == source:
            note(f"the importance scores are from {source}, too: quality looks better on prompts that were used before")
    what: dict[str, dict[str, Any]] = {
        "model": described.model_of(loaded, model),
        "settings": {
            "search": search,
            "candidates": digest(list(candidates.items())),
            "data": source,
            "prompts": digest(held_out),
            "count": len(held_out),
            "prompt_tokens": prompt_tokens,
            "answer_tokens": answer_tokens,
            **described.environment_of(loaded),
        },
    }
    checkpoint = None if output_file is None else Checkpoint(output_file, *PARTIAL, what, Progress.from_dict)
    done = (checkpoint and checkpoint.load()) or Progress()
    if done.steps:
        note(f"going on after {len(done.points)} of {len(candidates)} candidates")
    with progress("planning", len(held_out) + len(candidates) - done.steps) as step:

        def on_step(state: Progress) -> None:
            if checkpoint is not None:
                checkpoint.save(state.to_dict())
            step()

        points = measure(
            loaded.model,
            held_out,
            candidates,
            answer_tokens=answer_tokens,
            speed_tokens=prompt_tokens,
            done=done,
            on_step=on_step,
        )
    dense = prompt_flops(decoder, prompt_tokens)
    settings = {**what["settings"], "command": command_line(), "system": system_info()}
    result = Plan(what["model"], settings, Bound(max_kl, min_agreement), dense, points)
    if output_file is not None:
        result.save(output_file)
    if checkpoint is not None:
        checkpoint.remove()
    if as_json:
        typer.echo(json.dumps(result.to_dict(), indent=2))
        return
    _show(result)
    if output_file is not None:
        note(f"written: {output_file}")


def _show(result: Plan) -> None:
    settings, best = result.settings, result.best
    measured = f"prompts: {settings['count']} of {settings['data']}; answers of {settings['answer_tokens']} tokens"
    output.print(
        f"{result.model['name']}: {result.model['architecture']}, {result.model['dtype']}\n"
        f"{len(result.points)} candidates measured; {measured}",
        markup=False,
        soft_wrap=True,
    )
    table = Table(title=f"frontier, prompts of {settings['prompt_tokens']} tokens", title_justify="left")
    for name in ("", "ratio", "layers", "rule", "ideal speed-up", "KL", "agreement"):
        table.add_column(name, justify="left" if name in ("layers", "rule") else "right")
    for point in result.frontier:
        table.add_row(
            "*" if point == best else "",
            f"{result.ratio(point):.3g}",
            options.shown(point.layers),
            ", ".join(point.rules) or "-",
            show.factor(result.speedup(point)),
            _with_error(point.kl, point.kl_error, ".3g", ".2g"),
            _with_error(point.agreement, point.agreement_error, ".1%", ".1%"),
        )
    output.print(table)
    output.print(_verdict(result, best), markup=False, soft_wrap=True)


def _verdict(result: Plan, best: Point) -> str:
    bounds = []
    if result.bound.max_kl is not None:
        bounds.append(f"KL {result.bound.max_kl:g}")
    if result.bound.min_agreement is not None:
        bounds.append(f"agreement {result.bound.min_agreement:.1%}")
    bound = " and ".join(bounds)
    if not best.layers:
        return f"No candidate is within the bound ({bound}): the setting skips nothing."
    return (
        f"Best within the bound ({bound}), marked *: skip layers {options.shown(best.layers)}, ideal speed-up "
        f"{show.factor(result.speedup(best))}."
    )


def _with_error(value: float, error: float | None, form: str, error_form: str) -> str:
    return f"{value:{form}}" if error is None else f"{value:{form}} ± {error:{error_form}}"
