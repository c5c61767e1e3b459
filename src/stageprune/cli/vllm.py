"""What the commands do with vLLM: start its server, and check it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from rich.markup import escape

from stageprune.cli.common import console, note, one_line, quiet, shown_name
from stageprune.methods import Method


def start(
    model: str,
    served_name: str | None,
    methods: Sequence[Method],
    options: dict[str, Any],
    others: Sequence[str],
    api_key: str | None,
    check: bool,
    **own: Any,
) -> NoReturn:
    """Become vLLM's server; nothing of this process is left.

    Args:
        model: of `--model`.
        served_name: the name for clients; None: the model's.
        methods: how to prune; none: do not.
        options: of vLLM, see `vllm_command`.
        others: further ones.
        api_key: that clients must send; None: any.
        check: whether the engine is compared with the library before.
        own: `prefix_cache` and `role`.

    Raises:
        EngineError: if vLLM is missing, of another version, or gives wrong answers.
        ServingError: if it cannot prune this model, or the address is taken.
        SettingError: if it cannot follow the settings.
        ModelLoadError: if the model is missing.
    """
    quiet()
    from stageprune.cli.configs import read_config
    from stageprune.models import folder_of
    from stageprune.serving.address import bind
    from stageprune.serving.vllm import compat
    from stageprune.serving.vllm.command import family_of, requested, vllm_command
    from stageprune.serving.vllm.settings import engine_settings

    installed = compat.version()
    if methods:
        compat.check_version(installed)
    override = requested(methods, **own)
    folder = folder_of(model)
    config = read_config(folder)
    layers = config.get_text_config().num_hidden_layers
    settings = engine_settings(override, layers)
    command = vllm_command(folder, served_name or shown_name(model), override, options, others)
    bind(options["host"], options["port"]).close()  # vLLM finds out later, and in many lines
    if settings is not None:
        family = family_of(config)
        if check:
            checked(family)
        note(f"prompts skip {len(settings.layers)} of {layers} layers")
    elif methods:
        note(f"these settings skip none of {layers} layers: nothing is pruned")
    environment = os.environ | ({} if api_key is None else {"VLLM_API_KEY": api_key})
    if settings is not None:
        environment["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], command, environment)


def checked(*families: str, again: bool = False) -> Any:
    """Check families with a spinner; all results.

    Raises:
        EngineError: if vLLM is missing, of another version, or (unless `again`) fails.
    """
    from stageprune.serving.vllm.check import check_engine, require

    with console.status("checking vLLM") as spinner:

        def say(line: str) -> None:
            spinner.update(escape(one_line(line)))
            if not console.is_terminal:
                note(line)

        results = check_engine(families, say, again)
    if not again:
        require(results)
    return results
