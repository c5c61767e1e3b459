"""What all commands share: the console, usage errors, loading with a spinner."""

from __future__ import annotations

import functools
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from stageprune.files import check_writable

if TYPE_CHECKING:
    from stageprune.models import LoadedModel

console = Console(stderr=True)
"""For everything that is not the result: progress, notes, errors."""

_FILE_WIDTH = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 160

output = Console(highlight=False, width=_FILE_WIDTH)
"""For the result. In a file or a pipe nothing says how wide tables may be, and 80 columns would cut them."""


class UsageProblem(Exception):
    """Options that are each right, but wrong together; exit code 2."""


def one_line(value: object) -> str:
    """A message on one line, without the control characters that a user's input may have brought into it."""
    text = " ".join(str(value).split())
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)


def quiet() -> None:
    """Keep the libraries' progress bars and advice off the terminal; errors reach the user as exceptions."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.filterwarnings("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    # The GGUF reader's own bar is the one that this does not reach; it would be drawn into our spinner.
    from transformers import modeling_gguf_pytorch_utils as gguf_reader

    if hasattr(gguf_reader, "tqdm"):
        gguf_reader.tqdm = functools.partial(gguf_reader.tqdm, disable=True)


def check_outputs(
    files: Mapping[str, Path | None], inputs: Mapping[str, Path | str | None] | None = None
) -> list[Path]:
    """The result files that the user named, by option; found out beforehand whether they can be written.

    Args:
        files: to be written.
        inputs: that are read, and must not be overwritten.

    Raises:
        OutputFileError: if one cannot be written.
        UsageProblem: if two options name the same file.
    """
    given = {option: path for option, path in files.items() if path is not None}
    for path in given.values():
        check_writable(path)
    for (first, path), (second, other) in combinations(given.items(), 2):
        if path.absolute() == other.absolute():
            raise UsageProblem(f"{first} and {second} name the same file {str(other)!r}")
    for option, source in (inputs or {}).items():
        for result, path in given.items():
            if source is not None and os.path.realpath(os.path.expanduser(source)) == os.path.realpath(path):
                raise UsageProblem(f"{result} would overwrite the file of {option}, {str(source)!r}")
    return list(given.values())


def set_threads(threads: int | None) -> None:
    """How many threads the CPU computes with; None leaves torch's choice."""
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def load_model(name: str, dtype: str, device: str | None) -> LoadedModel:
    """`stageprune.models.load` with a spinner that says what takes long; without a terminal, a line each.

    Raises:
        ModelLoadError: if the model cannot be loaded.
    """

    def say(line: str) -> None:
        if console.is_terminal:
            spinner.update(escape(one_line(line)))
        else:
            console.print(one_line(line), style="dim", markup=False, highlight=False, soft_wrap=True)

    with console.status(escape(f"loading {one_line(name)}")) as spinner:
        quiet()
        from stageprune.models import load

        return load(name, dtype=dtype, device=device, status=say)


def note(text: str) -> None:
    """A line beside the result."""
    console.print(one_line(text), style="dim", markup=False, highlight=False, soft_wrap=True)


def shown_name(model: str) -> str:
    """A model as results name it: without the folders that it lies in, which are the user's own business."""
    path = Path(os.path.expanduser(model))
    return path.resolve().name if path.exists() else model


@contextmanager
def progress(description: str, total: int) -> Iterator[Any]:
    """A progress bar on the error stream; yields a function that advances it by one step."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task(description, total=total)
        yield lambda: bar.advance(task)
