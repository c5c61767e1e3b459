"""A cache of folders in the user's cache directory, each built once from one source file.

A folder appears under its final name only when it is complete: it is built under a temporary name in the same
directory, written through to the disk, and renamed. One process builds while others wait for its lock; a temporary
folder that a killed process left is removed by the next one that takes that lock.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from stageprune.errors import ModelLoadError
from stageprune.user_cache import cache_directory

FORMAT = 1
"""Raise it whenever the same source would be built differently: folders of other formats are not used."""

_MANIFEST = "manifest.json"
_WINDOWS, _WINDOW_BYTES = 64, 64 * 1024


def fingerprint(path: Path) -> str:
    """A hex digest of a file's size and of 64 windows of 64 KiB spread evenly over it (all of it, up to 4 MiB).

    Other files, also of equal size, and truncated or overwritten ones get another fingerprint; unlike a time
    stamp, it is the same for the same file in every environment. Hashing all bytes would cost as much time as
    loading the model, on each load.
    """
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    step = max(_WINDOW_BYTES, -(-max(size - _WINDOW_BYTES, 0) // (_WINDOWS - 1)))
    with path.open("rb") as file:
        for offset in range(0, size, step):
            file.seek(offset)
            digest.update(file.read(_WINDOW_BYTES))
    return digest.hexdigest()[:32]


def cached_folder(source: Path, build: Callable[[Path], None], status: Callable[[str], None]) -> Path:
    """The intact folder that `build` makes of `source`: an earlier one if there is one, else built now.

    Args:
        source: the file that the folder is made from; its `fingerprint` identifies the folder.
        build: fills the empty folder it is given.
        status: told in one line why this takes more than a moment, when it does.

    Raises:
        ModelLoadError: if the cache directory cannot be written; and whatever `build` raises.
    """
    try:
        folder = cache_directory() / "models" / f"{source.stem}-{fingerprint(source)}-v{FORMAT}"
        if not _is_intact(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            _build_locked(folder, build, status)
    except (OSError, NotImplementedError, SafetensorError) as error:  # NotImplementedError: no locks on this disk
        raise ModelLoadError(
            f"cannot keep the converted {source.name} in {cache_directory()}: {error}. "
            "Free some space there, or set STAGEPRUNE_CACHE to a folder that can be written."
        ) from error
    return folder


def _build_locked(folder: Path, build: Callable[[Path], None], status: Callable[[str], None]) -> None:
    lock = FileLock(f"{folder}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        status(f"waiting for another process that builds {folder.name}")
        lock.acquire()
    try:
        for stale in folder.parent.glob(f"{glob.escape(folder.name)}.tmp-*"):  # of killed builds: we hold the lock
            shutil.rmtree(stale)
        if not _is_intact(folder):
            _build(folder, build)
    finally:
        lock.release()


def _build(folder: Path, build: Callable[[Path], None]) -> None:
    temporary = Path(tempfile.mkdtemp(prefix=f"{folder.name}.tmp-", dir=folder.parent))
    try:
        content = temporary / "new"
        content.mkdir()
        build(content)
        (content / _MANIFEST).write_text(json.dumps(_fingerprints(content), indent=1))
        for file in content.iterdir():
            with file.open("r+b") as handle:
                os.fsync(handle.fileno())
        _sync_directory(content)
        if os.path.lexists(
            folder
        ):  # broken: a folder cannot replace another, so that one is moved out of the way first
            folder.rename(temporary / "broken")
        content.rename(folder)
        _sync_directory(folder.parent)
    finally:
        shutil.rmtree(temporary)


def _is_intact(folder: Path) -> bool:
    try:
        return bool(json.loads((folder / _MANIFEST).read_text()) == _fingerprints(folder))
    except (OSError, ValueError):  # missing, no folder, no JSON: all mean that it has to be built
        return False


def _fingerprints(folder: Path) -> dict[str, str]:
    files = (file for file in folder.iterdir() if file.name != _MANIFEST and not file.name.startswith("."))
    return {file.name: fingerprint(file) for file in sorted(files)}


def _sync_directory(folder: Path) -> None:
    if os.name != "posix":  # elsewhere a directory cannot be opened, and a rename is durable by itself
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
