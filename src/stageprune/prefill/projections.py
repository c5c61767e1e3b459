"""Fitted K/V projections as a folder: `kv_projections.safetensors` and `stageprune.json`.

The tensors are corrections to the base model's own weights; the JSON names the model that they belong to (hashes of its
configuration and of the K/V weights that they correct) and how they were fitted. A folder is written as a whole, and
read as a whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from stageprune.errors import ResultFileError, UnsupportedModelError
from stageprune.families.decoder import Decoder
from stageprune.families.verify import VerifiedLayer
from stageprune.files import OutputFileError, check_writable, default_mode
from stageprune.methods import PrefillOnlyPruning
from stageprune.prefill.fitted import FittedProjection, OwnWeights, own_weights
from stageprune.prefill.fitting import Sums
from stageprune.records import read_record, write_record

KIND, VERSION = "stageprune-kv-projections", 1
TENSORS, RECORD = "kv_projections.safetensors", "stageprune.json"
# What differs between copies of one model: where it lies, how it was loaded, which tokens end a text.
_UNRELATED = (
    "_name_or_path", "architectures", "transformers_version", "dtype", "torch_dtype", "use_cache", "bos_token_id",
    "eos_token_id", "pad_token_id",
)  # fmt: skip


@dataclass(frozen=True)
class Correction:
    """What is added to one layer's K/V weights, float32.

    Attributes:
        matrix: `[features, hidden_size]`, or its two factors `[features, rank]` and `[rank, hidden_size]`.
        bias: `[features]`.
    """

    matrix: tuple[torch.Tensor, ...]
    bias: torch.Tensor

    @classmethod
    def of(cls, matrix: torch.Tensor, bias: torch.Tensor) -> Correction:
        """Of full rank."""
        return cls((matrix.float().cpu(),), bias.float().cpu())

    @property
    def whole(self) -> torch.Tensor:
        """The matrix, float64."""
        first, *others = (part.double() for part in self.matrix)
        return first @ others[0] if others else first

    def low_rank(self, rank: int, sums: Sums, keys: int) -> Correction:
        """The closest correction of this rank, by the squares of what it changes on the text of these sums.

        Keys and values count alike: each by its share of the full model's variance. The bias makes up for the mean of
        what the rank leaves out.

        Args:
            rank: of the matrix.
            sums: of the layer.
            keys: how many features are keys.
        """
        matrix = self.whole.to(sums.gram)
        totals = [(part.sum(), len(part)) for part in split(sums.variance(), keys)]
        scale = torch.cat([(total if total > 0 else total + 1).rsqrt().expand(count) for total, count in totals])
        scaled = scale[:, None] * matrix
        # With A = scaled and C = covariance, the best A' of a rank is U U^T A, U from the singular vectors of A C^1/2.
        basis = torch.linalg.eigh(scaled @ sums.covariance() @ scaled.T).eigenvectors[:, -rank:]
        left, right = basis / scale[:, None], basis.T @ scaled
        bias = self.bias.to(sums.gram) + (matrix - left @ right) @ sums.gram[:-1, -1] / sums.weight
        return Correction((left.float().cpu(), right.float().cpu()), bias.float().cpu())


def split(features: torch.Tensor, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of keys, and of values."""
    return features[:keys], features[keys:]


@dataclass(frozen=True)
class KVProjections:
    """What `stageprune calibrate` makes.

    Attributes:
        corrections: by layer index.
        record: the content of `stageprune.json`: `model`, `settings`, `measured`.
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
        folder = _target(folder)
        tensors: dict[str, torch.Tensor] = {}
        for index, one in self.corrections.items():
            tensors[f"layers.{index}.bias"] = one.bias.contiguous()
            for place, part in enumerate(one.matrix):
                tensors[f"layers.{index}.matrix.{place}"] = part.contiguous()
        # Fixed names: what a killed process leaves behind is taken away by the next.
        fresh, old = (folder.absolute().with_name(f".{folder.name}.{name}") for name in ("new", "old"))
        try:
            shutil.rmtree(fresh, ignore_errors=True)
            if folder.exists():
                shutil.rmtree(old, ignore_errors=True)
            fresh.mkdir()
            save_file(tensors, fresh / TENSORS)
            (fresh / TENSORS).chmod(default_mode())
            with open(fresh / TENSORS, "rb") as file:
                os.fsync(file.fileno())
                checksum = hashlib.file_digest(file, "sha256").hexdigest()
            write_record(
                fresh / RECORD, KIND, VERSION, {**self.record, "layers": list(self.layers), "sha256": checksum}
            )
            if folder.exists():
                os.replace(folder, old)
            os.replace(fresh, folder)
        except (OSError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or error
            raise OutputFileError(f"cannot write {str(folder)!r}: {reason}") from error
        finally:
            if old.exists() and not folder.exists():
                os.replace(old, folder)
            for leftover in (fresh, old):
                shutil.rmtree(leftover, ignore_errors=True)

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> KVProjections:
        """Read a folder.

        Raises:
            ResultFileError: if it is missing, damaged, incomplete, or of another kind or version.
        """
        folder = Path(os.path.expanduser(folder))
        record = read_record(folder / RECORD, KIND, VERSION)
        path = folder / TENSORS
        try:
            with open(path, "rb") as file:
                checksum = hashlib.file_digest(file, "sha256").hexdigest()
            if checksum != record["sha256"]:
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
        own = {index: own_weights(verified[index]) for index in self.layers}
        check_identity(self.record["model"], identity(decoder, own))
        fitted = dict(verified)
        for index, correction in self.corrections.items():
            one, weights = verified[index], own[index]
            matrix = (weights.weight + correction.whole.to(weights.weight)).to(one.device, one.dtype)
            bias = (weights.bias + correction.bias.to(weights.bias)).to(one.device, one.dtype)
            fitted[index] = replace(one, project=FittedProjection(one.project, matrix, bias, weights.keys))
        return fitted


def fitted_setting(folder: str | os.PathLike[str]) -> PrefillOnlyPruning:
    """The setting that skips the layers of a folder of projections, with these.

    Raises:
        ResultFileError: as `KVProjections.load`.
    """
    return PrefillOnlyPruning(layers=KVProjections.load(folder).layers, projections=os.fspath(folder))


def identity(decoder: Decoder, own: Mapping[int, OwnWeights]) -> dict[str, Any]:
    """Which model this is: hashes of its configuration and of the K/V weights of these layers.

    The weights are hashed as bfloat16 and as float16 see them: the same checkpoint loaded in another type is the same
    model.
    """
    config = {key: value for key, value in decoder.config.to_dict().items() if key not in _UNRELATED}
    text = json.dumps(config, sort_keys=True, default=str)
    return {
        "architecture": type(decoder.model).__name__,
        "num_hidden_layers": len(decoder.layers),
        "config": hashlib.sha256(text.encode()).hexdigest(),
        "weights": weights_identity(own),
    }


def weights_identity(own: Mapping[int, OwnWeights]) -> dict[str, str]:
    """The part of `identity` that is of the K/V weights."""
    hashes = {name: hashlib.sha256() for name in ("bfloat16", "float16")}
    for index in sorted(own):
        for tensor in (own[index].weight, own[index].bias):
            for name, checksum in hashes.items():
                rounded = tensor.cpu().to(getattr(torch, name)).view(torch.int16)
                checksum.update(rounded.numpy().tobytes())
    return {name: checksum.hexdigest() for name, checksum in hashes.items()}


def check_identity(fitted: Mapping[str, Any], model: Mapping[str, Any]) -> None:
    """Raise unless both are the same model.

    Raises:
        UnsupportedModelError: says what differs.
    """
    for name, what in (("architecture", "architecture"), ("num_hidden_layers", "number of layers")):
        if fitted[name] != model[name]:
            raise _another_model(f"its {what} is {fitted[name]}, not {model[name]}")
    if fitted["config"] != model["config"]:
        raise _another_model("its configuration differs")
    check_weights(fitted, model["weights"])


def check_weights(fitted: Mapping[str, Any], weights: Mapping[str, str]) -> None:
    """The part of `check_identity` that is about the K/V weights, where nothing else can be compared.

    Raises:
        UnsupportedModelError: if they differ.
    """
    if all(fitted["weights"][name] != value for name, value in weights.items()):
        raise _another_model("the K/V weights of the skipped layers differ")


def _another_model(what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"these K/V projections were fitted for another model: {what}; run `stageprune calibrate` for this one"
    )


def check_folder(folder: Path) -> None:
    """Find out before a long computation that its folder cannot be written.

    Raises:
        OutputFileError: if the name is taken by something else, or cannot be made.
    """
    if folder.name in ("", ".."):
        raise OutputFileError(f"cannot write {str(folder)!r}: give a folder by its name")
    target = _target(folder)
    if os.path.lexists(target) and not _is_replaceable(target):
        raise OutputFileError(f"cannot write {str(folder)!r}: something else has that name")
    check_writable(target.with_name(f".{target.name}.new.json"))


def _target(folder: Path) -> Path:
    """Where the folder really lies: a link to it stays a link."""
    return Path(os.path.realpath(folder)) if folder.is_dir() else folder.absolute()


def _is_replaceable(folder: Path) -> bool:
    """Whether a folder is empty or holds K/V projections alone: `stageprune.json` may also lie beside a checkpoint."""
    return folder.is_dir() and {path.name for path in folder.iterdir()} in (set(), {TENSORS, RECORD})
