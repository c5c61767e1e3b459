"""The options that several commands have, each defined once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from stageprune.cli import parse
from stageprune.cli.common import UsageProblem
from stageprune.methods import PrefillOnlyPruning

MODEL_HELP = "A hub id, a folder, a .gguf file, or demo: the built-in SmolLM2-135M-Instruct."

Model = Annotated[str, typer.Option("--model", "-m", help=MODEL_HELP)]
Prompt = Annotated[
    str | None, typer.Argument(help="The prompt; - reads it from the standard input.", show_default=False)
]
PromptFile = Annotated[
    Path | None, typer.Option("--file", "-f", help="Read the prompt from this text file.", show_default=False)
]
Chat = Annotated[
    bool | None,
    typer.Option(
        "--chat/--no-chat",
        help="Put the prompt into the model's chat template, or not. Default: if the model has one.",
        show_default=False,
    ),
]
MaxNewTokens = Annotated[
    Any, typer.Option("--max-new-tokens", "-n", parser=parse.count, metavar="N", help="Length of an answer at most.")
]
Ratio = Annotated[
    float | None,
    typer.Option(
        "--ratio",
        "-r",
        parser=parse.ratio,
        metavar="R",
        help="Share of the layers to skip. Default: 1/3.",
        show_default=False,
    ),
]
Layers = Annotated[
    Any,
    typer.Option(
        "--layers",
        parser=parse.layers,
        metavar="L",
        show_default=False,
        help="Which layers: last (the default), first, interleaved, or indices such as 20-29 or 3,5,20-29.",
    ),
]
Projections = Annotated[
    Path | None,
    typer.Option(
        "--projections",
        metavar="FOLDER",
        show_default=False,
        help="Skip the layers that `stageprune calibrate` fitted K/V projections for, and use these.",
    ),
]
Dtype = Annotated[
    str,
    typer.Option("--dtype", parser=parse.dtype, metavar="TYPE", help="Of the weights: auto, bf16, fp16, fp32, fp64."),
]
Device = Annotated[
    str | None,
    typer.Option("--device", help="cpu, cuda, cuda:1, ..., or auto to spread the model.", show_default="cpu"),
]
Threads = Annotated[
    Any, typer.Option("--threads", parser=parse.threads, metavar="N", help="Threads of the CPU.", show_default=False)
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else, on the output.")]


def method_of(
    ratio: float | None, layers: parse.LayerChoice | None, projections: Path | None = None
) -> PrefillOnlyPruning:
    """The settings that `--ratio`, `--layers` and `--projections` say.

    Raises:
        UsageProblem: if two of them say which layers are skipped.
        ResultFileError: if the projections cannot be read.
    """
    if projections is not None:
        if ratio is not None or layers is not None:
            raise UsageProblem(
                f"--projections {str(projections)!r} says which layers are skipped: --ratio and --layers cannot apply"
            )
        from stageprune.prefill.projections import KVProjections

        return PrefillOnlyPruning(layers=KVProjections.load(projections).layers, projections=str(projections))
    if isinstance(layers, tuple) and ratio is not None:
        raise UsageProblem(f"--layers {shown(layers)} says which layers are skipped, so --ratio {ratio:g} cannot apply")
    return PrefillOnlyPruning(1 / 3 if ratio is None else ratio, "last" if layers is None else layers)


def shown(indices: tuple[int, ...]) -> str:
    """Layer indices with runs as ranges, such as `3, 20-29`."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and runs[-1][-1] == index - 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs) or "none"
