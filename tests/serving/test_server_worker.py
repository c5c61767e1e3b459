"""Clients that go away, read slowly, or meet a failing model; and what the metrics say about it."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

import httpx
import openai
import pytest

from serving_support import CONTEXT, Running, expected, running, text_of

LONG = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 200, "temperature": 0}


def gone_within_a_token(served: Running) -> None:
    """The client has just gone: the model stops, and the worker goes on."""
    served.wait_until(served.idle, 5)
    passes = served.passes
    assert passes < 50, "the answer would have needed 200"
    time.sleep(0.1)
    assert served.passes == passes
    served.pace = 0
    with served.client() as client:
        assert client.completions.create(model="tiny", prompt="a", max_tokens=3).usage.completion_tokens == 3


def test_aborted_stream(served: Running) -> None:
    cancelled = served.metric('requests_total{outcome="cancelled"}')
    served.pace, served.passes = 0.02, 0
    with served.client() as client, client.completions.create(**LONG, stream=True) as stream:
        for _ in zip(range(3), stream, strict=False):
            pass
    gone_within_a_token(served)
    assert served.metric('requests_total{outcome="cancelled"}') == cancelled + 1


def test_aborted_request_without_a_stream(served: Running) -> None:
    cancelled = served.metric('requests_total{outcome="cancelled"}')
    served.pace, served.passes = 0.02, 0
    with served.asked(LONG):
        served.wait_until(lambda: served.passes > 3)
    gone_within_a_token(served)
    assert served.metric('requests_total{outcome="cancelled"}') == cancelled + 1


def test_aborted_while_waiting(served: Running) -> None:
    """What waits and is given up never reaches the model."""
    served.pace, served.passes = 0.02, 0
    with served.client() as client, client.completions.create(**LONG, stream=True) as stream:
        next(iter(stream))
        with served.asked(LONG):
            served.wait_until(lambda: served.service.worker.queued == 1)
        served.wait_until(lambda: served.service.worker.queued == 0)
        assert served.service.worker.running == 1
    gone_within_a_token(served)


def test_aborted_in_a_long_prompt(served: Running) -> None:
    """A layer is the unit: the second one is not begun."""
    entered = threading.Event()
    released = threading.Event()
    begun: list[str] = []

    def wait(*_: object) -> None:
        begun.append("first")
        entered.set()
        released.wait(10)

    layers = served.loaded.model.model.layers
    hooks = [
        layers[0].register_forward_hook(wait),
        layers[1].register_forward_hook(lambda *_: begun.append("second")),
    ]
    try:
        with served.asked(LONG):
            assert entered.wait(20)
        job = served.service.worker._running
        assert job is not None
        served.wait_until(lambda: job.interrupt is not None)
        released.set()
        served.wait_until(served.idle)
    finally:
        released.set()
        for hook in hooks:
            hook.remove()
    assert begun == ["first"]


def test_slow_reader_blocks_nobody(served: Running) -> None:
    """It reads nothing at all of a long answer with many log-probabilities, in a socket with small buffers."""
    body = b'{"model": "tiny", "messages": [{"role": "user", "content": "a"}], "stream": true, "logprobs": true, '
    body += b'"top_logprobs": 20}'
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    )
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.settimeout(20)
    slow.connect(served.address)
    with slow:
        answered = served.metric('requests_total{outcome="ok"}')
        slow.sendall(head % len(body) + body)
        assert slow.recv(1)
        with served.client(timeout=20) as client:
            for _ in range(3):
                assert client.completions.create(model="tiny", prompt="a", max_tokens=3).usage.completion_tokens == 3
        served.wait_until(served.idle)
        assert served.metric('requests_total{outcome="ok"}') == answered + 3, (
            "the slow one has its answer still to come"
        )
        received = b""
        while not received.endswith(b"0\r\n\r\n"):
            part = slow.recv(1 << 16)
            assert part
            received += part
    tokens = served.loaded.tokenizer("<|im_start|>user: a<|im_end|>", add_special_tokens=False).input_ids
    assert received.count(b'"top_logprobs"') == CONTEXT - len(tokens), "all of it is still there"
    assert b"data: [DONE]" in received


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_failing_model(served: Running, stream: bool) -> None:
    failed = served.metric('requests_total{outcome="failed"}')
    served.failure = RuntimeError("a bug, with details of the machine")
    with served.http() as http:
        response = http.post("/v1/completions", json=LONG | {"stream": stream})
        assert response.status_code == 500
        assert response.json()["error"]["type"] == "server_error"
        assert "details" not in response.text
        assert http.get("/health").status_code == 200
    assert served.metric('requests_total{outcome="failed"}') == failed + 1
    with served.client() as client:
        text = client.completions.create(**LONG | {"max_tokens": 5}).choices[0].text
    assert text == text_of(served, expected(served, [5, 6, 7], 5))


def test_model_that_fails_within_a_stream(served: Running) -> None:
    with served.client() as client:
        stream = iter(client.completions.create(**LONG, stream=True))
        served.pace = 0.02
        next(stream)
        served.failure = ValueError("a bug")
        with pytest.raises(openai.APIError, match="the model failed: ValueError"):
            list(stream)
        served.pace = 0
        assert client.completions.create(model="tiny", prompt="a", max_tokens=3).usage.completion_tokens == 3


def test_out_of_memory_is_a_failure_of_one_request(served: Running) -> None:
    served.failure = MemoryError()
    with served.http() as http:
        assert http.post("/v1/completions", json=LONG).status_code == 500
        assert http.post("/v1/completions", json=LONG | {"max_tokens": 2}).status_code == 200


def test_metrics(tiny_folder: Path) -> None:
    with running(tiny_folder) as run:
        run.pace = 0.01
        with run.client() as client:
            client.completions.create(model="tiny", prompt=[5, 6, 7], max_tokens=11)
            client.completions.create(model="tiny", prompt=[5, 6], max_tokens=1)
            for wrong in ({"model": "other"}, {"max_tokens": CONTEXT}):
                with pytest.raises(openai.APIStatusError):
                    client.completions.create(**{"model": "tiny", "prompt": "a"} | wrong)
            client.models.list()
        outcomes = {
            name: run.metric(f'requests_total{{outcome="{name}"}}') for name in ("ok", "unknown_model", "invalid")
        }
        assert outcomes == {"ok": 2, "unknown_model": 1, "invalid": 1}
        assert run.metric("prompt_tokens_total") == 5
        assert run.metric("generated_tokens_total") == 12
        assert run.metric("time_to_first_token_seconds_count") == 2
        assert run.metric("time_to_first_token_seconds_sum") >= 0.02
        assert run.metric("time_per_output_token_seconds_count") == 1, "one answer had later tokens"
        assert 0.01 <= run.metric("time_per_output_token_seconds_sum") < 0.1
        assert run.metric("queue_length") == run.metric("running_requests") == 0
        run.pace = 0.05
        threads = [
            threading.Thread(target=httpx.post, args=(f"{run.url}/completions",), kwargs={"json": LONG, "timeout": 1.5})
            for _ in range(3)
        ]
        for thread in threads:
            thread.run = _quietly(thread.run)  # type: ignore[method-assign]
            thread.start()
        run.wait_until(lambda: (run.service.worker.queued, run.service.worker.running) == (2, 1))
        assert (run.metric("queue_length"), run.metric("running_requests")) == (2, 1)
        for thread in threads:
            thread.join()
        run.wait_until(run.idle)
        assert run.metric('requests_total{outcome="cancelled"}') == 3


def _quietly(run):  # type: ignore[no-untyped-def]
    def quiet() -> None:
        with pytest.raises(httpx.TimeoutException):
            run()

    return quiet
