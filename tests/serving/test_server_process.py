"""`stageprune serve` as a process: how it starts, and how it stops."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

import stageprune as sp
from serving_support import METHOD
from stageprune.cli.app import run

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "300"}


class Process:
    """A server in a process of its own; `url` of `/v1`."""

    def __init__(self, *arguments: object) -> None:
        command = [sys.executable, "-m", "stageprune", "serve", *map(str, arguments), "--port", "0"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT)
        assert self.process.stderr is not None
        lines: list[str] = []
        while True:
            line = self.process.stderr.readline().decode()
            lines.append(line)
            assert line, lines
            if match := re.search(r"at (http://\S+)", line):
                self.line, self.url = line, match[1]
                return

    def stop(self, number: int = signal.SIGTERM, seconds: float = 20) -> tuple[int, str]:
        """Exit code, and all that was printed since the start."""
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=seconds)
        return self.process.returncode, (out + err).decode()

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(**{"base_url": self.url, "api_key": "key", "max_retries": 0, "timeout": 30} | options)


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def begin(*arguments: object) -> Process:
        started.append(Process(*arguments))
        return started[-1]

    yield begin
    for one in started:
        one.process.kill()
        one.process.communicate()


def test_options_name_key_and_stop(start: Callable[..., Process], tiny_folder: Path) -> None:
    server = start(
        tiny_folder, "--layers", "0", "--served-model-name", "mine", "--api-key", "key", "--max-model-len", 64,
        "--max-new-tokens", 32, "--threads", 1,
    )  # fmt: skip
    assert "serving 'mine' (skipped layers 0 of 2)" in server.line
    loaded = sp.load(str(tiny_folder), dtype="float32")
    ids = torch.tensor([[5, 6, 7]])
    with sp.prune(loaded.model, METHOD):
        tokens = loaded.model.generate(ids, max_new_tokens=8, do_sample=False)[0, 3:]
    with server.client() as client:
        answer = client.completions.create(model="mine", prompt=[5, 6, 7], max_tokens=8, temperature=0)
        assert answer.choices[0].text == loaded.tokenizer.decode(tokens, skip_special_tokens=True)
        assert client.models.retrieve("mine").max_model_len == 64
        with pytest.raises(openai.BadRequestError, match="at most 32"):
            client.completions.create(model="mine", prompt="a", max_tokens=33)
    with server.client(api_key="other") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()
    assert server.stop() == (0, ""), "nothing but the one line"


LONG = {"model": "endless", "prompt": "a", "temperature": 0, "max_tokens": 90_000}


def test_stops_in_good_order(start: Callable[..., Process], tiny_folder: Path) -> None:
    """With a long answer running and others waiting: the first is cut, the others are refused, nobody hangs."""
    endless = tiny_folder.parent / "endless"
    loaded = sp.load(str(tiny_folder))
    loaded.model.config.max_position_embeddings = 100_000
    loaded.model.save_pretrained(endless)
    loaded.tokenizer.save_pretrained(endless)
    server = start(endless, "--threads", 1, "--grace", 3)
    errors: dict[str, Any] = {}  # by client, in the order of their ends
    begun = threading.Event()

    def stream() -> None:
        with server.client() as client:
            try:
                for _ in client.completions.create(**LONG, stream=True):
                    begun.set()
            except openai.APIError as error:
                errors["running"] = error

    def wait(name: str, streamed: bool) -> None:
        with server.client() as client:
            try:
                client.completions.create(**LONG, stream=streamed)
            except openai.APIStatusError as error:
                errors[name] = error

    threads = [threading.Thread(target=stream)]
    threads[0].start()
    assert begun.wait(20)
    threads += [threading.Thread(target=wait, args=(f"waiting-{streamed}", streamed)) for streamed in (False, True)]
    for thread in threads[1:]:
        thread.start()
    deadline = time.monotonic() + 10
    with httpx.Client() as http:
        metrics = f"{server.url.removesuffix('/v1')}/metrics"
        while "stageprune_queue_length 2.0" not in http.get(metrics).text:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    before = time.monotonic()
    code, printed = server.stop(signal.SIGTERM)
    assert 2.9 < time.monotonic() - before < 6.5, "its grace is three seconds"
    for thread in threads:
        thread.join(20)
    assert (code, printed) == (0, "")
    assert list(errors)[-1] == "running", "what waits hears of it at once"
    assert "shutting down" in str(errors["running"])
    assert [errors[f"waiting-{streamed}"].status_code for streamed in (False, True)] == [503, 503]
    with pytest.raises(httpx.ConnectError):
        httpx.get(metrics)


def test_a_short_answer_is_finished(start: Callable[..., Process], tiny_folder: Path) -> None:
    server = start(tiny_folder, "--threads", 1)
    with server.client() as client:
        stream = iter(client.completions.create(model="tiny", prompt=[5], max_tokens=200, stream=True))
        next(stream)
        server.process.send_signal(signal.SIGINT)
        assert list(stream)[-1].choices[0].finish_reason == "length"
    code, _ = server.stop(signal.SIGINT)
    assert code == 0


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock.getsockname()[1]


def failed(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    code = run(["serve", *map(str, arguments)])
    return code, " ".join(capsys.readouterr().err.split())


def test_what_keeps_it_from_starting(capsys, monkeypatch, tiny_folder: Path, taken: int) -> None:
    for arguments, code, says in [
        ((tiny_folder, "--port", taken), 1, f"cannot listen on '127.0.0.1', port {taken}: Address already in use"),
        ((tiny_folder, "--host", "no.such.host.invalid"), 1, "cannot listen on 'no.such.host.invalid'"),
        ((tiny_folder, "--port", "65536"), 2, "is no port"),
        ((tiny_folder, "--port", "0", "--max-model-len", "257"), 1, "more than the model's context of 256"),
        ((tiny_folder, "--max-queue", "-1"), 2, "at least 0"),
        ((tiny_folder, "--dense", "--ratio", "0.5"), 2, "--dense does not prune"),
        ((tiny_folder, "--api-key", " "), 2, "API key"),
        ((tiny_folder / "nothing", "--port", "0"), 1, "there is no folder"),
        ((), 2, "Missing argument"),
    ]:
        found, error = failed(capsys, *arguments)
        assert (found, says in error) == (code, True), (arguments, found, error)


def test_missing_packages(capsys, monkeypatch, tiny_folder: Path) -> None:
    find = "stageprune.serving.transformers.extra.importlib.util.find_spec"
    monkeypatch.setattr(find, lambda name: None if name in ("fastapi", "prometheus_client") else object())
    code, error = failed(capsys, tiny_folder)
    assert code == 1
    assert "needs fastapi, prometheus-client; run: pip install 'stageprune[serve]'" in error


def test_help_does_not_import_the_server() -> None:
    code = "import sys; from stageprune.cli.app import run; run(['serve', '--help']); "
    code += "sys.exit(any(name in sys.modules for name in ('fastapi', 'uvicorn', 'prometheus_client', 'transformers')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, env=ENVIRONMENT)
    assert done.returncode == 0
    assert b"--served-model-name" in done.stdout
