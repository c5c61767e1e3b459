"""A model's configuration without its weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from stageprune.errors import ModelLoadError


def read_config(name: str) -> Any:
    """The configuration of a folder, a `config.json`, a `.gguf` file or a hub id.

    Raises:
        ModelLoadError: if there is none, or it is damaged.
    """
    from transformers import AutoConfig

    path = Path(os.path.expanduser(name))
    try:
        if path.suffix == ".gguf":
            return AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
        # Never a model's own code: without the argument transformers would ask on the terminal.
        return AutoConfig.from_pretrained(path if path.exists() else name, trust_remote_code=False)
    except Exception as error:  # transformers raises whatever its parsers and the hub client raise
        text = " ".join(str(error).split()) or type(error).__name__
        if "trust_remote_code" in text:
            text = (
                "it needs code that the model brings along, which is never run here; only transformers' own classes are"
            )
        raise ModelLoadError(f"cannot read the configuration of {name!r}: {text[:300]}") from error
