"""Serving: the plugin that makes vLLM prune, and an OpenAI-compatible server of one process on transformers.

What vLLM needs lies in `vllm/` and `vllm_plugin.py`; everything else is the server.
"""
