"""What all tests share: no network, a fair share of the CPU cores, and the demo model."""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
import torch
from hypothesis import HealthCheck, settings

# Read when Triton is imported, which torch and transformers do on their own; without a GPU, nothing else runs kernels.
os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")

from helpers import InFloat64
from stageprune.models import LoadedModel, load

# Each pytest-xdist worker is a process of its own, and torch would give each of them all cores.
_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
torch.set_num_threads(max(1, (os.cpu_count() or 1) // _WORKERS))

# Everywhere the same examples, however slow the machine is.
settings.register_profile("stageprune", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("stageprune")


@pytest.fixture(scope="session")
def demo() -> LoadedModel:
    """The demo model in float32 and its tokenizer, from the user's cache. Shared: leave them as they are."""
    return load("demo", dtype="float32")


@pytest.fixture(scope="module")
def everything_in_float64() -> Iterator[None]:
    """What transformers computes in float32 whatever the weights' dtype is computed in float64; see `InFloat64`."""
    with InFloat64():
        yield


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For many tiny forward passes: between two threads that others keep from their cores, each waits for the other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
