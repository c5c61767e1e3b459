"""schemathesis against the OpenAPI document: right and wrong requests, none of which the server does not survive."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("schemathesis", reason="fuzzing needs schemathesis")

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from serving_support import Running, running

CHECKS = [not_a_server_error, content_type_conformance, response_schema_conformance, status_code_conformance]
BOUNDED = settings(
    max_examples=60,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
PATHS = {
    "/health": "GET",
    "/metrics": "GET",
    "/v1/models": "GET",
    "/v1/models/{model}": "GET",
    "/v1/completions": "POST",
    "/v1/chat/completions": "POST",
}


@pytest.fixture(scope="module")
def fuzzed(tiny_folder: Path) -> Iterator[Running]:
    """Short answers, so that many requests fit into the test's time."""
    with running(tiny_folder, max_model_len=64, max_new_tokens=4, max_answers=4) as run:
        yield run
        with run.client() as client:
            assert client.completions.create(model="tiny", prompt="a", max_tokens=1).usage.completion_tokens == 1


@pytest.fixture(scope="module")
def schema(fuzzed: Running) -> Any:
    return schemathesis.openapi.from_url(f"{fuzzed.url.removesuffix('/v1')}/openapi.json")


def test_all_routes_are_described(schema: Any) -> None:
    found = {operation.ok().path: operation.ok().method.upper() for operation in schema.get_all_operations()}
    assert found == PATHS


RIGHT_INPUT: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a b"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a b"}]},
}
RIGHT, WRONG = GenerationMode.POSITIVE, GenerationMode.NEGATIVE
CASES = [(path, RIGHT) for path in PATHS] + [(path, WRONG) for path, method in PATHS.items() if method == "POST"]


@pytest.mark.parametrize(("path", "mode"), CASES, ids=[f"{path}-{mode.value}" for path, mode in CASES])
def test_requests_from_the_schema(fuzzed: Running, schema: Any, path: str, mode: Any) -> None:
    answered: list[int] = []

    @BOUNDED
    @given(data=st.data())
    def fuzz(data: st.DataObject) -> None:
        case = data.draw(schema[path][PATHS[path]].as_strategy(generation_mode=mode))
        if isinstance(case.body, dict) and data.draw(st.integers(0, 3)):
            # Else all would end at the unknown model, or ask for too much.
            case.body["model"] = "tiny"
            for name in ("max_tokens", "max_completion_tokens", "n", "stream_options", "top_logprobs"):
                case.body.pop(name, None)
            if mode is RIGHT and data.draw(st.booleans()):
                # Else many would end at an empty prompt, a template that wants another order of roles, or at 1.0,
                # which JSON Schema takes for an integer.
                case.body |= RIGHT_INPUT[path]
                for name in ("seed", "logprobs"):
                    case.body.pop(name, None)
        response = case.call(timeout=30)
        case.validate_response(response, checks=CHECKS)
        answered.append(response.status_code)

    fuzz()
    with fuzzed.http() as http:
        assert http.get("/health").status_code == 200
    assert answered
    if PATHS[path] == "POST":
        assert answered.count(200) >= 5 if mode is RIGHT else answered.count(400) >= 30


ONE: dict[str, Any] = {"model": "tiny", "prompt": "a b", "max_tokens": 2}
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
NAMES = ["prompt", "max_tokens", "temperature", "top_p", "n", "seed", "stop", "stream", "stream_options", "logprobs"]


def test_one_thing_wrong_in_a_right_request(fuzzed: Running) -> None:
    """What `schemathesis` seldom finds: everything else is right, so it comes further."""
    answered: list[int] = []

    @settings(BOUNDED, max_examples=150)
    @given(changes=st.dictionaries(st.sampled_from(NAMES), VALUES, min_size=1, max_size=2))
    def fuzz(changes: dict[str, Any]) -> None:
        content = json.dumps(ONE | changes)
        response = http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
        assert response.status_code in (200, 400), (content, response.text)
        answered.append(response.status_code)

    with fuzzed.http() as http:
        fuzz()
    assert min(answered.count(200), answered.count(400)) > 5
