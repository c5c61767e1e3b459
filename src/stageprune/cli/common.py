"""What all commands share: the console, usage errors, loading with a spinner."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from stageprune.errors import ModelLoadError

if TYPE_CHECKING:
    from stageprune.models import LoadedModel

console = Console(stderr=True)
"""For everything that is not the result: progress, notes, errors."""

output = Console(highlight=False)
"""For the result."""


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


def set_threads(threads: int | None) -> None:
    """How many threads the CPU computes with; None leaves torch's choice."""
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def load_model(name: str, dtype: str, device: str | None) -> LoadedModel:
    """`stageprune.models.load` with a spinner.

    Raises:
        ModelLoadError: as `load`, and if the weights do not fit into memory.
    """
    with console.status(f"loading {one_line(name)}"):
        quiet()
        from stageprune.models import load

        try:
            return load(name, dtype=dtype, device=device, status=lambda line: console.log(line, markup=False))
        except MemoryError as error:
            raise ModelLoadError(f"not enough memory to load {name!r}") from error


@contextmanager
def progress(description: str, total: int) -> Iterator[Any]:
    """A progress bar on the error stream; yields a function that advances it by one step."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task(description, total=total)
        yield lambda: bar.advance(task)
