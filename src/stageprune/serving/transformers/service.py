"""All parts of a server but HTTP."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass
from typing import Any

from stageprune.serving.transformers.encode import Encoder
from stageprune.serving.transformers.generation import Generator
from stageprune.serving.transformers.limits import Limits
from stageprune.serving.transformers.metrics import Metrics
from stageprune.serving.transformers.worker import Worker


@dataclass(frozen=True)
class Service:
    """One model, and what serves it.

    Attributes:
        name: of the model, as clients give it.
        limits: of requests.
        api_key: that clients must send; None: they need not.
        encoder: from texts to tokens.
        worker: generates.
        metrics: of both.
        created: when, in seconds since 1970.
    """

    name: str
    limits: Limits
    api_key: str | None
    encoder: Encoder
    worker: Worker
    metrics: Metrics
    created: int

    @classmethod
    def of(cls, model: Any, tokenizer: Any, name: str, limits: Limits, api_key: str | None = None) -> Service:
        """Serve a model as it is: pruned, if it was given to `prune()` before."""
        metrics = Metrics()
        # The worker's thread decodes with a copy: tokenizers refuse to be used by two threads at some moments.
        worker = Worker(Generator(model, copy.deepcopy(tokenizer), metrics), limits.max_queue)
        metrics.watch(worker)
        encoder = Encoder(tokenizer, model.get_input_embeddings().weight.shape[0])
        return cls(name, limits, api_key, encoder, worker, metrics, int(time.time()))
