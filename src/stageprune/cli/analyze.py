"""`stageprune analyze`: the importance of each layer in each stage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from stageprune.cli import described, options, parse
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
from stageprune.methods import PrefillOnlyPruning

if TYPE_CHECKING:
    from stageprune.prefill.importance import Estimate, Importance

PARTIAL = ("stageprune-importance-partial", 1)
"""Kind and version of the file that an interrupted run goes on from."""

MOST_SIGMAS, ENOUGH = 5.0, 30
"""A mean gradient of so many samples that is so many standard errors from 0 is no chance: the responses are not the
model's own."""


def analyze(
    model: Annotated[str, typer.Argument(help=options.MODEL_HELP)] = "demo",
    samples: Annotated[
        Any, typer.Option("--samples", parser=parse.count, metavar="N", help="Calibration prompts.")
    ] = "200",
    seed: Annotated[
        Any, typer.Option("--seed", parser=parse.seed, metavar="N", help="Of the prompts drawn and the responses.")
    ] = "0",
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            help="Prompts: a .jsonl, .parquet or .txt file, or a data set of the hub. Default: built-in text.",
            show_default=False,
        ),
    ] = None,
    prompt_tokens: Annotated[
        Any, typer.Option("--prompt-tokens", parser=parse.count, metavar="N", help="Length of a prompt at most.")
    ] = "256",
    response_tokens: Annotated[
        Any, typer.Option("--response-tokens", parser=parse.count, metavar="N", help="Length of a response at most.")
    ] = "64",
    batch: Annotated[Any, typer.Option("--batch", parser=parse.count, metavar="B", help="Samples at a time.")] = "4",
    output_file: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Write the result as JSON. An interrupted run goes on from FILE.partial.",
            metavar="FILE",
            show_default=False,
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", help="Draw the paper's Figures 1 and 2.", metavar="FILE.png|svg", show_default=False),
    ] = None,
    dtype: options.Dtype = "auto",
    device: options.Device = None,
    threads: options.Threads = None,
    as_json: options.Json = False,
) -> None:
    """Score how much each layer matters, in prefill and in decode.

    The squared gradient of a layer's virtual gate, over responses that the model itself samples: about twice the loss
    that removing the layer from one stage alone would cost, in squared nats.
    """
    _check_files(output_file, plot, data)
    set_threads(threads)
    loaded = load_model(model, dtype, device)

    from stageprune.evaluate.analysis import analyze as run
    from stageprune.evaluate.checkpoint import Checkpoint
    from stageprune.evaluate.samples import load_prompts
    from stageprune.evaluate.system import system_info
    from stageprune.families.decoder import find_decoder
    from stageprune.prefill.importance import Importance, SampleScore
    from stageprune.prefill.layers import skipped_layers
    from stageprune.records import digest

    decoder = find_decoder(loaded.model)
    _check_fits(decoder.config, prompt_tokens, response_tokens)
    prompts = load_prompts(loaded.tokenizer, data, samples, prompt_tokens, seed)
    count = len(prompts.tokens)
    if count < samples:
        note(f"{prompts.source} has {count} usable prompts, fewer than --samples {samples}")
    what: dict[str, dict[str, Any]] = {
        "model": described.model_of(loaded, model),
        "settings": {
            "data": prompts.source,
            "prompts": digest(prompts.tokens),
            "samples": count,
            "seed": seed,
            "prompt_tokens": prompt_tokens,
            "response_tokens": response_tokens,
            "batch": batch,
            "skipped_layers": list(skipped_layers(PrefillOnlyPruning(), len(decoder.layers))),
            **described.environment_of(loaded),
        },
    }

    def read(state: dict[str, Any]) -> tuple[SampleScore, ...]:
        return tuple(map(SampleScore.from_dict, state["samples"]))

    checkpoint = None if output_file is None else Checkpoint(output_file, *PARTIAL, what, read)
    done = (checkpoint and checkpoint.load()) or ()
    if done:
        note(f"going on after {len(done)} of {count} samples")
    with progress("analyzing", count - len(done)) as step:
        shown = len(done)

        def on_batch(scores: tuple[Any, ...]) -> None:
            nonlocal shown
            if checkpoint is not None:
                checkpoint.save({"samples": [score.to_dict() for score in scores]})
            for _ in range(len(scores) - shown):
                step()
            shown = len(scores)

        scores = run(
            loaded.model,
            prompts.tokens,
            response_tokens=response_tokens,
            seed=seed,
            batch=batch,
            skipped=tuple(what["settings"]["skipped_layers"]),
            done=done,
            on_batch=on_batch,
        )
    settings = {**what["settings"], "command": command_line(), "system": system_info()}
    result = Importance(what["model"], settings, scores)
    if output_file is not None:
        result.save(output_file)
    if plot is not None:
        from stageprune.evaluate.importance_plot import plot_importance

        plot_importance(result, plot)
    if checkpoint is not None:
        checkpoint.remove()
    if as_json:
        typer.echo(json.dumps(result.to_dict(), indent=2))
    else:
        _show(result)


def _check_files(output_file: Path | None, plot: Path | None, data: str | None) -> None:
    check_outputs({"--output": output_file, "--plot": plot}, {"--data": data})
    if plot is None:
        return
    from stageprune.evaluate.figure import check_figure

    check_figure(plot)


def _check_fits(config: Any, prompt_tokens: int, response_tokens: int) -> None:
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and prompt_tokens + response_tokens > longest:
        raise UsageProblem(
            f"--prompt-tokens {prompt_tokens} and --response-tokens {response_tokens} are together more than the "
            f"model's context of {longest}"
        )


def _show(result: Importance) -> None:
    tokens = sum(sample.response_tokens for sample in result.samples)
    nats, count = sum(sample.loss for sample in result.samples) / tokens, len(result.samples)
    output.print(
        f"{result.model['name']}: {result.model['architecture']}, {result.model['dtype']}\n"
        f"{count} prompts from {result.settings['data']}; responses of {tokens / count:.1f} tokens on average, "
        f"{nats:.3g} nats each token",
        markup=False,
        soft_wrap=True,
    )
    output.print(_table(result))
    if count >= ENOUGH:
        off = result.largest_bias
        verdict = "as chance has it" if off < MOST_SIGMAS else "more than chance explains, do not trust these scores"
        output.print(
            f"Mean gradients, which should be 0 (Eq. 7), are at most {off:.1f} standard errors off: {verdict}.",
            soft_wrap=True,
        )


def _table(result: Importance) -> Table:
    table = Table("layer", title="importance (mean squared gradient ± standard error)", title_justify="left")
    for name in ("prefill", "decode", "decode / prefill"):
        table.add_column(name, justify="right")
    drifts = len(result.drift_layers)
    if drifts:
        for name in ("hidden", "keys", "values", "attention"):
            table.add_column(f"cos {name}", justify="right")
    rows = zip(result.scores("prefill"), result.scores("decode"), strict=True)
    for layer, (prefill, decode) in enumerate(rows):
        ratio = f"{decode.mean / prefill.mean:.3g}" if prefill.mean else "-"
        cells = [str(layer), _estimate(prefill), _estimate(decode), ratio]
        if drifts and layer in result.drift_layers:
            place = layer - result.drift_layers.start
            cells += [
                f"{result.drift(what)[place].mean:.3f}" for what in ("hidden_states", "keys", "values", "attention")
            ]
        table.add_row(*cells)
    return table


def _estimate(estimate: Estimate) -> str:
    if estimate.standard_error is None:
        return f"{estimate.mean:.3g}"
    return f"{estimate.mean:.3g} ± {estimate.standard_error:.2g}"
