"""GGUF files: a check of the file that costs milliseconds, and how transformers is told to read it.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import importlib.util
import math
import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from stageprune.errors import ModelLoadError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_INTEGERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 7: "<?", 10: "<Q", 11: "<q"}
_FLOATS = {6: "<f", 12: "<d"}
_STRING, _ARRAY = 8, 9
_PLAIN_DTYPES = {0: torch.float32, 1: torch.float16}  # by `general.file_type`; the others are quantized, or bfloat16


class Header(NamedTuple):
    """What we need to know of a GGUF file before the model is built."""

    architecture: str
    dtype: torch.dtype
    """The file's own type where its weights are not quantized, else bfloat16, which is finer than any of those."""


def read_header(path: Path) -> Header:
    """Reads the header of a GGUF file and checks that all tensors it lists lie inside the file.

    Raises:
        ModelLoadError: if the packages to read GGUF files are missing, or the file is not a GGUF file,
            is damaged or cut short, or is one part of several.
    """
    try:
        with path.open("rb") as file:
            magic = file.read(4)
            if magic != _MAGIC:
                raise ModelLoadError(
                    f"{path} is not a GGUF file, which begins with {_MAGIC!r}: it begins with {magic!r}. "
                    "Of a model in another format, give the folder with its config.json."
                )
            _require_packages(path)
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(data, path).header()
    except OSError as error:
        raise ModelLoadError(f"cannot read {path}: {error}") from error
    except (struct.error, UnicodeDecodeError) as error:
        raise ModelLoadError(
            f"{path} is damaged: its header ends early or makes no sense ({error}). Download the file again."
        ) from error


def loading_arguments(path: Path) -> dict[str, Any]:
    """The arguments, besides the folder, with which `from_pretrained` reads this file into dense weights."""
    arguments: dict[str, Any] = {"gguf_file": path.name}
    # Transformers before 5.17 know no GgufConfig and always dequantize; later ones keep the weights packed, in
    # modules of their own, unless told otherwise.
    if hasattr(transformers, "GgufConfig"):
        arguments["quantization_config"] = transformers.GgufConfig(dequantize=True)
    return arguments


def complete_tokenizer(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> None:
    """Gives a tokenizer read from a GGUF file the special tokens and the length limit that the file states.

    Transformers 5.16 reads the ids into the model's config only: its tokenizer of the demo model would take the
    start of a turn for the end of a text, and would remove spaces before punctuation.
    """
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.init_kwargs["clean_up_tokenization_spaces"] = False  # this one is saved
    for kind in ("bos", "eos", "pad", "unk"):
        token_id = getattr(config, f"{kind}_token_id", None)
        if isinstance(token_id, int):
            setattr(tokenizer, f"{kind}_token", tokenizer.convert_ids_to_tokens(token_id))
        tokenizer.init_kwargs.pop(f"{kind}_token_id", None)  # stale, and would be saved
    limit = getattr(config, "max_position_embeddings", None)
    if isinstance(limit, int):
        tokenizer.model_max_length = min(tokenizer.model_max_length, limit)


def _require_packages(path: Path) -> None:
    missing = [package for package in ("gguf", "accelerate") if importlib.util.find_spec(package) is None]
    if missing:
        raise ModelLoadError(
            f"reading {path.name} needs the package(s) {' and '.join(missing)}; run: pip install {' '.join(missing)}"
        )


class _Reader:
    """A cursor over the header. Reading past the end raises `struct.error`."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        import gguf  # optional: `_require_packages` has found it

        self.data = data
        self.path = path
        self.position = len(_MAGIC)
        self.block_sizes = {int(kind): sizes for kind, sizes in gguf.GGML_QUANT_SIZES.items()}

    def header(self) -> Header:
        version = self.number("<I")
        if version not in _VERSIONS:
            raise ModelLoadError(f"{self.path} has GGUF version {version}; versions 2 and 3 can be read")
        tensors, values = self.number("<Q"), self.number("<Q")
        metadata = {self.string(): self.value() for _ in range(values)}
        if (parts := metadata.get("split.count", 1)) not in (0, 1):
            raise ModelLoadError(
                f"{self.path} is one of {parts} parts of a model, and only whole files can be loaded; "
                "merge the parts with `llama-gguf-split --merge` first"
            )
        architecture = metadata.get("general.architecture")
        if not isinstance(architecture, str):
            raise ModelLoadError(f"{self.path} does not say which architecture it holds (general.architecture)")
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ModelLoadError(f"{self.path} is damaged: general.alignment is {alignment!r}, not a positive number")
        data_bytes = max((self.tensor_end() for _ in range(tensors)), default=0)
        expected = -(-self.position // alignment) * alignment + data_bytes
        if expected > len(self.data):
            raise ModelLoadError(
                f"{self.path} is cut short: its tensors need {expected:,} bytes and it has {len(self.data):,}. "
                "Download the file again."
            )
        file_type = metadata.get("general.file_type")
        dtype = _PLAIN_DTYPES.get(file_type, torch.bfloat16) if isinstance(file_type, int) else torch.bfloat16
        return Header(architecture, dtype)

    def take(self, count: int) -> int:
        """The position of the next `count` bytes, which are passed."""
        start = self.position
        if start + count > len(self.data):
            raise struct.error(f"{count} bytes at byte {start} of {len(self.data)}")
        self.position += count
        return start

    def number(self, layout: str) -> int:
        (result,) = struct.unpack_from(layout, self.data, self.take(struct.calcsize(layout)))
        return int(result)

    def string(self) -> str:
        length = self.number("<Q")
        start = self.take(length)
        return self.data[start : start + length].decode()

    def value(self) -> str | int | None:
        """One metadata value, behind its type; floats and arrays are not needed and only passed."""
        kind = self.number("<I")
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            self.take_array()
        elif kind in _FLOATS:
            self.take(struct.calcsize(_FLOATS[kind]))
        elif kind in _INTEGERS:
            return self.number(_INTEGERS[kind])
        else:
            raise struct.error(f"unknown value type {kind} before byte {self.position}")
        return None

    def take_array(self) -> None:
        kind, length = self.number("<I"), self.number("<Q")
        if kind == _STRING:
            for _ in range(length):
                self.take(self.number("<Q"))
        elif kind in _FLOATS or kind in _INTEGERS:
            self.take(length * struct.calcsize((_FLOATS | _INTEGERS)[kind]))
        else:
            raise struct.error(f"array of unknown type {kind} before byte {self.position}")

    def tensor_end(self) -> int:
        """Where the tensor described here ends, in bytes from the start of the data."""
        name = self.string()
        shape = [self.number("<Q") for _ in range(self.number("<I"))]
        kind, offset = self.number("<I"), self.number("<Q")
        if kind not in self.block_sizes:
            raise ModelLoadError(
                f"{self.path}: tensor {name!r} has type {kind}, which the installed gguf package does not know; "
                "run: pip install -U gguf"
            )
        block, block_bytes = self.block_sizes[kind]
        return int(offset + math.prod(shape) // block * block_bytes)
