"""A server in a thread, whose model's speed the tests can choose."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import torch

import stageprune as sp
from stageprune.models import LoadedModel, load
from stageprune.serving import address
from stageprune.serving.transformers import server
from stageprune.serving.transformers.limits import Limits
from stageprune.serving.transformers.service import Service

CONTEXT = 256
METHOD = sp.PrefillOnlyPruning(layers=[0])  # of two: skipping the last one would change nothing


@dataclass
class Running:
    """A server that runs.

    Attributes:
        loaded: the pruned model and its tokenizer.
        service: what is served.
        url: of `/v1`.
        instance: uvicorn's server.
        pace: seconds that each forward pass takes longer.
        passes: forward passes since the start.
        failure: raised by the next forward pass.
    """

    loaded: LoadedModel
    service: Service
    url: str
    instance: Any
    pace: float = 0
    passes: int = 0
    failure: Exception | None = None

    def client(self, **options: Any) -> openai.OpenAI:
        """The official client; it does not try again."""
        return openai.OpenAI(**{"base_url": self.url, "api_key": "any", "max_retries": 0, "timeout": 30} | options)

    def http(self, **options: Any) -> httpx.Client:
        """For requests that no well-behaved client sends."""
        return httpx.Client(**{"base_url": self.url.removesuffix("/v1"), "timeout": 30} | options)

    def metric(self, name: str) -> float:
        """A value of /metrics, such as `requests_total{outcome="ok"}`; 0 if it is not there."""
        with self.http() as http:
            lines = http.get("/metrics").text.splitlines()
        return next((float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"stageprune_{name} ")), 0)

    def wait_until(self, condition: Callable[[], bool], seconds: float = 10) -> None:
        """Raises AssertionError if that does not come true."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "it did not happen in time"
            time.sleep(0.005)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port, for a socket."""
        return "127.0.0.1", int(self.url.removesuffix("/v1").rpartition(":")[2])

    def raw(self, content: bytes) -> socket.socket:
        """A connection on which this was sent."""
        connection = socket.create_connection(self.address, 10)
        connection.sendall(content)
        return connection

    def asked(self, request: dict[str, Any]) -> socket.socket:
        """A client that has asked for a completion and reads nothing of its answer; it is gone when this is closed."""
        body = json.dumps(request).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        return self.raw(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)

    def idle(self) -> bool:
        """Whether nothing waits and nothing runs."""
        return self.service.worker.queued == self.service.worker.running == 0


@contextmanager
def serving(loaded: LoadedModel, api_key: str | None = None, **limits: Any) -> Iterator[Running]:
    """Serve a model as it is, under the name `tiny`."""
    service = Service.of(loaded.model, loaded.tokenizer, "tiny", Limits(**{"max_model_len": CONTEXT} | limits), api_key)
    sock = address.bind("127.0.0.1", 0)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # so that a reader can be slow
    started = threading.Event()
    instance = server.Server(service, started=started.set)
    run = Running(loaded, service, address.url(sock), instance)

    def before(*_: Any) -> None:
        run.passes += 1
        time.sleep(run.pace)
        if run.failure is not None:
            failure, run.failure = run.failure, None
            raise failure

    hook = loaded.model.register_forward_pre_hook(before)
    thread = threading.Thread(target=instance.run, kwargs={"sockets": [sock]})
    thread.start()
    try:
        assert started.wait(20)
        yield run
    finally:
        run.pace = 0
        instance.should_exit = True
        thread.join(20)
        sock.close()
        hook.remove()
        assert not thread.is_alive()
        assert service.worker.join(10)


@contextmanager
def running(folder: Path, end: int | None = None, **options: Any) -> Iterator[Running]:
    """Serve the model in a folder, pruned by `METHOD`. `end`: its end-of-sequence token."""
    loaded = load(str(folder), dtype="float32")
    loaded.model.generation_config.eos_token_id = end
    sp.prune(loaded.model, METHOD)
    with serving(loaded, **options) as run:
        yield run


def expected(run: Running, prompt: list[int], new_tokens: int) -> list[int]:
    """The greedy answer of the pruned model, as the library gives it; call it while the server is idle."""
    ids = torch.tensor([prompt])
    options = dict(attention_mask=torch.ones_like(ids), do_sample=False)  # without, it takes padding tokens for padding
    return run.loaded.model.generate(ids, max_new_tokens=new_tokens, **options)[0, len(prompt) :].tolist()


def text_of(run: Running, tokens: list[int]) -> str:
    """Decoded at once."""
    return run.loaded.tokenizer.decode(tokens, skip_special_tokens=True)


def chat_tokens(run: Running, messages: list[dict[str, str]]) -> list[int]:
    """A prompt through the chat template."""
    tokenizer = run.loaded.tokenizer
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False).input_ids
