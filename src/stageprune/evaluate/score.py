"""How a pruned model does on one answer, against the dense model: sums over its tokens.

Both models predict every token of the answer after the same tokens before it, in one pass each: the context up to the
last prompt token is prefill, the rest decode.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any, Self

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from stageprune.evaluate.agreement import first_difference
from stageprune.evaluate.quality import Case, answer_logits
from stageprune.prefill.responses import end_tokens, plain_generation
from stageprune.pruning import Handle


@dataclass(frozen=True)
class Score:
    """Sums over the tokens of one answer.

    Attributes:
        tokens: how many.
        kl: KL(dense || pruned) over the next token, in nats.
        agreed: tokens whose likeliest prediction is the same in both.
        dense_nll: negative log-likelihood of the answer, dense, in nats.
        nll: likewise, pruned.
        matched: tokens of the pruned model's own greedy answer before it first differs from this one; None where it was
            not asked for.
    """

    tokens: int
    kl: float
    agreed: int
    dense_nll: float
    nll: float
    matched: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """The inverse of `to_dict`.

        Raises:
            KeyError, TypeError, ValueError: if something is missing or wrong.
        """
        matched = data["matched"]
        sums = (float(data[name]) for name in ("kl", "dense_nll", "nll"))
        kl, dense_nll, nll = sums
        return cls(
            int(data["tokens"]), kl, int(data["agreed"]), dense_nll, nll, None if matched is None else int(matched)
        )


@torch.no_grad()
def score(handle: Handle, case: Case) -> Score:
    """Compare a pruned model's predictions on the way through an answer with the dense model's."""
    pruned = answer_logits(handle, case.prompt, case.answer)[0].float().log_softmax(-1)
    dense, answer = case.log_probabilities.to(pruned.device), case.answer[0][:, None]
    return Score(
        tokens=len(pruned),
        kl=float((dense.exp() * (dense - pruned)).sum(-1).double().sum()),
        agreed=int((dense.argmax(-1) == pruned.argmax(-1)).sum()),
        dense_nll=-float(dense.gather(-1, answer).double().sum()),
        nll=-float(pruned.gather(-1, answer).double().sum()),
    )


def dense_score(case: Case, matched: int | None) -> Score:
    """What `score` is for the dense model itself."""
    nll = -float(case.log_probabilities.gather(-1, case.answer[0][:, None]).double().sum())
    return Score(case.answer.shape[1], 0.0, case.answer.shape[1], nll, nll, matched)


def greedy_answer(model: Any, prompt: Sequence[int], most: int, until_not: Sequence[int] | None = None) -> list[int]:
    """What a model answers greedily, dense or as it is pruned; whatever its `generation_config` asks for is set aside.

    Args:
        model: any.
        prompt: token ids.
        most: number of tokens, after which the answer is cut off; an end-of-sequence token ends it before, and is part
            of it.
        until_not: an answer; stop at the first token that differs from it.
    """
    ids = torch.tensor([list(prompt)], device=model.device)
    stop = [] if until_not is None else [_FirstDifference(ids.shape[1], until_not)]
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(plain_generation(model, end_tokens(model)))
        sequence = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=most,
            stopping_criteria=StoppingCriteriaList(stop),
        )
    answer: list[int] = sequence[0, ids.shape[1] :].tolist()
    return answer


def matched_tokens(model: Any, prompt: Sequence[int], answer: Sequence[int]) -> int:
    """How many tokens a model's own greedy answer has in common with this one before the first difference."""
    place = first_difference(answer, greedy_answer(model, prompt, len(answer), answer))
    return len(answer) if place is None else place


class _FirstDifference(StoppingCriteria):
    """Ends the generation of a single sequence that differs from an expected answer."""

    def __init__(self, start: int, expected: Sequence[int]) -> None:
        self._start, self._expected = start, list(expected)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        place = input_ids.shape[1] - self._start - 1
        differs = int(input_ids[0, -1]) != self._expected[place]
        return torch.tensor([differs], device=input_ids.device)
