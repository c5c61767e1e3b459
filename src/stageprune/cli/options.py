"""The options that several commands have, each defined once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from torch import nn

from stageprune.cli import parse
from stageprune.cli.common import UsageProblem
from stageprune.methods import PrefillOnlyPruning
from stageprune.prefill.importance import Importance as ImportanceScores

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
        help="Which layers: last (the default), first, interleaved, importance, or indices such as 20-29 or 3,5,20-29.",
    ),
]
LayersByRule = Annotated[
    Literal["last", "first", "interleaved", "importance"] | None,
    typer.Option("--layers", help="Which layers. Default: last.", show_default=False),
]
Importance = Annotated[
    Path | None,
    typer.Option(
        "--importance",
        metavar="FILE",
        show_default=False,
        help="For --layers importance: the scores, which stageprune analyze wrote.",
    ),
]
Contiguous = Annotated[
    bool | None,
    typer.Option(
        "--contiguous/--free",
        show_default=False,
        help="For --layers importance: neighbouring layers (the default), or the least important ones anywhere.",
    ),
]
Settings = Annotated[
    Path | None,
    typer.Option(
        "--settings",
        metavar="FILE",
        show_default=False,
        help="Prune as this file says, such as a stageprune.json that stageprune plan wrote.",
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


@dataclass(frozen=True)
class LayerOptions:
    """What the options about layers say; None for what was not given.

    Attributes:
        layers: `--layers`.
        importance: `--importance`.
        contiguous: `--contiguous` or `--free`.
        projections: `--projections`.
    """

    layers: parse.LayerChoice | None = None
    importance: Path | None = None
    contiguous: bool | None = None
    projections: Path | None = None

    @property
    def given(self) -> bool:
        """Whether there was any."""
        return self != LayerOptions()

    def method(self, ratio: float | None) -> PrefillOnlyPruning:
        """The settings that these options and `--ratio` say.

        Raises:
            UsageProblem: if options contradict each other.
            ResultFileError: if the file of importance scores, or the folder of projections, cannot be read.
        """
        if self.projections is not None:
            return self._fitted(self.projections, ratio)
        share = 1 / 3 if ratio is None else ratio
        if self.layers == "importance":
            if self.importance is None:
                raise UsageProblem("--layers importance needs --importance FILE, which stageprune analyze writes")
            contiguous = self.contiguous is not False
            return PrefillOnlyPruning(share, "importance", importance=self.importance, contiguous=contiguous)
        if self.importance is not None or self.contiguous is not None:
            option = "--contiguous and --free are" if self.importance is None else "--importance is"
            raise UsageProblem(f"{option} for --layers importance only")
        if isinstance(self.layers, tuple) and ratio is not None:
            raise UsageProblem(
                f"--layers {shown(self.layers)} says which layers are skipped, so --ratio {ratio:g} cannot apply"
            )
        return PrefillOnlyPruning(share, "last" if self.layers is None else self.layers)

    def _fitted(self, projections: Path, ratio: float | None) -> PrefillOnlyPruning:
        if ratio is not None or self != LayerOptions(projections=projections):
            raise UsageProblem(
                f"--projections {str(projections)!r} says which layers are skipped: --ratio and --layers cannot apply"
            )
        from stageprune.prefill.projections import fitted_setting

        return fitted_setting(projections)

    def check(self, model: nn.Module) -> None:
        """Refuse importance scores of another model.

        Raises:
            ResultFileError: names the file and what differs.
        """
        if self.importance is not None:
            from stageprune.evaluate.fingerprint import check_identity

            check_identity(ImportanceScores.load(self.importance).model, model, self.importance)


def shown(indices: tuple[int, ...]) -> str:
    """Layer indices with runs as ranges, such as `3, 20-29`."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and runs[-1][-1] == index - 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs) or "none"
