"""Serving pruned models over HTTP. Nothing is imported here: each server needs an extra of its own."""
