"""Compile `native.cpp` when it is first needed, and load it.

The library goes into the user's cache, under a name made of the source, the compiler and torch's version. Compiling is
done by one process at a time and moved into place when complete, so that neither a second process nor a killed one
leaves anything that is half done. torch's own extension loader would wait for ever for a lock of a killed process.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch
from filelock import FileLock

from stageprune.user_cache import cache_directory

_SOURCE = Path(__file__).with_name("native.cpp")
_FLAGS = ("-O3", "-std=c++20", "-fPIC", "-shared", "-fopenmp", "-Wno-psabi")
_log = logging.getLogger(__name__)


@cache
def load_native() -> str | None:
    """Make `torch.ops.stageprune` available.

    Returns:
        None when it is; else why it cannot be (and a warning is logged, once).
    """
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        obstacle = "there is no C++ compiler (g++ or clang++, or $CXX)"
    else:
        try:
            torch.ops.load_library(str(_built(compiler)))  # type: ignore[no-untyped-call]
            return None
        except (OSError, subprocess.SubprocessError) as error:
            detail = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
            obstacle = f"the kernels could not be compiled with {compiler}: {str(detail).strip()[-500:]}"
    _log.warning("stageprune runs pruned channels without its own kernels: %s", obstacle)
    return obstacle


def _built(compiler: str) -> Path:
    """The compiled library; compiles it unless it is in the cache."""
    key = hashlib.sha256(
        b"\0".join([_SOURCE.read_bytes(), compiler.encode(), " ".join(_FLAGS).encode(), torch.__version__.encode()])
    ).hexdigest()[:16]
    folder = cache_directory() / "kernels"
    library = folder / f"native-{key}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / f"native-{key}.lock"):
        if not library.exists():
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                fresh = Path(scratch) / library.name
                subprocess.run(_command(compiler, fresh), check=True, capture_output=True, text=True)
                os.replace(fresh, library)
    return library


def _command(compiler: str, output: Path) -> list[str]:
    from torch.utils.cpp_extension import include_paths, library_paths

    return [
        compiler,
        *_FLAGS,
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-I{path}" for path in include_paths()),
        str(_SOURCE),
        *(f"-L{path}" for path in library_paths()),
        *(f"-Wl,-rpath,{path}" for path in library_paths()),
        "-ltorch_cpu",
        "-lc10",
        "-o",
        str(output),
    ]
