"""vLLM's server with and without pruning on this machine: first token, decode speed, and a load test.

python benchmarks/serving.py speed            # two servers, alternating; about five minutes
python benchmarks/serving.py load             # 200 clients for five minutes; each answer is checked
python benchmarks/serving.py kill             # a server that is killed under the same load
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
import tempfile
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
def server(port: int, pruned: bool, *others: str, steady: bool = False) -> Any:
    """A server of `stageprune serve --engine vllm`, ready."""
    how = ["--ratio", str(RATIO)] if pruned else ["--dense"]
    command = [sys.executable, "-m", "stageprune", "serve", MODEL, "--engine", "vllm", *how, "--port", str(port), "--"]
    command += ["--enforce-eager", "--max-model-len", "4096", "--disable-log-stats", "--no-enable-log-requests"]
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1"} | os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"}
    if steady:
        # What grows is then held by someone. By default the worker, pruned or not, keeps freed tensors in pieces and up
        # to 1,024 compiled kernels of oneDNN, of which every number of rows in a step gets its own.
        environment |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
        environment |= {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16"}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([*command, *others], env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            for _ in range(600):
                if process.poll() is not None:
                    log.seek(0)
                    raise SystemExit(f"{log.read().decode()[-3000:]}\nthe server ended with {process.returncode}")
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
                os.killpg(process.pid, signal.SIGKILL)


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
                time.sleep(1)  # the other server's threads spin for a while before they give their cores up
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
        "all_first_token_s": first, "all_token_s": each,
    }  # fmt: skip


def asked(prompt: list[int], **more: Any) -> dict[str, Any]:
    """The body of a request."""
    return {"model": MODEL, "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True} | more


def expected_answers(prompts: list[list[int]]) -> list[str]:
    """The pruned library's own, one prompt after the other."""
    import torch

    from stageprune import PrefillOnlyPruning, prune
    from stageprune.models import load

    model, tokenizer = load(MODEL, dtype="float32")
    model.generation_config.eos_token_id, texts = None, []
    with prune(model, PrefillOnlyPruning(ratio=RATIO)):
        for prompt in prompts:
            ids = torch.tensor([prompt])
            options = dict(attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0)
            answer = model.generate(ids, max_new_tokens=12, **options)[0, len(prompt) :]
            texts.append(tokenizer.decode(answer, skip_special_tokens=True))
    return texts


def mixed_prompts() -> list[list[int]]:
    """Of 5 to 300 tokens."""
    text, generator = tokens(), random.Random(1)
    starts = [
        (generator.randrange(len(text) - n), n) for n in (5, 17, 32, 33, 64, 90, 128, 200, 256, 300) for _ in range(4)
    ]
    return [text[start : start + length] for start, length in starts]


class Clients:
    """Many at once, each asking again as soon as it was answered; one in ten goes away in the middle of an answer."""

    def __init__(self, prompts: list[list[int]], expected: list[str]) -> None:
        self.prompts, self.expected = prompts, expected
        self.outcome: Counter[str] = Counter()
        self.seconds: list[float] = []

    async def one(self, seed: int, end: float) -> None:
        """A client: until then, or until the first error of its connection."""
        # Its own: a pool of connections that many tasks share closes one now and then that it has just given to a task.
        async with httpx.AsyncClient(base_url="http://127.0.0.1:8033", timeout=300, verify=False) as http:
            await self.ask(http, random.Random(seed), end)

    async def ask(self, http: httpx.AsyncClient, own: random.Random, end: float) -> None:
        """One request after the other, and count what became of each."""
        while time.monotonic() < end:
            index = own.randrange(len(self.prompts))
            kind = own.random()
            self.outcome["asked"] += 1
            try:
                if kind < 0.1:
                    await self.leave(http, self.prompts[index])
                    self.outcome["went away"] += 1
                    continue
                start = time.monotonic()
                text = await (self.whole if kind < 0.55 else self.streamed)(http, self.prompts[index])
                self.seconds.append(time.monotonic() - start)
                self.outcome["right" if text == self.expected[index] else "wrong"] += 1
            except httpx.HTTPStatusError as error:
                self.outcome[f"status {error.response.status_code}"] += 1
            except httpx.HTTPError as error:
                self.outcome[f"connection: {type(error).__name__}"] += 1
                return

    async def whole(self, http: httpx.AsyncClient, prompt: list[int]) -> str:
        answer = await http.post("/v1/completions", json=asked(prompt))
        answer.raise_for_status()
        return str(answer.json()["choices"][0]["text"])

    async def streamed(self, http: httpx.AsyncClient, prompt: list[int]) -> str:
        parts = []
        async with http.stream("POST", "/v1/completions", json=asked(prompt, stream=True)) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    parts.append(json.loads(line.removeprefix("data: "))["choices"][0]["text"])
        return "".join(parts)

    async def leave(self, http: httpx.AsyncClient, prompt: list[int]) -> None:
        body = asked(prompt, stream=True, max_tokens=200)
        async with http.stream("POST", "/v1/completions", json=body) as response:
            response.raise_for_status()
            async for _ in response.aiter_lines():
                break

    async def all(self, count: int, end: float) -> None:
        await asyncio.gather(*(self.one(seed, end) for seed in range(count)))


async def load_test(minutes: float, clients: int) -> dict[str, Any]:
    """Under load for some minutes."""
    prompts = mixed_prompts()
    expected = expected_answers(prompts)
    # A small cache: preemption is part of it, and all of its memory is in use soon, so that a leak would show.
    options = ("--dtype", "float32", "--max-num-seqs", "64", "--block-size", "32", "--num-gpu-blocks-override", "200")

    def memory(process: Any) -> int:
        one = psutil.Process(process.pid)
        return round(sum(each.memory_info().rss for each in [one, *one.children(recursive=True)]) / 2**20)

    seen: list[int] = []
    with server(8033, True, *options, steady=True) as process:
        end = time.monotonic() + minutes * 60
        group = Clients(prompts, expected)

        async def watch() -> None:
            while time.monotonic() < end:
                seen.append(memory(process))
                await asyncio.sleep(10)

        await asyncio.gather(watch(), group.all(clients, end))
        process.send_signal(signal.SIGINT)
        code = process.wait(60)
    return {
        "clients": clients, "minutes": minutes, "outcome": dict(group.outcome),
        "seconds": {"median": statistics.median(group.seconds), "most": max(group.seconds)},
        "memory_mib": seen, "exit_code": code,
    }  # fmt: skip


async def kill_test(clients: int) -> dict[str, Any]:
    """A server that is killed under load, and the next one."""
    prompts = mixed_prompts()
    expected = expected_answers(prompts)
    options = ("--dtype", "float32", "--max-num-seqs", "64")
    with server(8033, True, *options) as process:
        doomed = Clients(prompts, expected)
        asking = asyncio.create_task(doomed.all(clients, time.monotonic() + 600))
        await asyncio.sleep(20)
        os.killpg(process.pid, signal.SIGKILL)
        killed = time.monotonic()
        await asyncio.wait_for(asking, 60)
        ended = time.monotonic() - killed
    with server(8033, True, *options):
        after = Clients(prompts, expected)
        await after.all(clients, time.monotonic() + 10)
    return {
        "clients": clients, "killed": dict(doomed.outcome), "last_client_ended_after_s": ended,
        "next_server": dict(after.outcome),
    }  # fmt: skip


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["speed", "load", "kill"])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--clients", type=int, default=200)
    given = parser.parse_args()
    if given.what == "speed":
        result = speed(given.repeats)
    elif given.what == "load":
        result = asyncio.run(load_test(given.minutes, given.clients))
    else:
        result = asyncio.run(kill_test(given.clients))
    from common import write_json

    write_json(RESULTS / f"serving_{given.what}.json", result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
