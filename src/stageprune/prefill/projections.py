"""Fitted K/V projections as a folder: `kv_projections.safetensors` and `stageprune.json`.

The tensors are corrections to the base model's own weights; the JSON names the model that they belong to (a hash of its
configuration, and of the K/V weights that they correct) and how they were fitted. A folder is written as a whole, and
read as a whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from stageprune.errors import ResultFileError, UnsupportedModelError
from stageprune.families.calls import execution_device
from stageprune.families.decoder import Decoder
from stageprune.families.verify import VerifiedLayer
from stageprune.files import OutputFileError, check_writable
from stageprune.prefill.fitting import FittedProjection, first_of_runs, own_weights
from stageprune.records import read_record, write_record

KIND, VERSION = "stageprune-kv-projections", 1
TENSORS, RECORD = "kv_projections.safetensors", "stageprune.json"
_UNRELATED = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache")


@dataclass(frozen=True)
class Correction:
    """Of one layer's K/V weights: a matrix `[features, hidden_size]`, or its two factors, and a bias `[features]`."""

    matrix: tuple[torch.Tensor, ...]
    bias: torch.Tensor

    @property
    def whole(self) -> torch.Tensor:
        """The matrix, float64."""
        return (
            torch.linalg.multi_dot([part.double() for part in self.matrix])
            if len(self.matrix) > 1
            else (self.matrix[0].double())
        )

    def low_rank(self, rank: int, gram: torch.Tensor) -> Correction:
        """The closest correction of this rank, measured by what it changes on inputs with this second moment.

        Args:
            rank: of the matrix.
            gram: sum of n n^T, `[hidden_size, hidden_size]`.
        """
        values, vectors = torch.linalg.eigh(gram.double())
        root = vectors * values.clamp(min=0).sqrt()
        left, sizes, right = torch.linalg.svd(self.whole @ root, full_matrices=False)
        inverse = vectors / values.clamp(min=float(values.max()) * 1e-12).sqrt()
        factors = (left[:, :rank] * sizes[:rank]).float(), (right[:rank] @ inverse.T).float()
        return replace(self, matrix=factors)


@dataclass(frozen=True)
class KVProjections:
    """What `stageprune calibrate` makes.

    Attributes:
        corrections: by layer index.
        record: the content of `stageprune.json`: `model`, `data`, `options`, `measured`.
    """

    corrections: Mapping[int, Correction]
    record: Mapping[str, Any]

    @property
    def layers(self) -> tuple[int, ...]:
        """The skipped layers that they are for."""
        return tuple(sorted(self.corrections))

    def save(self, folder: Path) -> None:
        """Write the folder; an earlier one of this kind is replaced.

        Raises:
            OutputFileError: if it cannot be written, or something else has that name.
        """
        check_folder(folder)
        tensors: dict[str, torch.Tensor] = {}
        for index, one in self.corrections.items():
            tensors[f"layers.{index}.bias"] = one.bias.float().contiguous()
            for place, part in enumerate(one.matrix):
                tensors[f"layers.{index}.matrix.{place}"] = part.float().contiguous()
        content = save(tensors)
        fresh = Path(tempfile.mkdtemp(dir=folder.absolute().parent, prefix=f".{folder.name[:40]}."))
        try:
            fresh.chmod(0o777 & ~_umask())
            (fresh / TENSORS).write_bytes(content)
            record = {**self.record, "layers": list(self.layers), "sha256": hashlib.sha256(content).hexdigest()}
            write_record(fresh / RECORD, KIND, VERSION, record)
            if folder.exists():
                old = Path(tempfile.mkdtemp(dir=folder.absolute().parent, prefix=f".{folder.name[:40]}.old."))
                os.replace(folder, old)
                os.replace(fresh, folder)
                shutil.rmtree(old)
            else:
                os.replace(fresh, folder)
        except OSError as error:
            raise OutputFileError(f"cannot write {str(folder)!r}: {error.strerror}") from error
        finally:
            shutil.rmtree(fresh, ignore_errors=True)

    @classmethod
    def load(cls, folder: str | Path) -> KVProjections:
        """Read a folder.

        Raises:
            ResultFileError: if it is missing, damaged, incomplete, or of another kind or version.
        """
        folder = Path(folder).expanduser()
        record = read_record(folder / RECORD, KIND, VERSION)
        path = folder / TENSORS
        try:
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            if content != record["sha256"]:
                raise ResultFileError(f"{str(path)!r} is damaged: it is not the file that {RECORD} was written for")
            tensors = load_file(path)
            corrections = {}
            for index in record["layers"]:
                places = sorted(name for name in tensors if name.startswith(f"layers.{index}.matrix."))
                matrix = tuple(tensors[name] for name in places)
                corrections[int(index)] = Correction(matrix, tensors[f"layers.{index}.bias"])
        except OSError as error:
            raise ResultFileError(f"cannot read {str(path)!r}: {error.strerror}") from error
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise ResultFileError(f"{str(folder)!r} is no complete folder of K/V projections: {error!r}") from error
        return cls(corrections, record)

    def fitted(self, decoder: Decoder, verified: Mapping[int, VerifiedLayer]) -> dict[int, VerifiedLayer]:
        """These layers with fitted projections.

        Args:
            decoder: of the model.
            verified: the skipped layers, and possibly others, which stay as they are.

        Raises:
            UnsupportedModelError: if they were fitted for another model.
        """
        skipped = {index: verified[index] for index in self.layers if index in verified}
        if len(skipped) < len(self.layers):
            raise UnsupportedModelError(
                f"these K/V projections are for layers {list(self.layers)}, not all of which are skipped"
            )
        check_identity(self.record["model"], identity(decoder, skipped))
        fitted = dict(verified)
        for index, one in skipped.items():
            weight, bias, keys = own_weights(one)
            correction = self.corrections[index]
            if correction.whole.shape != weight.shape:
                raise UnsupportedModelError(
                    f"the fitted projection of layer {index} has the shape {tuple(correction.whole.shape)}, the model's "
                    f"{tuple(weight.shape)}"
                )
            like = next(one.layer.parameters())
            device = execution_device(one.layer) or like.device
            tensors = ((weight + correction.whole), (bias + correction.bias.double()))
            matrix, offset = (part.to(device, like.dtype) for part in tensors)
            fitted[index] = replace(one, project=FittedProjection(one.project, matrix, offset, keys))
        return fitted


def identity(decoder: Decoder, skipped: Mapping[int, VerifiedLayer]) -> dict[str, Any]:
    """Which model this is: hashes of its configuration and of the K/V weights of these layers.

    The weights are hashed as bfloat16 and as float16 sees them: the same checkpoint loaded in another type is the same
    model.
    """
    config = {key: value for key, value in decoder.config.to_dict().items() if key not in _UNRELATED}
    text = json.dumps(config, sort_keys=True, default=str)
    hashes = {name: hashlib.sha256() for name in ("bfloat16", "float16")}
    for index in sorted(skipped):
        weight = own_weights(skipped[index])[0]
        for name, one in hashes.items():
            rounded = weight.to(getattr(torch, name)).view(torch.int16)
            one.update(rounded.numpy().tobytes())
    return {
        "architecture": type(decoder.model).__name__,
        "config": hashlib.sha256(text.encode()).hexdigest(),
        "weights": {name: one.hexdigest() for name, one in hashes.items()},
        "first_of_runs": sorted(set(first_of_runs(list(skipped)).values())),
    }


def check_identity(fitted: Mapping[str, Any], model: Mapping[str, Any]) -> None:
    """Raise unless both are the same model.

    Raises:
        UnsupportedModelError: says what differs.
    """
    for name, what in (("architecture", "architecture"), ("config", "configuration"), ("first_of_runs", "layers")):
        if fitted.get(name) != model[name]:
            detail = f" ({fitted.get(name)!r}, here {model[name]!r})" if name != "config" else ""
            raise UnsupportedModelError(
                f"these K/V projections were fitted for another model: its {what} differs{detail}; run `stageprune "
                "calibrate` for this one"
            )
    theirs = fitted.get("weights", {})
    if not any(theirs.get(name) == value for name, value in model["weights"].items()):
        raise UnsupportedModelError(
            "these K/V projections were fitted for another model: the weights of the skipped layers differ; run "
            "`stageprune calibrate` for this one"
        )


def check_folder(folder: Path) -> None:
    """Find out before a long computation that its folder cannot be written.

    Raises:
        OutputFileError: if the name is taken by something else, or cannot be made.
    """
    if folder.exists() and not (folder / RECORD).is_file():
        raise OutputFileError(f"cannot write {str(folder)!r}: something else has that name")
    check_writable(folder.absolute().parent / f"{folder.name}.json")


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
