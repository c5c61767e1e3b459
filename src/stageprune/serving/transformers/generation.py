"""One job on the model: tokens are chosen by `generate()`, and told as soon as they are known."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from stageprune.errors import UnsupportedModelError
from stageprune.families.decoder import find_decoder
from stageprune.serving.transformers.jobs import FinishReason, Job, Piece, Row, TokenScore
from stageprune.serving.transformers.metrics import Metrics
from stageprune.serving.transformers.text import Detokenizer, StopStrings

_LEAST_LOGPROB = -9999.0  # JSON has no infinity; OpenAI's API says this
_GREEDY_BELOW = 0.01  # where dividing logits by the temperature would overflow


class Generator:
    """Does jobs on one model, one at a time.

    Args:
        model: a causal language model, pruned or not.
        tokenizer: of its own: others may use theirs in other threads meanwhile.
        metrics: of the server.
    """

    def __init__(self, model: Any, tokenizer: Any, metrics: Metrics) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._layers = _layers(model)
        ends = model.generation_config.eos_token_id
        self._ends = frozenset([ends] if isinstance(ends, int) else ends or ())

    def __call__(self, job: Job) -> None:
        """Generate all rows of a job.

        Raises:
            Interrupted: within a layer after `job.interrupt` was set.
        """
        if job.sampling.seed is None:
            torch.seed()  # an earlier request may have set one
        else:
            torch.manual_seed(job.sampling.seed)
        with _interruptible(self._layers, job):
            for choice, row in enumerate(job.rows):
                self._generate(job, choice, row)

    def _generate(self, job: Job, choice: int, row: Row) -> None:
        self._metrics.prompt_tokens.inc(len(row.prompt))
        detokenizer = Detokenizer(self._tokenizer, row.prompt)
        scores = None if job.sampling.top_logprobs is None else _Scores(self._tokenizer, job.sampling.top_logprobs)
        answer = _Answer(job, choice, row, detokenizer, scores, self._ends, self._metrics)
        input_ids = torch.tensor([list(row.prompt)], device=self._model.device)
        self._model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=row.max_new_tokens,
            stopping_criteria=StoppingCriteriaList([answer]),
            logits_processor=LogitsProcessorList([] if scores is None else [scores]),
            num_beams=1,  # whatever the model's own settings say: beams cannot be streamed
            **_choosing(job),
        )
        answer.close()


def _choosing(job: Job) -> dict[str, Any]:
    if job.sampling.temperature < _GREEDY_BELOW:
        return {"do_sample": False}
    return {
        "do_sample": True,
        "temperature": job.sampling.temperature,
        "top_p": job.sampling.top_p,
        "top_k": 0,  # transformers' default is 50
    }


class _Scores(LogitsProcessor):
    """Reads the log-probabilities of each step, before temperature and top_p; changes nothing."""

    def __init__(self, tokenizer: Any, top: int) -> None:
        self._tokenizer = tokenizer
        self._top = top
        self._logprobs = torch.empty(0)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._logprobs = torch.log_softmax(scores[0].float(), -1)
        return scores

    def of(self, token: int) -> TokenScore:
        """Of the token that was chosen."""
        values, tokens = self._logprobs.topk(min(self._top, len(self._logprobs)))
        top = zip(tokens.tolist(), values.tolist(), strict=True)
        return TokenScore(
            self._text(token),
            _finite(float(self._logprobs[token])),
            tuple((self._text(other), _finite(value)) for other, value in top),
        )

    def _text(self, token: int) -> str:
        text: str = self._tokenizer.decode([token], clean_up_tokenization_spaces=False)
        # A part of a character; many tokens would have the same text.
        return f"token_id:{token}" if "\N{REPLACEMENT CHARACTER}" in text else text


class _Answer(StoppingCriteria):
    """Follows one `generate()` call, tells its text, and ends it at a stop string."""

    def __init__(
        self,
        job: Job,
        choice: int,
        row: Row,
        detokenizer: Detokenizer,
        scores: _Scores | None,
        ends: frozenset[int],
        metrics: Metrics,
    ) -> None:
        self._job, self._choice, self._row = job, choice, row
        self._detokenizer, self._scores, self._ends = detokenizer, scores, ends
        self._stops = StopStrings(job.sampling.stop)
        self._metrics = metrics
        self._length = 0
        self._told = 0
        self._untold: list[TokenScore] = []
        self._first_at = self._last_at = 0.0
        self._finished = False

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Take the new tokens of `input_ids`, `[1, length]`; answers whether they end the sequence, `[1]`."""
        self._job.check()
        for token in input_ids[0, len(self._row.prompt) + self._length :].tolist():
            if not self._finished:  # some devices go on for a step, and speculation gives several tokens
                self._take(token)
        return torch.full((1,), self._finished, dtype=torch.bool, device=input_ids.device)

    def close(self) -> None:
        """The call has ended, perhaps by a rule of the model's own."""
        if not self._finished:
            self._finish("stop", self._rest())

    def _take(self, token: int) -> None:
        self._note_time()
        self._length += 1
        self._metrics.generated_tokens.inc()
        if token in self._ends:
            self._finish("stop", self._rest())
            return
        if self._scores is not None:
            self._untold.append(self._scores.of(token))
        text = self._stops.push(self._detokenizer.push(token))
        if self._stops.found:
            self._finish("stop", text)
        elif self._length == self._row.max_new_tokens:
            text += self._rest()
            self._finish("stop" if self._stops.found else "length", text)
        elif text:
            self._tell(text)

    def _note_time(self) -> None:
        self._last_at = time.perf_counter()
        if not self._length:
            self._first_at = self._last_at
            if not self._choice:
                self._metrics.first_token_s.observe(self._first_at - self._job.arrived)

    def _rest(self) -> str:
        text = self._stops.push(self._detokenizer.flush())
        return text + self._stops.flush()

    def _finish(self, reason: FinishReason, text: str) -> None:
        self._finished = True
        if self._length > 1:
            self._metrics.token_s.observe((self._last_at - self._first_at) / (self._length - 1))
        self._tell(text, reason)

    def _tell(self, text: str, finish: FinishReason | None = None) -> None:
        piece = Piece(self._choice, text, self._length - self._told, tuple(self._untold), finish)
        self._told = self._length
        self._untold.clear()
        self._job.deliver(piece)


@contextmanager
def _interruptible(layers: Iterable[nn.Module], job: Job) -> Iterator[None]:
    """Inside, a forward pass ends between two layers when the job shall stop: a long prompt can take a minute."""

    def check(*_: Any) -> None:
        job.check()

    hooks = [layer.register_forward_pre_hook(check) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _layers(model: Any) -> tuple[nn.Module, ...]:
    try:
        return find_decoder(model).layers
    except UnsupportedModelError:  # served dense; it is interrupted between tokens
        return ()


def _finite(value: float) -> float:
    return value if value > _LEAST_LOGPROB else _LEAST_LOGPROB
