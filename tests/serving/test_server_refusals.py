"""What is refused, with which status, and in the shape that OpenAI's clients read."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from serving_support import CONTEXT, Running, running

COMPLETION = {"model": "tiny", "prompt": "a"}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}


def check(response: httpx.Response, status: int, says: str = "", param: str | None = None) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.json().keys() == {"error"}
    error: dict[str, Any] = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert says in error["message"]
    assert error["param"] == param
    return error


WRONG = {
    "no-prompt": ({"model": "tiny"}, "prompt", "required"),
    "empty-prompt": (COMPLETION | {"prompt": ""}, "prompt", "empty"),
    "no-prompts": (COMPLETION | {"prompt": []}, "prompt", ""),
    "one-empty-prompt": (COMPLETION | {"prompt": ["a", ""]}, "prompt", "empty"),
    "no-tokens": (COMPLETION | {"prompt": [[]]}, "prompt", ""),
    "mixed-prompts": (COMPLETION | {"prompt": ["a", 1]}, "prompt", ""),
    "unknown-token": (COMPLETION | {"prompt": [1, 261]}, "prompt", "token 261: the model knows tokens 0 to 260"),
    "negative-token": (COMPLETION | {"prompt": [-1]}, "prompt", ""),
    "huge-token": (COMPLETION | {"prompt": [10**30]}, "prompt", ""),
    "true-token": (COMPLETION | {"prompt": [True]}, "prompt", ""),
    "half-a-character": (COMPLETION | {"prompt": "a\ud800"}, "prompt", "Unicode"),
    "long-prompt": (COMPLETION | {"prompt": [5] * CONTEXT}, "prompt", f"the prompt has {CONTEXT} tokens"),
    "long-answer": (COMPLETION | {"max_tokens": CONTEXT}, "prompt", f"the answer up to {CONTEXT}"),
    "zero-tokens": (COMPLETION | {"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
    "half-a-token": (COMPLETION | {"max_tokens": 1.5}, "max_tokens", ""),
    "tokens-as-text": (COMPLETION | {"max_tokens": "5"}, "max_tokens", ""),
    "cold": (COMPLETION | {"temperature": -0.1}, "temperature", ""),
    "hot": (COMPLETION | {"temperature": 2.1}, "temperature", ""),
    "top-p-zero": (COMPLETION | {"top_p": 0}, "top_p", ""),
    "top-p-large": (COMPLETION | {"top_p": 1.5}, "top_p", ""),
    "huge-seed": (COMPLETION | {"seed": 2**63}, "seed", ""),
    "no-answers": (COMPLETION | {"n": 0}, "n", ""),
    "many-answers": (COMPLETION | {"n": 17}, "n", "may have 16 answers"),
    "many-prompts": (COMPLETION | {"prompt": ["a"] * 17}, "prompt", "may have 16 answers"),
    "empty-stop": (COMPLETION | {"stop": ""}, "stop", ""),
    "five-stops": (COMPLETION | {"stop": ["a"] * 5}, "stop", ""),
    "logprobs": (COMPLETION | {"logprobs": 6}, "logprobs", ""),
    "echo": (COMPLETION | {"echo": True}, "echo", "does not support"),
    "penalty": (COMPLETION | {"frequency_penalty": 0.5}, "frequency_penalty", "does not support"),
    "unheard-of": (COMPLETION | {"unheard_of": 1}, "unheard_of", "does not support"),
    "stream-options": (COMPLETION | {"stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
    "no-messages": (CHAT | {"messages": []}, "messages", ""),
    "role": (CHAT | {"messages": [{"role": "cook", "content": "a"}]}, "messages", ""),
    "no-content": (CHAT | {"messages": [{"role": "user"}]}, "messages", ""),
    "image": (
        CHAT | {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages",
        "parts of type 'image_url' are not supported",
    ),
    "template": (
        CHAT | {"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]},
        "messages",
        "the system speaks first",
    ),
    "long-chat": (CHAT | {"messages": [{"role": "user", "content": "ab" * CONTEXT}]}, "messages", "context of"),
    "tools": (CHAT | {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "does not support"),
    "top-logprobs": (CHAT | {"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
    "many-top-logprobs": (CHAT | {"logprobs": True, "top_logprobs": 21}, "top_logprobs", ""),
    "two-maxima": (CHAT | {"max_tokens": 2, "max_completion_tokens": 3}, "max_tokens", "give one"),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_wrong_parameters(served: Running, name: str, stream: bool) -> None:
    body, param, says = WRONG[name]
    if stream and "stream_options" in body:
        pytest.skip("right with a stream")
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    passes = served.passes
    with served.http() as http:
        content = json.dumps(body | {"stream": stream})  # in ASCII: half a character has no UTF-8
        check(http.post(path, content=content, headers={"content-type": "application/json"}), 400, says, param)
    assert served.passes == passes, "found out before the model runs"


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b'"text"', b"\xff\xfe", b"[" * 100_000, b'{"model": "tiny", "prompt": ' + b"1" * 5000],
    ids=["empty", "cut", "list", "null", "text", "no-utf8", "deep", "long-number"],
)
def test_malformed_bodies(served: Running, content: bytes) -> None:
    with served.http() as http:
        for path in ("/v1/completions", "/v1/chat/completions"):
            check(http.post(path, content=content, headers={"content-type": "application/json"}), 400)


def test_infinite_numbers(served: Running) -> None:
    """Python's JSON knows them."""
    with served.http() as http:
        for name in ("temperature", "top_p"):
            for value in (float("nan"), float("inf")):
                body = json.dumps(COMPLETION | {name: value})
                response = http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
                check(response, 400, "", name)


def test_other_content_types(served: Running) -> None:
    """A web page can make a browser send text, but not JSON, to this machine."""
    with served.http() as http:
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
            check(http.post("/v1/completions", content=json.dumps(COMPLETION), headers={"content-type": kind}), 400)


def test_unknown_model_and_path(served: Running) -> None:
    with served.http() as http:
        for path, body in (("completions", COMPLETION), ("chat/completions", CHAT)):
            error = check(http.post(f"/v1/{path}", json=body | {"model": "gpt"}), 404, "'tiny'", "model")
            assert error["code"] == "model_not_found"
        check(http.get("/v1/nothing"), 404)
        response = http.get("/v1/completions")
        check(response, 405)
        assert response.headers["allow"] == "POST"
    with served.client() as client, pytest.raises(openai.NotFoundError, match="there is no model"):
        client.completions.create(model="gpt", prompt="a")


@pytest.fixture(scope="module")
def small(tiny_folder: Path) -> Iterator[Running]:
    """A server with small limits and a key."""
    limits: dict[str, Any] = dict(max_queue=1, max_body=2000, body_s=0.3, max_new_tokens=100)
    with running(tiny_folder, api_key="secret", **limits) as run:
        yield run


def authorized(run: Running) -> httpx.Client:
    return run.http(headers={"Authorization": "Bearer secret"})


def test_api_key(small: Running) -> None:
    with small.http() as http:
        assert http.get("/health").json() == {"status": "ok"}
        for path in ("/v1/models", "/metrics", "/openapi.json", "/nothing"):
            for header in (
                {},
                {"Authorization": "Bearer secre"},
                {"Authorization": "secret"},
                {"Authorization": b"\xff"},
            ):
                response = http.get(path, headers=header)
                assert check(response, 401)["code"] == "invalid_api_key"
        check(http.post("/v1/completions", json=COMPLETION), 401)
    with small.client(api_key="secret") as client:
        assert client.completions.create(model="tiny", prompt="a", max_tokens=1).usage.completion_tokens == 1
    with small.client(api_key="other") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_large_bodies(small: Running) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(1000):
            yield b"x" * 1000

    with authorized(small) as http:
        for content in (b"x" * 2001, b"x" * 3_000_000, endless()):
            response = http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
            assert check(response, 413, "2000 bytes")["code"] == "too_large"
        filled = json.dumps(COMPLETION | {"max_tokens": 1}).ljust(2000)
        response = http.post("/v1/completions", content=filled, headers={"content-type": "application/json"})
        assert response.status_code == 200


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\nContent-Length: 100\r\n\r\n"


def test_slow_bodies(small: Running) -> None:
    with small.raw(HEAD + b'{"model"') as connection:
        answer = connection.recv(10_000)
        while b"did not arrive" not in answer:
            more = connection.recv(10_000)
            assert more, answer
            answer += more
    assert answer.startswith(b"HTTP/1.1 408")


def test_bodies_that_end_early(small: Running) -> None:
    for _ in range(20):
        small.raw(HEAD + b'{"model"').close()
    for _ in range(20):
        small.raw(b"POST /v1/completions HTTP/1.1\r\nNot a header").close()
    with authorized(small) as http:
        assert http.post("/v1/completions", json=COMPLETION).status_code == 200
    small.wait_until(small.idle)


def test_limit_of_new_tokens(small: Running) -> None:
    with authorized(small) as http:
        check(http.post("/v1/completions", json=COMPLETION | {"max_tokens": 101}), 400, "at most 100", "max_tokens")
        usage = http.post("/v1/chat/completions", json=CHAT).json()["usage"]
    assert usage["completion_tokens"] == 100


def test_full_queue(small: Running) -> None:
    small.pace = 0.05
    statuses: list[int] = []

    def ask(tokens: int) -> None:
        with authorized(small) as http:
            statuses.append(http.post("/v1/completions", json=COMPLETION | {"max_tokens": tokens}).status_code)

    first, second = threading.Thread(target=ask, args=(20,)), threading.Thread(target=ask, args=(1,))
    first.start()
    small.wait_until(lambda: small.service.worker.running == 1)
    second.start()
    small.wait_until(lambda: small.service.worker.queued == 1)
    with authorized(small) as http:
        for stream in (False, True):
            response = http.post("/v1/completions", json=COMPLETION | {"stream": stream})
            assert check(response, 429, "1 requests may wait")["code"] == "queue_full"
            assert int(response.headers["retry-after"]) >= 1
        assert http.get("/health").status_code == 200
        check(http.post("/v1/completions", json=COMPLETION | {"prompt": ""}), 429)
    first.join(20)
    second.join(20)
    small.pace = 0
    assert statuses == [200, 200], "those that were accepted are answered"
    with authorized(small) as http:
        assert http.post("/v1/completions", json=COMPLETION).status_code == 200
