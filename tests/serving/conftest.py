"""A tiny model, and a server for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra [serve]")
pytest.importorskip("openai", reason="the tests of the server use the official client")

from serving_support import Running, running
from stageprune.models import load
from tiny import write_gguf

TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'system' and not loop.first %}"
    "{{ raise_exception('the system speaks first') }}{% endif %}"
    "<|im_start|>{{ message['role'] }}: {{ message['content'] }}<|im_end|>{% endfor %}"
)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of two layers that never ends by itself, and its tokenizer of single bytes."""
    folder = tmp_path_factory.mktemp("served")
    loaded = load(str(write_gguf(folder / "tiny.gguf")), dtype="float32")
    loaded.model.generation_config.eos_token_id = None
    loaded.tokenizer.chat_template = TEMPLATE
    loaded.model.save_pretrained(folder / "tiny")
    loaded.tokenizer.save_pretrained(folder / "tiny")
    return folder / "tiny"


@pytest.fixture(scope="module")
def shared(tiny_folder: Path) -> Iterator[Running]:
    """A server with a pruned model, for the tests of a file; they leave it idle."""
    with running(tiny_folder) as run:
        yield run


@pytest.fixture
def served(shared: Running) -> Iterator[Running]:
    """The shared server, idle and fast before and after the test."""
    yield shared
    shared.pace = 0
    shared.wait_until(shared.idle)
