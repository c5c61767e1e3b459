"""Prefill-only pruning: which layers the prompt skips, and what a skipped layer still does."""
