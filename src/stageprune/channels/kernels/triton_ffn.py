"""`ffn_decode` on the GPU: the same arguments and results as `torch.ops.stageprune.ffn_decode` on the CPU.

Nothing here waits for the GPU, and all sizes follow from the arguments' shapes: a call can be captured in a CUDA graph.
"""

from __future__ import annotations

import torch
import triton

from stageprune.channels.kernels import triton_kernels as kernels
from stageprune.channels.kernels.masked import channel_scores
from stageprune.channels.partition import ranked

_TILES = {1: (16, 256), 2: (8, 256), 4: (8, 128), 8: (4, 128), 16: (4, 64)}
"""Rows -> channels and columns of a tile. 4096 products each, 32 registers of sums in each of 128 threads: what lets
several programs share a multiprocessor, which is what hides the latency of memory. 256 columns of 16 bits are one
16-byte load by each thread of a warp; the more rows, the more channels must share what is read of the inputs."""

_PROGRAMS = 512
"""About this many programs share the down projection: a few for each of the 108 to 132 multiprocessors of an A100 or
H100. Not from the device at hand: the order of the sums, and so the result, would depend on it."""

_MOST_SPLITS = 64
"""Of the channels in the down projection: so that one tile holds a block of all of them at the end."""

_TOTAL_BLOCK = 64
"""Columns that one program adds up at the end."""


def ffn_decode(
    inputs: torch.Tensor,
    gate: torch.Tensor | None,
    up: torch.Tensor,
    down: torch.Tensor,
    gate_bias: torch.Tensor | None,
    up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    channels: torch.Tensor | None,
    choices: torch.Tensor | None,
    count: int,
    column_norms: torch.Tensor | None,
    up_norms: torch.Tensor | None,
    act: str,
    shared: bool,
    active: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The FFN of a few rows with only some of its channels.

    All tensors are contiguous, on one device, and of the weights' type, unless said otherwise.

    Args:
        inputs: `[rows, hidden_size]`, 1 to 16 rows.
        gate: `[h, hidden_size]`; None where there is no gate.
        up: `[h, hidden_size]`.
        down: transposed, `[h, hidden_size]`.
        gate_bias: `[h]` or None.
        up_bias: `[h]` or None.
        down_bias: `[hidden_size]` or None.
        channels: computed channels, ascending, int32; None for all.
        choices: positions in `channels` among which a row chooses, ascending, int32; None if all are active.
        count: how many of them it chooses; those not in `choices` are always active.
        column_norms: `[h]`, in the type of the sums: float32, with float64 weights float64; None without choices.
        up_norms: `[h]`, likewise; if given, the activated gate chooses, and `up` is read for chosen channels only.
        act: `"silu"`, `"gelu"`, `"gelu_tanh"` or `"relu"`.
        shared: the rows share one choice, by the norm over the rows; else each row has its own.
        active: with `up_norms` and a choice among all channels: how many of the `count` chosen ones enter the down
            projection, the best by their activations; None for all.

    Returns:
        The outputs `[rows, hidden_size]`, and the chosen channels, ascending, int32 `[1 if shared else rows, count]`
        (or `active` instead of `count`).

    Raises:
        ValueError: if a shape, type or layout differs from the above. The entries of the lists are not checked: that
            would wait for the GPU.
    """
    rows, width = inputs.shape
    sum_type = torch.promote_types(up.dtype, torch.float32)
    _check_weights(inputs, gate, up, down, gate_bias, up_bias, down_bias)
    _check_choices(up, channels, choices, count, column_norms, up_norms, sum_type)
    if up_norms is not None and gate is None:
        raise ValueError("up_norms needs a gate")
    computed = len(up) if channels is None else len(channels)
    if active is not None and (
        up_norms is None or choices is None or len(choices) != computed or not 0 <= active <= count
    ):
        raise ValueError("active must choose again among the count that were chosen by the gate")
    padded = triton.next_power_of_2(rows)
    block_c, block_d = _TILES[padded]
    tile = dict(ROWS=padded, BLOCK_C=block_c, BLOCK_D=block_d, num_warps=4)
    blocks = (triton.cdiv(computed, block_c),)
    hidden = torch.empty(rows, computed, dtype=sum_type, device=inputs.device)
    with torch.cuda.device_of(inputs):  # type: ignore[no-untyped-call]
        first, first_bias = (up, up_bias) if gate is None else (gate, gate_bias)
        times, times_bias = (None, None) if gate is None or up_norms is not None else (up, up_bias)
        kernels.activated[blocks](
            inputs, first, first_bias, times, times_bias, channels, hidden, rows, computed, width, ACT=act, **tile
        )
        if choices is None:
            picked, keep, stride = _nothing(rows, shared, inputs.device), None, 0
        else:
            assert column_norms is not None
            weights = column_norms if up_norms is None else column_norms * up_norms
            picked, keep = _choose(hidden, channels, choices, count, weights, shared)
            stride = 0 if shared else computed
        if up_norms is not None:
            kernels.multiply[blocks](inputs, up, up_bias, channels, keep, stride, hidden, rows, computed, width, **tile)
        if active is not None:
            assert keep is not None
            assert column_norms is not None
            picked, keep = _choose_again(hidden, channels, keep, active, column_norms)

        columns = triton.cdiv(width, block_d)
        share, splits = _split(computed, columns, block_c)
        parts = torch.empty(splits, rows, width, dtype=sum_type, device=inputs.device)
        kernels.down_parts[columns, splits](
            hidden, down, channels, keep, stride, parts, rows, computed, width, share, **tile
        )
        outputs = torch.empty_like(inputs)
        kernels.down_total[triton.cdiv(width, _TOTAL_BLOCK), rows](
            parts, down_bias, outputs, splits, rows, width, SPLITS=triton.next_power_of_2(splits), BLOCK=_TOTAL_BLOCK
        )
    return outputs, picked


def _choose(
    hidden: torch.Tensor,
    channels: torch.Tensor | None,
    choices: torch.Tensor,
    count: int,
    weights: torch.Tensor,
    shared: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` best choices of each group of rows: their channels `[groups, count]`, and a mask of all positions
    that are active in a group, `[groups, computed]`.
    """
    candidates = choices if channels is None else channels[choices]
    values = hidden[:, choices]
    values = values[:, None] if shared else values[None]  # [batch, rows, choices]: a batch shares its choice
    scores = channel_scores(values, weights[candidates], groups=1)[0]
    best = ranked(scores)[:, :count]
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, best, True)
    keep = torch.ones(len(scores), hidden.shape[1], dtype=torch.bool, device=hidden.device)
    keep[:, choices] = chosen
    return candidates[best].sort().values, keep


def _choose_again(
    hidden: torch.Tensor, channels: torch.Tensor | None, keep: torch.Tensor, count: int, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Like `_choose`, the best of those that `keep` says were chosen before, `[groups, computed]`."""
    values = hidden[:, None] if len(keep) == 1 else hidden[None]
    scores = channel_scores(values, weights if channels is None else weights[channels], groups=1)[0]
    best = ranked(scores.masked_fill(~keep, -1))[:, :count]
    picked = best if channels is None else channels[best]
    return picked.sort().values.int(), torch.zeros_like(keep).scatter_(1, best, True)


def _nothing(rows: int, shared: bool, device: torch.device) -> torch.Tensor:
    return torch.empty(1 if shared else rows, 0, dtype=torch.int32, device=device)


def _split(computed: int, columns: int, block: int) -> tuple[int, int]:
    """Positions of each split of the down projection, whole blocks, and the number of splits."""
    blocks = max(triton.cdiv(computed, block), 1)
    splits = min(max(_PROGRAMS // columns, 1), blocks, _MOST_SPLITS)
    share = triton.cdiv(blocks, splits)
    return share * block, triton.cdiv(blocks, share)


def _check_weights(
    inputs: torch.Tensor,
    gate: torch.Tensor | None,
    up: torch.Tensor,
    down: torch.Tensor,
    gate_bias: torch.Tensor | None,
    up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
) -> None:
    h, width = up.shape
    if not 1 <= len(inputs) <= max(_TILES):
        raise ValueError(f"inputs must have 1 to {max(_TILES)} rows, got {len(inputs)}")
    _check("inputs", inputs, up, up.dtype, len(inputs), width)
    for name, matrix in (("gate", gate), ("up", up), ("down", down)):
        _check(name, matrix, up, up.dtype, h, width)
    for name, bias, size in (("gate_bias", gate_bias, h), ("up_bias", up_bias, h), ("down_bias", down_bias, width)):
        _check(name, bias, up, up.dtype, size)


def _check_choices(
    up: torch.Tensor,
    channels: torch.Tensor | None,
    choices: torch.Tensor | None,
    count: int,
    column_norms: torch.Tensor | None,
    up_norms: torch.Tensor | None,
    sum_type: torch.dtype,
) -> None:
    for name, listed in (("channels", channels), ("choices", choices)):
        _check(name, listed, up, torch.int32, 0 if listed is None else listed.numel())
    for name, norms in (("column_norms", column_norms), ("up_norms", up_norms)):
        _check(name, norms, up, sum_type, len(up))
    most = 0 if choices is None else len(choices)
    if not 0 <= count <= most:
        raise ValueError(f"count must lie in 0 .. {most}, got {count}")
    if most and column_norms is None:
        raise ValueError("choices need column_norms")


def _check(name: str, tensor: torch.Tensor | None, like: torch.Tensor, dtype: torch.dtype, *shape: int) -> None:
    if tensor is not None and (
        tensor.shape != shape or tensor.dtype != dtype or tensor.device != like.device or not tensor.is_contiguous()
    ):
        raise ValueError(
            f"{name} must be a contiguous {dtype} tensor of shape {shape} on {like.device}, but is {tensor.dtype}, "
            f"{tuple(tensor.shape)}, on {tensor.device}, with strides {tensor.stride()}"
        )
