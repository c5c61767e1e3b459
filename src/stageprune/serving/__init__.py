"""Serving: the plugin that makes vLLM prune, and a small OpenAI-compatible server on transformers."""
