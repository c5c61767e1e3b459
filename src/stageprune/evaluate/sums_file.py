"""What a long calibration has read so far, beside its result, so that it can go on after an interruption.

One safetensors file with the sums, in whose header lies a sealed record: how many samples, of which model and settings,
and a checksum of the tensors. One file, because two cannot be replaced in one step.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from stageprune.errors import ResultFileError
from stageprune.evaluate.checkpoint import Identity, check_same
from stageprune.files import OutputFileError, check_writable, default_mode
from stageprune.records import check_record, digest, sealed

KIND, VERSION = "stageprune-calibration-partial", 1


class SumsFile:
    """The file `FOLDER.partial`.

    Args:
        output: the folder where the result will be.
        identity: model and settings; sums of another identity are refused.
    """

    def __init__(self, output: Path, identity: Identity) -> None:
        self.path, self._fresh = _names(output)
        self._identity = identity

    def load(self, tensors: Mapping[str, torch.Tensor]) -> int:
        """Fill tensors with those in the file.

        Args:
            tensors: by name; they stay as they are if there is no file, or it is refused.

        Returns:
            How many samples were read; 0 if there is no file.

        Raises:
            ResultFileError: if the file is damaged, or of another model or other settings; says which.
        """
        if not self.path.exists():
            return 0
        name, remedy = repr(str(self.path)), f"delete {str(self.path)!r} to begin anew, or name another --output"
        try:
            with safe_open(self.path, "pt") as file:
                record = check_record(json.loads(file.metadata()["record"]), self.path, KIND, VERSION)
                check_same(self._identity, record, f"{name} was begun with other settings", remedy)
                found = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            if record["sha256"] != _checksum(found):
                raise ValueError("its content does not have the checksum that it was written with")
            for key, tensor in tensors.items():
                if found[key].shape != tensor.shape or found[key].dtype != tensor.dtype:
                    raise ValueError(f"{key} is {found[key].dtype} {tuple(found[key].shape)}")
        except OSError as error:
            raise ResultFileError(f"cannot read {name}: {error.strerror or error}") from error
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise ResultFileError(f"{name} is damaged: {error}; {remedy}") from error
        for key, tensor in tensors.items():
            tensor.copy_(found[key])
        return int(record["samples"])

    def save(self, samples: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace the file by one with these tensors, in one step.

        Raises:
            OutputFileError: if that fails; an earlier file is then still there.
        """
        copies = {key: tensor.cpu().contiguous() for key, tensor in tensors.items()}
        record: dict[str, Any] = {
            "identity": digest(self._identity),
            **self._identity,
            "samples": samples,
            "sha256": _checksum(copies),
        }
        fresh = self._fresh / "sums"
        try:
            _take_away(self._fresh)
            self._fresh.mkdir()
            save_file(copies, fresh, metadata={"record": json.dumps(sealed(KIND, VERSION, record))})
            fresh.chmod(default_mode())
            with open(fresh, "rb") as file:
                os.fsync(file.fileno())
            os.replace(fresh, self.path)
        except (OSError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or error
            raise OutputFileError(f"cannot write {str(self.path)!r}: {reason}") from error
        finally:
            _take_away(self._fresh)

    def remove(self) -> None:
        """The result is written: nothing to go on with."""
        self.path.unlink(missing_ok=True)
        _take_away(self._fresh)


def check_partial(output: Path) -> None:
    """Find out before a long calibration that its partial file cannot be written.

    Raises:
        OutputFileError: if that is so, as with a name that is too long.
    """
    path, fresh = _names(output)
    check_writable(path)
    if not os.path.isdir(fresh):  # unlike Path.is_dir, says so of names that are too long
        check_writable(fresh)


def _take_away(folder: Path) -> None:
    """Whatever is in it; of older versions it may be a file."""
    if folder.is_dir():
        shutil.rmtree(folder, ignore_errors=True)
    else:
        folder.unlink(missing_ok=True)


def _names(output: Path) -> tuple[Path, Path]:
    """`FOLDER.partial`, and a folder for its next state.

    Fixed names: what a killed process leaves is taken away by the next. A folder, as safetensors writes to names of its
    own beside the file.
    """
    return output.with_name(f"{output.name}.partial"), output.with_name(f".{output.name}.partial.new")


def _checksum(tensors: Mapping[str, torch.Tensor]) -> str:
    checksum = hashlib.sha256()
    for key in sorted(tensors):
        checksum.update(f"{key} {tensors[key].dtype} {tuple(tensors[key].shape)}".encode())
        checksum.update(tensors[key].numpy().data)
    return checksum.hexdigest()
