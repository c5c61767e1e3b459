"""The commands put together, and what becomes of their errors.

Exit codes: 0 done; 1 failed, with one line on the error stream that says why; 2 the command line is wrong; 130
interrupted by the user.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import Annotated, Any

import typer

from stageprune.cli import (
    analyze,
    bench,
    bench_compare,
    calibrate,
    compare,
    doctor,
    evaluate,
    generate,
    lm_eval,
    plan,
    report,
    serve,
)
from stageprune.cli.command_line import running
from stageprune.cli.common import UsageProblem, console, one_line
from stageprune.errors import StagePruneError

# Typer's base of all errors in the command line; it has no public name that old and new versions share.
_UsageError: Any = next(parent for parent in typer.BadParameter.__mro__ if parent.__name__ == "ClickException")

app = typer.Typer(
    name="stageprune",
    help="Prune each stage of a language model's inference in the way that stage tolerates.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (
    generate.generate,
    analyze.analyze,
    plan.plan,
    calibrate.calibrate,
    compare.compare,
    bench.bench,
    report.report,
    doctor.doctor,
):
    app.command()(command)
app.command(context_settings={"allow_extra_args": True})(serve.serve)
app.command("eval")(evaluate.evaluate)
app.command("bench-compare")(bench_compare.bench_compare)
app.command(
    "lm-eval",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)(lm_eval.lm_eval)


def _version(value: bool) -> None:
    if value:
        from stageprune import __version__

        typer.echo(f"stageprune {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        with redirect_stdout(sys.stderr):  # get_help() prints by itself when Rich lays it out
            typer.echo(context.get_help())
        raise typer.Exit(2)


def main(arguments: Sequence[str] | None = None) -> None:
    """The console entry point: run a command line (default: the process's) and exit with its code."""
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code."""
    try:
        with running(arguments):
            given = None if arguments is None else list(arguments)
            result = app(args=given, prog_name="stageprune", standalone_mode=False)
        sys.stdout.flush()
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except UsageProblem as error:
        return _fail(error, 2)
    except _UsageError as error:
        command = getattr(getattr(error, "ctx", None), "command_path", "stageprune")
        return _fail(f"{one_line(error.format_message()).rstrip('.')} (see {command} --help)", 2)
    except StagePruneError as error:
        return _fail(error, 1)
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        return _fail(f"out of memory: {one_line(error)[:200] or 'the system has no more'}", 1)
    except BrokenPipeError:
        # The reader of our output has gone. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return result if isinstance(result, int) else 0


def _is_out_of_memory(error: BaseException) -> bool:
    """Torch's allocator of the CPU has no exception class of its own."""
    import torch

    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "DefaultCPUAllocator" in str(error)


def _fail(error: object, code: int) -> int:
    console.print(f"error: {one_line(error)}", style="red", markup=False, highlight=False, soft_wrap=True)
    return code
