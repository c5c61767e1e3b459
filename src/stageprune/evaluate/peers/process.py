"""Peers that run in a process of their own: what they import and allocate does not touch this one."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from stageprune.evaluate.peers.base import PeerError, Times

PREFIX = "stageprune-peer: "
"""In front of every answer."""


class ProcessPeer:
    """A peer behind `stageprune.evaluate.peers.worker`, a line of JSON for each turn.

    Args:
        name: one of the worker's.
        package: that it needs: the module to import and its name for pip.
        model: what it loads: a folder, a hub id or a GGUF file.
        options: further ones of the worker.

    Raises:
        PeerError: if the package is missing, or cannot load the model.
    """

    def __init__(self, name: str, package: tuple[str, str], model: str, options: dict[str, Any]) -> None:
        module, project = package
        if importlib.util.find_spec(module) is None:
            raise PeerError(f"{name} is not installed; run: pip install {project}")
        self.name = name
        command = [sys.executable, "-m", "stageprune.evaluate.peers.worker", name, model, json.dumps(options)]
        # Its log would be drawn into our progress bar; what goes wrong comes back as an answer.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        try:
            ready = self._answer()
        except PeerError:
            self.close()
            raise
        self.precision = str(ready["precision"])
        self.version = f"{project} {_version(project)}"

    def answer(self, input_ids: torch.Tensor, new_tokens: int) -> Times:
        """See `Peer`."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"prompts": input_ids.tolist(), "new_tokens": new_tokens}) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise PeerError(f"{self.name} has ended") from error
        data = self._answer()
        return Times(data["first_s"], data["total_s"])

    def close(self) -> None:
        """End the process."""
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):  # it ended before it read what was last written
                self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _answer(self) -> dict[str, Any]:
        """The next line that is an answer; libraries print lines of their own."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(PREFIX):
                data: dict[str, Any] = json.loads(line.removeprefix(PREFIX))
                if "error" in data:
                    raise PeerError(f"{self.name}: {data['error']}")
                return data
        raise PeerError(f"{self.name} ended without an answer (exit code {self._process.wait()})")


def _version(project: str) -> str:
    try:
        return version(project)
    except PackageNotFoundError:  # a build under another name
        return "of unknown version"
