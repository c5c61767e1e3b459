"""`stageprune calibrate`: fit the keys and values of skipped layers to the full model's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.table import Table

from stageprune.cli import described, options, parse, show
from stageprune.cli.common import UsageProblem, load_model, note, output, progress, set_threads, shown_name

if TYPE_CHECKING:
    from stageprune.evaluate.calibration import FittedLayer


def calibrate(
    model: Annotated[str, typer.Argument(help=options.MODEL_HELP)] = "demo",
    output_folder: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Write the projections. An interrupted run goes on from FOLDER.partial.",
            metavar="FOLDER",
            show_default=False,
        ),
    ] = None,
    ratio: options.Ratio = None,
    layers: options.Layers = None,
    importance: options.Importance = None,
    contiguous: options.Contiguous = None,
    samples: Annotated[
        Any,
        typer.Option(
            "--samples", parser=parse.count, metavar="N", help="Prompts; a tenth of them is kept out of the fit."
        ),
    ] = "200",
    seed: Annotated[Any, typer.Option("--seed", parser=parse.seed, metavar="N", help="Of the prompts drawn.")] = "0",
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
    ] = "512",
    weights: Annotated[
        Literal["attention", "equal"],
        typer.Option("--weights", help="What a token counts in the fit: the attention that it gets, or all the same."),
    ] = "attention",
    ridge: Annotated[
        float,
        typer.Option(
            "--ridge", parser=parse.ridge, metavar="L", help="Pull towards the layer's own weights, per token."
        ),
    ] = 0.001,
    rank: Annotated[
        Any,
        typer.Option(
            "--rank",
            parser=parse.count,
            metavar="R",
            help="Store corrections of this rank: a smaller folder, a little less exact.",
            show_default=False,
        ),
    ] = None,
    checkpoint: Annotated[
        Any,
        typer.Option("--checkpoint", parser=parse.count, metavar="N", help="Prompts between two states of .partial."),
    ] = "20",
    dtype: options.Dtype = "auto",
    device: options.Device = None,
    threads: options.Threads = None,
    as_json: options.Json = False,
) -> None:
    """Fit K/V projections of the layers that the prompt skips, to be used with --projections.

    For each skipped layer, the linear layer that predicts the full model's keys and values best from the hidden state
    where skipping begins. Beyond the paper; the time to the first token stays the same.
    """
    if output_folder is None:
        raise UsageProblem("calibrate writes a folder; name it with --output")
    method = options.LayerOptions(layers, importance, contiguous).method(ratio)

    from stageprune.evaluate.sums_file import SumsFile, check_partial
    from stageprune.prefill.projections import KVProjections, check_folder, identity

    check_folder(output_folder)
    check_partial(output_folder)
    set_threads(threads)
    loaded = load_model(model, dtype, device)

    from stageprune.evaluate.calibration import Reading, check_rank, count_held_out, solve
    from stageprune.evaluate.fingerprint import fingerprint
    from stageprune.evaluate.samples import load_prompts
    from stageprune.families.decoder import find_decoder
    from stageprune.methods import PrefillOnlyPruning
    from stageprune.prefill.layers import skipped_layers
    from stageprune.pruning import prune
    from stageprune.records import digest

    decoder = find_decoder(loaded.model)
    _check_fits(decoder.config, prompt_tokens)
    skipped = skipped_layers(method, len(decoder.layers))
    reading = Reading(loaded.model, skipped, weights == "attention")
    check_rank(reading, rank)
    prompts = load_prompts(loaded.tokenizer, data, samples, prompt_tokens, seed, questions=True)
    count = len(prompts.tokens)
    if count < samples:
        note(f"{prompts.source} has {count} usable prompts, fewer than --samples {samples}")
    name = {"name": shown_name(model), "dtype": described.dtype_of(loaded)}
    settings: dict[str, Any] = {
        "data": prompts.source,
        "prompts": digest(prompts.tokens),
        "samples": count,
        "held_out": count_held_out(count),
        "tokens": sum(map(len, prompts.tokens)),
        "seed": seed,
        "prompt_tokens": prompt_tokens,
        "layers": list(skipped),
        "weights": weights,
        **described.environment_of(loaded),
    }
    partial = SumsFile(
        output_folder, {"model": {**name, "fingerprint": fingerprint(loaded.model)}, "settings": settings}
    )
    reading.samples = partial.load(reading.tensors())
    if reading.samples:
        note(f"going on after {reading.samples} of {count} samples")
    with progress("reading", count - reading.samples) as step:

        def on_sample(done: int) -> None:
            step()
            if done % checkpoint == 0 or done == count:
                partial.save(done, reading.tensors())

        reading.read(prompts.tokens, on_sample)
    with progress("fitting", len(skipped)) as step:
        fitted = []
        for layer in solve(reading, ridge, rank):
            fitted.append(layer)
            step()
    record = {
        "model": {**name, **identity(decoder, reading.own)},
        "settings": {**settings, "ridge": ridge, "rank": rank},
        "measured": [_measured(layer) for layer in fitted],
    }
    KVProjections({layer.layer: layer.correction for layer in fitted}, record).save(output_folder)
    partial.remove()
    # Also makes sure that what was written is what this model takes.
    with prune(loaded.model, PrefillOnlyPruning(layers=skipped, projections=str(output_folder))) as handle:
        extra = handle.report().extra_weight_bytes
    if as_json:
        typer.echo(json.dumps({"layers": list(skipped), **record, "extra_weight_bytes": extra}, indent=2))
        return
    output.print(
        f"{name['name']}: K/V projections of layers {options.shown(skipped)}, fitted on "
        f"{count - settings['held_out']} prompts from {prompts.source}, measured on {settings['held_out']} others",
        markup=False,
        soft_wrap=True,
    )
    output.print(_table(fitted, rank))
    output.print(f"Extra memory: {show.megabytes(extra)}. Written: {output_folder}", markup=False, soft_wrap=True)


def _check_fits(config: Any, prompt_tokens: int) -> None:
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and prompt_tokens > longest:
        raise UsageProblem(f"--prompt-tokens {prompt_tokens} is more than the model's context of {longest}")


def _measured(layer: FittedLayer) -> dict[str, Any]:
    return {"layer": layer.layer, "unexplained": [asdict(one) for one in layer.unexplained]}


def _table(fitted: Sequence[FittedLayer], rank: int | None) -> Table:
    table = Table(
        "layer",
        title="variance of keys and values that is not explained, on held-out text (on the text of the fit)",
        title_justify="left",
    )
    columns = {"own": "own weights", "full_rank": "fitted"} | ({} if rank is None else {"fitted": f"rank {rank}"})
    for part in ("keys", "values"):
        for title in columns.values():
            table.add_column(f"{part}, {title}", justify="right")
    for layer in fitted:
        cells = []
        for part in ("keys", "values"):
            new, seen = layer.share(part, "held_out"), layer.share(part, "fit")
            cells += [f"{getattr(new, name):.1%} ({getattr(seen, name):.1%})" for name in columns]
        table.add_row(str(layer.layer), *cells)
    return table
