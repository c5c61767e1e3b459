"""`stageprune lm-eval`: the command line of lm-evaluation-harness, where the model `stageprune` is known."""

from __future__ import annotations

import sys

import typer

from stageprune.errors import StagePruneError


def lm_eval(context: typer.Context) -> None:
    """Run lm-evaluation-harness with all arguments as they are: --model stageprune --model_args prefill_ratio=1/3 ...

    The harness does not look for models in other packages, so its own command does not know this one.
    """
    try:
        from lm_eval.__main__ import cli_evaluate
    except ImportError as error:
        raise StagePruneError("this needs lm-evaluation-harness; run: pip install 'stageprune[eval]'") from error
    from stageprune.evaluate import lm_eval_adapter  # noqa: F401 - registers the model

    before = sys.argv
    sys.argv = ["stageprune lm-eval", *context.args]
    try:
        cli_evaluate()
    except SystemExit as end:  # of its argument parser
        raise typer.Exit(end.code if isinstance(end.code, int) else int(end.code is not None)) from end
    finally:
        sys.argv = before
