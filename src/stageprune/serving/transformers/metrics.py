"""What Prometheus reads at /metrics."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from stageprune.serving.transformers.worker import Worker

_TTFT = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)
_TPOT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class Metrics:
    """Counters of one server, in a registry of its own.

    Attributes:
        registry: of Prometheus.
        requests: for completions, by outcome: ok, cancelled, failed, or why they were refused.
        prompt_tokens: that were processed; those of a prompt with several answers count for each of them.
        generated_tokens: end-of-sequence tokens included.
        first_token_s: TTFT, from the arrival of the request, so with its time in the queue.
        token_s: TPOT, the mean time of the tokens after the first, of each answer.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        common: dict[str, Any] = {"namespace": "stageprune", "registry": self.registry}
        self.requests = Counter("requests", "Requests for completions by outcome.", ["outcome"], **common)
        self.prompt_tokens = Counter("prompt_tokens", "Prompt tokens processed.", **common)
        self.generated_tokens = Counter("generated_tokens", "Tokens generated.", **common)
        self.first_token_s = Histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token.", buckets=_TTFT, **common
        )
        self.token_s = Histogram(
            "time_per_output_token_seconds", "Mean time of an answer's later tokens.", buckets=_TPOT, **common
        )
        self._queued = Gauge("queue_length", "Requests that wait.", **common)
        self._running = Gauge("running_requests", "Requests whose answer is generated now.", **common)

    def watch(self, worker: Worker) -> None:
        """Let the gauges show this worker."""
        self._queued.set_function(lambda: worker.queued)
        self._running.set_function(lambda: worker.running)
