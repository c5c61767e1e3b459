"""vLLM's server with and without pruning on this machine: first token, decode speed, and a load test.

python benchmarks/serving.py speed            # two servers, alternating; about five minutes
python benchmarks/serving.py load --minutes 5 # 200 clients; each answer is checked
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import httpx
import psutil

RESULTS = Path(__file__).parents[1] / "docs" / "results"
MODEL, RATIO, LENGTH, NEW = "demo", 0.34, 2048, 64


@contextmanager
def server(port: int, pruned: bool, *others: str) -> Any:
    """A server of `stageprune serve --engine vllm`, ready."""
    how = ["--ratio", str(RATIO)] if pruned else ["--dense"]
    command = [sys.executable, "-m", "stageprune", "serve", MODEL, "--engine", "vllm", *how, "--port", str(port), "--"]
    command += [
        "--enforce-eager",
        "--max-model-len",
        "4096",
        "--disable-log-stats",
        "--no-enable-log-requests",
        *others,
    ]
    environment = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            if process.poll() is not None:
                raise SystemExit(f"the server ended with {process.returncode}")
            try:
                httpx.get(f"http://127.0.0.1:{port}/health", timeout=2).raise_for_status()
                break
            except httpx.HTTPError:
                time.sleep(1)
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def tokens() -> list[int]:
    """The text of all prompts."""
    from stageprune.models import load

    tokenizer = load(MODEL).tokenizer
    return tokenizer("\n".join(topics[name] for name in sorted(topics))).input_ids  # type: ignore[no-any-return]


def timed(port: int, prompt: list[int], new: int) -> tuple[float, float]:
    """Seconds to the first token, and for each further one."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": new, "temperature": 0, "stream": True, "ignore_eos": True}
    start, times = time.perf_counter(), []
    with httpx.stream("POST", f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=300) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                times.append(time.perf_counter())
    return times[0] - start, (times[-1] - times[0]) / max(len(times) - 1, 1)


def speed(repeats: int) -> dict[str, Any]:
    """Two servers at once, of which one computes: they alternate on the same prompts, none of them seen before."""
    from stageprune import PrefillOnlyPruning, prune
    from stageprune.models import load

    with prune(load(MODEL).model, PrefillOnlyPruning(ratio=RATIO)) as handle:
        ideal = handle.report(LENGTH).ideal_speedup
    text = tokens()
    generator = random.Random(0)
    options = ("--no-enable-prefix-caching", "--max-num-batched-tokens", "4096")
    first: dict[str, list[float]] = {"plain": [], "pruned": []}
    each: dict[str, list[float]] = {"plain": [], "pruned": []}
    with server(8031, False, *options), server(8032, True, *options):
        ports = {"plain": 8031, "pruned": 8032}
        for turn in range(-1, repeats):
            start = generator.randrange(len(text) - LENGTH)
            for name in ("plain", "pruned") if turn % 2 else ("pruned", "plain"):
                a, b = timed(ports[name], text[start : start + LENGTH], NEW)
                if turn >= 0:
                    first[name].append(a)
                    each[name].append(b)
    gains = sorted(a / b for a, b in zip(first["plain"], first["pruned"], strict=True))
    decode = sorted(a / b for a, b in zip(each["plain"], each["pruned"], strict=True))

    def spread(values: list[float]) -> list[float]:
        quartiles = statistics.quantiles(values, n=4)
        return [quartiles[0], statistics.median(values), quartiles[2]]

    return {
        "prompt_tokens": LENGTH, "new_tokens": NEW, "ratio": RATIO, "repeats": repeats, "ideal_speedup": ideal,
        "first_token_s": {name: statistics.median(values) for name, values in first.items()},
        "token_s": {name: statistics.median(values) for name, values in each.items()},
        "first_token_speedup": spread(gains), "decode_speedup": spread(decode),
    }  # fmt: skip


async def load_test(minutes: float, clients: int) -> dict[str, Any]:
    """Clients that ask for what was answered before, alone; some go away in the middle of an answer."""
    text, generator = tokens(), random.Random(1)
    prompts = []
    for length in (5, 17, 32, 33, 64, 90, 128, 200, 256, 300) * 2:
        start = generator.randrange(len(text) - length)
        prompts.append(text[start : start + length])
    outcome: Counter[str] = Counter()
    with server(8033, True, "--dtype", "float32", "--max-num-seqs", "64") as process:
        tree = [psutil.Process(process.pid)]
        limits = httpx.Limits(max_connections=clients + 10)
        async with httpx.AsyncClient(base_url="http://127.0.0.1:8033", timeout=300, limits=limits) as http:

            def body(prompt: list[int], **more: Any) -> dict[str, Any]:
                return {"model": MODEL, "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True} | more

            expected = []
            for prompt in prompts:
                answer = await http.post("/v1/completions", json=body(prompt))
                expected.append(answer.json()["choices"][0]["text"])

            def memory() -> float:
                each = [tree[0], *tree[0].children(recursive=True)]
                return sum(one.memory_info().rss for one in each) / 2**20

            end = time.monotonic() + minutes * 60
            seen = [memory()]

            async def client(seed: int) -> None:
                own = random.Random(seed)
                while time.monotonic() < end:
                    index = own.randrange(len(prompts))
                    if own.random() < 0.1:
                        async with http.stream(
                            "POST", "/v1/completions", json=body(prompts[index], stream=True, max_tokens=200)
                        ) as response:
                            async for _ in response.aiter_lines():
                                break
                        outcome["went away"] += 1
                        continue
                    answer = await http.post("/v1/completions", json=body(prompts[index]))
                    if answer.status_code != 200:
                        outcome[f"status {answer.status_code}"] += 1
                    else:
                        same = answer.json()["choices"][0]["text"] == expected[index]
                        outcome["right" if same else "wrong"] += 1

            async def watch() -> None:
                while time.monotonic() < end:
                    await asyncio.sleep(5)
                    seen.append(memory())

            await asyncio.gather(watch(), *(client(seed) for seed in range(clients)))
        process.send_signal(signal.SIGINT)
        code = process.wait(60)
    return {
        "clients": clients, "minutes": minutes, "outcome": dict(outcome), "memory_mib": [round(one) for one in seen],
        "exit_code": code,
    }  # fmt: skip


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["speed", "load"])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--clients", type=int, default=200)
    given = parser.parse_args()
    if given.what == "speed":
        result = speed(given.repeats)
    else:
        result = asyncio.run(load_test(given.minutes, given.clients))
    from common import write_json

    write_json(RESULTS / f"serving_{given.what}.json", result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
