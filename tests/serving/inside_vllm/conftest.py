"""Tests inside vLLM: `make test-vllm`."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-vllm has an environment with it")
