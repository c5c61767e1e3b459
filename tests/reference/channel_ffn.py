"""Online channel pruning of one FFN the slow, obviously-right way (arXiv 2602.06822, section 1.9 of the digest).

Everything is on explicit tensors:

- `sizes`: how many channels are retained (R), candidates (C) and pruned (P), and how many are active.
- `add_rows`, `partition`: the prompt's statistics, and the sets that they give.
- `prefill_rows`: the FFN's outputs for tokens of the prompt.
- `decode_step`: the FFN's outputs for the last token of the prompt and for every later one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Weights:
    """`down(act(gate(x)) * up(x))`, or without a gate `down(act(up(x)))`; biases may be None."""

    gate: torch.Tensor | None
    gate_bias: torch.Tensor | None
    up: torch.Tensor
    up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None
    act: Callable[[torch.Tensor], torch.Tensor]
    up_act: Callable[[torch.Tensor], torch.Tensor] = lambda values: values

    @property
    def channels(self) -> int:
        return self.down.shape[1]


@dataclass(frozen=True)
class Sizes:
    """Numbers of channels: in the sets R, C and P, and active for a token."""

    retained: int
    candidates: int
    pruned: int
    active: int

    @property
    def picked(self) -> int:
        """K."""
        return self.active - self.retained


@dataclass(frozen=True)
class Partition:
    """The prompt's ranking, best first, and the sets cut from it."""

    order: list[int]
    retained: list[int]
    candidates: list[int]
    pruned: list[int]
    active: int
    up_sizes: list[float]


def sizes(channels: int, ratio: float, delta: float, multiple: int = 1) -> Sizes:
    """The sizes of the sets for the MLP ratio r and the half-width delta (section 1.4).

    Nothing of it reaches below 0 or above `channels`, at least one channel is computed, and no more are active than
    are computed.
    """
    if ratio == 0:
        return Sizes(channels, 0, 0, channels)
    pruned = min(max(rounded((ratio - delta) * channels), 0), channels - 1)
    active = min(max(rounded((1 - ratio) * channels), 1), channels)
    retained = min(max(rounded((1 - ratio - delta) * channels), 0), channels)
    computed = rounded_up(channels - pruned, multiple, channels)
    active = min(rounded_up(active, multiple, channels), computed)
    retained = min(rounded_up(retained, multiple, channels), active)
    return Sizes(retained, computed - retained, channels - computed, active)


def rounded(value: float) -> int:
    """To nearest, halves up."""
    return math.floor(value + 0.5 + 1e-9)


def rounded_up(value: int, multiple: int, most: int) -> int:
    return min(math.ceil(value / multiple) * multiple, most)


def ranked(scores: torch.Tensor) -> list[int]:
    """Channels by descending score; ties by lower index; NaN counts as more than infinity."""
    values = scores.tolist()
    return sorted(range(len(values)), key=lambda i: (0, 0.0, i) if math.isnan(values[i]) else (1, -values[i], i))


def column_norms(ffn: Weights) -> torch.Tensor:
    """`c_i`, the norm of what channel i adds per unit of activation."""
    return torch.linalg.vector_norm(ffn.down.double(), dim=0)


def hidden(ffn: Weights, x: torch.Tensor, channels: Sequence[int] | None = None) -> torch.Tensor:
    """The input of the down projection for tokens `[..., hidden_size]`, at these channels (all by default)."""
    if ffn.gate is None:
        return ffn.act(project(x, ffn.up, ffn.up_bias, channels))
    return activated_gate(ffn, x, channels) * ffn.up_act(project(x, ffn.up, ffn.up_bias, channels))


def activated_gate(ffn: Weights, x: torch.Tensor, channels: Sequence[int] | None) -> torch.Tensor:
    assert ffn.gate is not None
    return ffn.act(project(x, ffn.gate, ffn.gate_bias, channels))


def project(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, channels: Sequence[int] | None
) -> torch.Tensor:
    """These rows of a linear layer."""
    if channels is not None:
        weight, bias = weight[channels], None if bias is None else bias[channels]
    return x @ weight.T if bias is None else x @ weight.T + bias


def down(ffn: Weights, activations: torch.Tensor, channels: Sequence[int] | None = None) -> torch.Tensor:
    """The down projection of these channels alone; its bias always."""
    weight = ffn.down if channels is None else ffn.down[:, channels]
    return activations @ weight.T if ffn.down_bias is None else activations @ weight.T + ffn.down_bias


def dense(ffn: Weights, x: torch.Tensor) -> torch.Tensor:
    return down(ffn, hidden(ffn, x))


# -- prefill -----------------------------------------------------------------------------------------------------------


def no_rows(ffn: Weights) -> torch.Tensor:
    """The sums of squares before any token."""
    return torch.zeros(ffn.channels, dtype=torch.float64)


def add_rows(ffn: Weights, sums: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The sums of squares after these tokens `[tokens, hidden_size]`, too: real ones of the prompt, of any sequence."""
    return sums + hidden(ffn, x).double().square().sum(0)


def add_up_rows(ffn: Weights, sums: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Likewise of the up projection's outputs."""
    return sums + ffn.up_act(project(x, ffn.up, ffn.up_bias, None)).double().square().sum(0)


def partition(ffn: Weights, sums: torch.Tensor, of: Sizes, up_sums: torch.Tensor | None = None) -> Partition:
    """Rank the channels by `I_i = c_i * s_i` and split them: the first into R, the next into C, the last into P."""
    order = ranked(column_norms(ffn) * sums.sqrt())
    first, second = of.retained, of.retained + of.candidates
    return Partition(
        order,
        sorted(order[:first]),
        sorted(order[first:second]),
        sorted(order[second:]),
        of.active,
        [] if up_sums is None else up_sums.sqrt().tolist(),
    )


def prefill_rows(ffn: Weights, x: torch.Tensor, parts: Partition | None, rule: str) -> torch.Tensor:
    """The outputs for tokens of the prompt `[tokens, hidden_size]`; no partition means dense."""
    if parts is None or rule == "dense":
        return dense(ffn, x)
    if rule == "candidates":
        keep = parts.retained + parts.candidates
    elif rule == "budget":
        keep = parts.order[: parts.active]
    else:
        raise AssertionError(rule)
    return down(ffn, hidden(ffn, x, keep), keep)


# -- decode ------------------------------------------------------------------------------------------------------------


def decode_step(
    ffn: Weights, x: torch.Tensor, parts: Partition | None, rule: str, up_share: float | None = None
) -> torch.Tensor:
    """The outputs for one time step `[sequences, hidden_size]` of the sequences that share partition and choice.

    No partition means dense.
    """
    if parts is None:
        return dense(ffn, x)
    keep = chosen(ffn, x, parts, rule, up_share)
    return down(ffn, hidden(ffn, x, keep), keep)


def chosen(ffn: Weights, x: torch.Tensor, parts: Partition, rule: str, up_share: float | None = None) -> list[int]:
    """The channels that are active in this time step `[sequences, hidden_size]`, in ascending order."""
    if rule == "fixed":
        return sorted(parts.order[: parts.active])
    norms = column_norms(ffn)
    if rule == "partition":
        computed = sorted(parts.retained + parts.candidates)
        places = [computed.index(channel) for channel in parts.candidates]
        scores = norms[parts.candidates] * over_the_batch(hidden(ffn, x, computed)[:, places])
        picked = ranked(scores)[: parts.active - len(parts.retained)]
        return sorted(parts.retained + [parts.candidates[place] for place in picked])
    if rule == "full":
        scores = norms * over_the_batch(hidden(ffn, x))
        return sorted(ranked(scores)[: parts.active])
    if rule == "gate":
        computed = sorted(parts.retained + parts.candidates)
        up_norms = torch.linalg.vector_norm(ffn.up[computed].double(), dim=1)
        scores = over_the_batch(activated_gate(ffn, x, computed)) * up_norms * norms[computed]
        return sorted(computed[place] for place in ranked(scores)[: parts.active])
    if rule == "cascade":
        computed = sorted(parts.retained + parts.candidates)
        wanted = (len(computed) + parts.active) / 2 if up_share is None else up_share * ffn.channels
        ups = min(max(rounded(wanted), parts.active), len(computed))
        expected = torch.tensor([parts.up_sizes[channel] for channel in computed], dtype=torch.float64)
        guess = over_the_batch(activated_gate(ffn, x, computed)) * expected * norms[computed]
        first = sorted(computed[place] for place in ranked(guess)[:ups])
        scores = norms[first] * over_the_batch(hidden(ffn, x, first))
        return sorted(first[place] for place in ranked(scores)[: parts.active])
    raise AssertionError(rule)


def over_the_batch(values: torch.Tensor) -> torch.Tensor:
    """`s_i(t)`, the norm over the sequences; of one sequence the magnitude."""
    return torch.linalg.vector_norm(values.double(), dim=0)
