"""What can be checked of a checkpoint folder in milliseconds, before anything is built from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import transformers
from safetensors import SafetensorError, safe_open
from transformers import CONFIG_MAPPING

from stageprune.errors import ModelLoadError

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def check_folder(folder: Path) -> None:
    """Checks that a folder looks like a checkpoint that transformers can load; reads headers only.

    Raises:
        ModelLoadError: if `config.json` or the weights are missing or damaged, or the architecture is unknown.
    """
    if not (folder / "config.json").is_file():
        raise ModelLoadError(f"{folder} is no model: it has no config.json{_what_it_is(folder)}")
    config = read_json(folder / "config.json")
    model_type = config.get("model_type")
    if model_type is None:
        raise ModelLoadError(f"{folder / 'config.json'} has no model_type, so it is not a transformers model's")
    known = isinstance(model_type, str) and model_type in CONFIG_MAPPING
    if not known and "auto_map" not in config:  # with an auto_map, the model brings its code
        raise ModelLoadError(
            f"{folder / 'config.json'} has model_type {model_type!r}, an architecture that transformers "
            f"{transformers.__version__} does not know: update transformers, or use a checkpoint of a known one"
        )
    for name in ("generation_config.json", "tokenizer_config.json"):
        if (folder / name).exists():  # a damaged one would be silently ignored, or fail after the weights are read
            read_json(folder / name)
    _check_weights(folder)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        ModelLoadError: if the file cannot be read or holds anything else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} is damaged: {error}. Restore it from where the model came from.") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path} is damaged: it holds a {type(content).__name__} instead of a JSON object")
    return content


def _what_it_is(folder: Path) -> str:
    if (folder / "kv_projections.safetensors").exists():
        return "; it holds fitted K/V projections, which are given beside their model (--projections)"
    if (folder / "adapter_config.json").exists():
        return "; it is a PEFT adapter: merge it into its base model first"
    if ggufs := sorted(folder.glob("*.gguf")):
        return f"; to load a GGUF file give its path: {ggufs[0]}"
    return "; give the folder that save_pretrained() wrote"


def _check_weights(folder: Path) -> None:
    if (folder / _WEIGHTS).exists():
        names = [_WEIGHTS]
    elif (folder / _INDEX).exists():
        weight_map = read_json(folder / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ModelLoadError(f"{folder / _INDEX} is damaged: it has no weight_map")
        names = sorted({str(name) for name in weight_map.values()})
    else:
        if not any(next(folder.glob(pattern), None) for pattern in ("*.safetensors", "*.bin")):
            raise ModelLoadError(f"{folder} has no weights: {_WEIGHTS}, or {_INDEX} and its parts, are missing")
        return  # other names and older formats: transformers knows them
    for name in names:
        try:
            with safe_open(folder / name, framework="pt"):
                pass
        except (OSError, SafetensorError) as error:
            raise ModelLoadError(
                f"{folder / name} is missing, cut short or damaged: {error}. Restore it from where the model came from."
            ) from error
