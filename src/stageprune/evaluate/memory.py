"""Peak memory of one call, on top of what was allocated before it (so weights do not count)."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from stageprune.evaluate.clock import synchronize


def peak_bytes(call: Callable[[], object], device: torch.device) -> int | None:
    """The most bytes that were allocated at any moment of `call()`, less those allocated when it began.

    On CUDA this is the allocator's own peak, over all devices. The CPU's allocator keeps none, so each allocation
    and release is recorded by the profiler and summed up; buffers that a library allocates past torch's allocator
    (oneDNN's scratch pads) are not seen. Call it a second time to leave out what only a first call allocates.

    Args:
        call: what to measure; what it returns is released afterwards.
        device: where it computes.

    Returns:
        Bytes, or None on devices that are neither CPU nor CUDA.
    """
    if device.type == "cuda":
        return _cuda_peak(call, device)
    if device.type == "cpu":
        return _cpu_peak(call)
    return None


def _cuda_peak(call: Callable[[], object], device: torch.device) -> int:
    devices = range(torch.cuda.device_count())
    synchronize(device)
    before = sum(torch.cuda.memory_allocated(index) for index in devices)
    for index in devices:
        torch.cuda.reset_peak_memory_stats(index)
    call()
    synchronize(device)
    return int(sum(torch.cuda.max_memory_allocated(index) for index in devices) - before)


def _cpu_peak(call: Callable[[], object]) -> int:
    with _quiet_profiler(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    with tempfile.TemporaryDirectory(prefix="stageprune-") as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        trace = json.loads(file.read_text(encoding="utf-8", errors="replace"))
    changes = [
        (event["ts"], event["args"]["Total Allocated"], event["args"]["Bytes"])
        for event in trace["traceEvents"]
        if event.get("name") == "[memory]" and event["args"].get("Device Type") == 0
    ]
    if not changes:
        return 0
    # The running total goes on from earlier profiles, so it is read against its value before the first change.
    _, total, change = min(changes)
    return int(max(0, max(total for _, total, _ in changes) - (total - change)))


@contextmanager
def _quiet_profiler() -> Iterator[None]:
    """The profiler's library logs its start and stop on the error stream, unless it is told otherwise."""
    name = "KINETO_LOG_LEVEL"
    before = os.environ.get(name)
    os.environ.setdefault(name, "6")
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
