"""Kill a command, without warning, at a chosen moment of its writing."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from stageprune.cli.app import run

MOMENTS_OF_A_WRITE = 3
"""Half of the file is on the disk; all of it is, under its temporary name; it has its name."""


def killed_at(moment: int, arguments: Sequence[object]) -> bool:
    """Run a command in a process of its own that dies at the `moment`-th moment of its writing, counted from 0.

    Returns:
        Whether it died there; False if it ended before.
    """
    child = os.fork()
    if child == 0:
        _run(moment, arguments)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the command failed by itself"
            return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError("the command did not end")


def _run(moment: int, arguments: Sequence[object]) -> NoReturn:
    code = 1
    try:
        torch.set_num_threads(1)  # the parent's other threads do not exist here
        null = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(null, stream)
        _die_at(moment)
        code = run([str(argument) for argument in arguments])
    finally:
        os._exit(code)


def _die_at(moment: int) -> None:
    passed = -1
    replace, fsync, unlink = os.replace, os.fsync, Path.unlink

    def is_now() -> bool:
        nonlocal passed
        passed += 1
        return passed == moment

    def die() -> NoReturn:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    def dying_fsync(file: int) -> None:
        if is_now():
            os.ftruncate(file, os.fstat(file).st_size // 2)
            die()
        fsync(file)

    def dying_replace(source: Any, target: Any) -> None:
        if is_now():
            die()
        replace(source, target)
        if is_now():
            die()

    def dying_unlink(path: Path, missing_ok: bool = False) -> None:
        if is_now():
            die()
        unlink(path, missing_ok)

    os.replace, os.fsync, Path.unlink = dying_replace, dying_fsync, dying_unlink  # type: ignore[assignment]
