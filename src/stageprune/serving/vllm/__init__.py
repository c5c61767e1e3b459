"""Prefill-only pruning inside vLLM; `compat.py` is the one file that knows vLLM's internals."""
