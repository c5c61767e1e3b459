"""How far a pruned model's predictions are from the dense model's, token by token.

The dense model answers each prompt greedily; both models then predict every token of that answer after the same tokens
before it, in one pass each (context up to the last prompt token is prefill, the rest decode). Compared are the two
distributions over the next token, so one difference does not count many times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from stageprune.pruning import Handle


@dataclass(frozen=True)
class Case:
    """A prompt, the dense model's answer, and what it predicted on the way.

    Attributes:
        prompt: token ids, `[1, N]`.
        answer: token ids, `[1, n]`.
        log_probabilities: of the dense model for each token of the answer, `[n, vocab_size]`, float32.
    """

    prompt: torch.Tensor
    answer: torch.Tensor
    log_probabilities: torch.Tensor


@dataclass(frozen=True)
class Quality:
    """Closeness to the dense model, over all answer tokens.

    Attributes:
        kl: mean of KL(dense || pruned) per token, in nats.
        agreement: share of tokens whose likeliest prediction is the same.
        tokens: how many were compared.
        kl_per_prompt: mean KL of each prompt's answer.
        agreement_per_prompt: agreement of each prompt's answer.
    """

    kl: float
    agreement: float
    tokens: int
    kl_per_prompt: tuple[float, ...]
    agreement_per_prompt: tuple[float, ...]

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready data."""
        return asdict(self)


def dense_cases(
    model: Any, prompts: Sequence[Sequence[int]], new_tokens: int, on_case: Callable[[], object] = lambda: None
) -> list[Case]:
    """Let an unpruned model answer.

    Args:
        model: dense.
        prompts: token ids of each prompt.
        new_tokens: length of the answers; the end-of-sequence token does not end them early.
        on_case: called after each prompt, such as to advance a progress bar.
    """
    cases = []
    for prompt in prompts:
        cases.append(case_of(model, prompt, dense_answer(model, prompt, new_tokens)))
        on_case()
    return cases


@torch.no_grad()
def dense_answer(model: Any, prompt: Sequence[int], new_tokens: int) -> list[int]:
    """What an unpruned model answers greedily: `new_tokens` token ids."""
    ids = torch.tensor([list(prompt)], device=model.device)
    sequence = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
    )
    answer: list[int] = sequence[0, ids.shape[1] :].tolist()
    return answer


@torch.no_grad()
def case_of(model: Any, prompt: Sequence[int], answer: Sequence[int]) -> Case:
    """What an unpruned model predicts on the way through an answer."""
    sequence = torch.tensor([[*prompt, *answer]], device=model.device)
    logits = model(input_ids=sequence[:, :-1], logits_to_keep=len(answer), use_cache=False).logits
    ids, rest = sequence[:, : len(prompt)], sequence[:, len(prompt) :]
    return Case(ids, rest, logits[0].float().log_softmax(-1))


@torch.no_grad()
def answer_logits(handle: Handle, prompt: torch.Tensor, answer: torch.Tensor) -> torch.Tensor:
    """The pruned model's logits for each token of a given answer, `[batch, n, vocab_size]`.

    Args:
        handle: of the pruned model.
        prompt: token ids, `[batch, N]`.
        answer: token ids, `[batch, n]` with n >= 1.
    """
    tokens = torch.cat((prompt, answer[:, :-1]), dim=1)
    with handle.stage(prefill=prompt.shape[1] - 1):
        logits: torch.Tensor = handle.model(input_ids=tokens, logits_to_keep=answer.shape[1], use_cache=False).logits
    return logits


def closeness(handle: Handle, cases: Sequence[Case], on_case: Callable[[], object] = lambda: None) -> Quality:
    """Compare a pruned model with the dense model's answers; see the module's docstring."""
    divergences, agreements = [], []
    for case in cases:
        pruned = answer_logits(handle, case.prompt, case.answer)[0].float().log_softmax(-1)
        dense = case.log_probabilities
        divergences.append((dense.exp() * (dense - pruned)).sum(-1).double())
        agreements.append((dense.argmax(-1) == pruned.argmax(-1)).double())
        on_case()
    return Quality(
        kl=float(torch.cat(divergences).mean()),
        agreement=float(torch.cat(agreements).mean()),
        tokens=sum(len(part) for part in divergences),
        kl_per_prompt=tuple(float(part.mean()) for part in divergences),
        agreement_per_prompt=tuple(float(part.mean()) for part in agreements),
    )
