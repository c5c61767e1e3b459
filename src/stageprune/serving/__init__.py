"""Serving, by engine: `transformers/`, an OpenAI-compatible server of one process, and `vllm/`, a plugin for vLLM.

`vllm_plugin.py` is what vLLM finds.
"""
