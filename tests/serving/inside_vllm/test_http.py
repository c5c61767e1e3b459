"""`stageprune serve --engine vllm` as a process, and the official client."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from engine_runs import greedy, prompts_of

import stageprune as sp

RATIO, NEW, SECONDS = 0.34, 24, 300


class Server:
    """On a port that was free; its output is in a file."""

    def __init__(self, log: Path, *others: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.log = log
        command = [sys.executable, "-m", "stageprune", "serve", "demo", "--engine", "vllm", "--ratio", str(RATIO)]
        command += ["--port", str(self.port), "--dtype", "float32", "--api-key", "key", "--max-model-len", "1024"]
        command += ["--no-check", "--", "--enforce-eager", "--max-num-seqs", "16", *others]
        with open(log, "w") as file:
            # A session of its own: vLLM's engine process outlives a server that was killed alone.
            self.process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
        self.url = f"http://127.0.0.1:{self.port}"

    def kill(self) -> None:
        """All its processes, as a container does."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def wait(self) -> None:
        """Until it serves."""
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            try:
                httpx.get(f"{self.url}/health", timeout=5).raise_for_status()
                return
            except httpx.HTTPError:
                time.sleep(0.5)
        raise AssertionError(self.log.read_text()[-3000:])

    def stop(self) -> None:
        """As a user does; it ends in good order."""
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(60) == 0

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="key", max_retries=0, timeout=120, **options)

    def running(self) -> float:
        """Requests that run or wait."""
        lines = httpx.get(f"{self.url}/metrics", timeout=30).text.splitlines()
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting{")
        return sum(float(line.split()[-1]) for line in lines if line.startswith(names))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    started = Server(tmp_path_factory.mktemp("vllm") / "log")
    try:
        started.wait()
        yield started
        started.stop()
    finally:
        started.kill()


@pytest.fixture(scope="module")
def cases(demo: Any) -> list[tuple[list[int], str]]:
    """Prompts, and the library's text."""
    prompts = prompts_of(demo.tokenizer, 15)
    with sp.prune(demo.model, sp.PrefillOnlyPruning(ratio=RATIO)):
        answers = greedy(demo.model, prompts, NEW)
    return list(zip(prompts, map(demo.tokenizer.decode, answers), strict=True))


ASKED: dict[str, Any] = {
    "model": "demo", "temperature": 0, "max_tokens": NEW,
    "extra_body": {"ignore_eos": True, "skip_special_tokens": False},
}  # fmt: skip


class Asker:
    """The official client, with many requests at once; use it in `async with`."""

    def __init__(self, server: Server, **options: Any) -> None:
        self.client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="key", max_retries=0)
        self.options = ASKED | options
        self.begun = 0

    async def __aenter__(self) -> Asker:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.close()

    async def whole(self, prompt: list[int]) -> str:
        return (await self.client.completions.create(prompt=prompt, **self.options)).choices[0].text

    async def streamed(self, prompt: list[int]) -> str:
        parts = []
        async for chunk in await self.client.completions.create(prompt=prompt, stream=True, **self.options):
            self.begun += not parts
            parts.append(chunk.choices[0].text)
        return "".join(parts)


def test_whole_and_streamed_answers_at_once(server: Server, cases: list[tuple[list[int], str]]) -> None:
    async def ask() -> list[str]:
        async with Asker(server) as asker:
            prompts = [prompt for prompt, _ in cases]
            return await asyncio.gather(*map(asker.whole, prompts), *map(asker.streamed, prompts))

    assert asyncio.run(ask()) == [text for _, text in cases] * 2


def test_chat(server: Server, demo: Any) -> None:
    messages = [{"role": "user", "content": "Name three colours."}]
    prompt = demo.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    with sp.prune(demo.model, sp.PrefillOnlyPruning(ratio=RATIO)):
        [tokens] = greedy(demo.model, [prompt], NEW)
    with server.client() as client:
        answer = client.chat.completions.create(messages=messages, **ASKED)
        assert [one.id for one in client.models.list().data] == ["demo"]
    assert answer.choices[0].message.content == demo.tokenizer.decode(tokens)


def test_cancelled_requests_leave_the_others_right(server: Server, cases: list[tuple[list[int], str]]) -> None:
    with server.client() as client:
        for prompt, _ in cases[:8]:
            stream = client.completions.create(prompt=prompt, stream=True, **ASKED | {"max_tokens": 400})
            next(iter(stream))
            stream.close()
        for prompt, text in cases[:8]:
            assert client.completions.create(prompt=prompt, **ASKED).choices[0].text == text
    end = time.monotonic() + 60
    while server.running() and time.monotonic() < end:
        time.sleep(0.2)
    assert server.running() == 0, "cancelled requests go on"


@pytest.mark.parametrize("more",
    [
        {"echo": True, "logprobs": 1}, {"echo": True, "logprobs": 0}, {"extra_body": {"prompt_logprobs": 1}},
        {"extra_body": {"prompt_logprobs": 0}},
    ],
)  # fmt: skip
def test_log_probabilities_of_the_prompt_are_a_bad_request(server: Server, more: dict[str, Any]) -> None:
    with server.client() as client:
        with pytest.raises(openai.BadRequestError, match="need every layer"):
            client.completions.create(model="demo", prompt="a b c", max_tokens=2, **more)
        assert client.completions.create(model="demo", prompt="a b c", max_tokens=2).choices[0].text


def test_beam_search_is_a_bad_request(server: Server) -> None:
    """Its generated tokens come back as prompts."""
    with server.client() as client, pytest.raises(openai.BadRequestError, match="beam search"):
        client.completions.create(model="demo", prompt="a b c", max_tokens=2, n=2, extra_body={"use_beam_search": True})


def test_the_key_is_asked_for(server: Server) -> None:
    with server.client().with_options(api_key="other") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_killed_in_the_middle_clients_get_errors(tmp_path: Path, cases: list[tuple[list[int], str]]) -> None:
    """And the next server answers as before."""
    doomed = Server(tmp_path / "doomed")

    async def ask() -> list[Any]:
        async with Asker(doomed, max_tokens=600) as asker:
            prompts = [prompt for prompt, _ in cases]
            tasks = [asyncio.create_task(asker.whole(prompt)) for prompt in prompts[::2]]
            tasks += [asyncio.create_task(asker.streamed(prompt)) for prompt in prompts[1::2]]
            async with asyncio.timeout(120):
                while asker.begun < len(prompts[1::2]):
                    await asyncio.sleep(0.01)
            doomed.kill()
            return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 30)

    try:
        doomed.wait()
        outcomes = asyncio.run(ask())
    finally:
        doomed.kill()
    # A stream that breaks off is an error of the transport.
    assert all(isinstance(one, (openai.APIError, httpx.HTTPError)) for one in outcomes), outcomes
    again = Server(tmp_path / "again")
    try:
        again.wait()
        with again.client() as client:
            assert client.completions.create(prompt=cases[0][0], **ASKED).choices[0].text == cases[0][1]
        again.stop()
    finally:
        again.kill()
