"""Measuring what pruning gains and what it costs."""
