"""The GPU's kernels, in Triton: matrix-vector products over listed channels (what `native.cpp` is on the CPU).

In `gate`, `up` and the transposed `down`, a channel is a contiguous row of `width` values. A program multiplies a tile
of ROWS x BLOCK_C x BLOCK_D values, rows of inputs by channels by columns, so that a weight is read once for all rows.
Sums are kept in float32, of float64 weights in float64. Not with `tl.dot`: at these few rows reading the weights takes
the time, and it would round float32 to TF32. Arguments that may be None are constants to the compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

_jit: Callable[[Callable[..., Any]], Any] = triton.jit


@_jit
def activated(
    inputs: tl.tensor,  # [rows, width]
    weight: tl.tensor,  # [h, width]: gate, or up where there is no gate
    bias: tl.tensor,  # [h] or None
    times: tl.tensor,  # [h, width]: up, or None
    times_bias: tl.tensor,  # [h] or None
    channels: tl.tensor,  # int32 [count], or None for all
    hidden: tl.tensor,  # [rows, count], in the type of the sums
    rows: tl.tensor,
    count: tl.tensor,
    width: tl.tensor,
    ACT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """`hidden = act(weight x + bias)`, times `(times x + times_bias)` if given, for BLOCK_C of the channels."""
    position = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = position < count
    channel = _channels(channels, position, inside)
    values = _project(inputs, weight, bias, channel, inside, rows, width, hidden, ROWS, BLOCK_C, BLOCK_D)
    values = _activate(values, ACT)
    if times is not None:
        values *= _project(inputs, times, times_bias, channel, inside, rows, width, hidden, ROWS, BLOCK_C, BLOCK_D)
    row = tl.arange(0, ROWS)[:, None]
    tl.store(hidden + row * count + position[None, :], values, mask=(row < rows) & inside[None, :])


@_jit
def multiply(
    inputs: tl.tensor,  # [rows, width]
    weight: tl.tensor,  # [h, width]
    bias: tl.tensor,  # [h] or None
    channels: tl.tensor,  # int32 [count], or None for all
    keep: tl.tensor,  # bool [groups, count]
    keep_stride: tl.tensor,  # from row to row: 0 where all rows share a choice
    hidden: tl.tensor,  # [rows, count]
    rows: tl.tensor,
    count: tl.tensor,
    width: tl.tensor,
    ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """`hidden *= weight x + bias` where a row keeps the channel; reads the weights of channels that some row keeps."""
    position = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = position < count
    channel = _channels(channels, position, inside)
    kept = _kept(keep, keep_stride, position, inside, rows, ROWS)
    values = _project(inputs, weight, bias, channel, _by_any(kept), rows, width, hidden, ROWS, BLOCK_C, BLOCK_D)
    place = hidden + tl.arange(0, ROWS)[:, None] * count + position[None, :]
    gate = tl.load(place, mask=kept, other=0)
    # An inactive gate closes even where `up` is infinite.
    tl.store(place, gate * values, mask=kept & (gate != 0))


@_jit
def down_parts(
    hidden: tl.tensor,  # [rows, count]
    weight: tl.tensor,  # [h, width]
    channels: tl.tensor,  # int32 [count], or None for all
    keep: tl.tensor,  # bool [groups, count], or None if all are kept
    keep_stride: tl.tensor,  # from row to row: 0 where all rows share a choice
    parts: tl.tensor,  # [splits, rows, width]
    rows: tl.tensor,
    count: tl.tensor,
    width: tl.tensor,
    share: tl.tensor,  # positions of a split
    ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Sums of `hidden[:, p] * weight[channel(p)]` over the kept positions p of each split, for BLOCK_D columns."""
    column = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    split = tl.program_id(1)
    row = tl.arange(0, ROWS)[:, None]
    end = tl.minimum((split + 1) * share, count)
    sums = tl.zeros((ROWS, BLOCK_C, BLOCK_D), parts.dtype.element_ty)
    for start in range(split * share, end, BLOCK_C):
        position = start + tl.arange(0, BLOCK_C)
        inside = position < end
        channel = _channels(channels, position, inside)
        kept = _kept(keep, keep_stride, position, inside, rows, ROWS)
        factor = tl.load(hidden + row * count + position[None, :], mask=kept, other=0)
        weights = _rows_of(weight, channel, _by_any(kept), column, width)
        sums = tl.fma(factor[:, :, None], weights.to(sums.dtype), sums)
    place = parts + (split * rows + row) * width + column[None, :]
    tl.store(place, tl.sum(sums, axis=1), mask=(row < rows) & (column < width)[None, :])


@_jit
def down_total(
    parts: tl.tensor,  # [splits, rows, width]
    bias: tl.tensor,  # [width] or None
    outputs: tl.tensor,  # [rows, width]
    splits: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Add up the splits, always in the same order, and the bias: BLOCK columns of one row."""
    row = tl.program_id(1)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    split = tl.arange(0, SPLITS)[:, None]
    places = parts + (split * rows + row) * width + column[None, :]
    total = tl.sum(tl.load(places, mask=(split < splits) & inside[None, :], other=0), axis=0)
    if bias is not None:
        total += tl.load(bias + column, mask=inside, other=0).to(total.dtype)
    tl.store(outputs + row * width + column, total.to(outputs.dtype.element_ty), mask=inside)


# -- parts of kernels --------------------------------------------------------------------------------------------------


@_jit
def _project(
    inputs: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    channel: tl.tensor,
    inside: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    hidden: tl.tensor,
    ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> tl.tensor:
    """`weight x + bias` of all rows for a block of channels, `[ROWS, BLOCK_C]`, in the type of `hidden`."""
    row = tl.arange(0, ROWS)[:, None, None]
    sums = tl.zeros((ROWS, BLOCK_C, BLOCK_D), hidden.dtype.element_ty)
    for start in range(0, width, BLOCK_D):
        column = start + tl.arange(0, BLOCK_D)
        place = inputs + row * width + column[None, None, :]
        values = tl.load(place, mask=(row < rows) & (column < width)[None, None, :], other=0)
        weights = _rows_of(weight, channel, inside, column, width)
        sums = tl.fma(values.to(sums.dtype), weights.to(sums.dtype), sums)
    total = tl.sum(sums, axis=2)
    if bias is not None:
        total += tl.load(bias + channel, mask=inside, other=0).to(total.dtype)[None, :]
    return total


@_jit
def _rows_of(
    weight: tl.tensor, channel: tl.tensor, inside: tl.tensor, column: tl.tensor, width: tl.tensor
) -> tl.tensor:
    """These columns of these channels, `[1, BLOCK_C, BLOCK_D]`; 0, and not read, outside."""
    mask = inside[None, :, None] & (column < width)[None, None, :]
    return tl.load(weight + channel[None, :, None] * width + column[None, None, :], mask=mask, other=0)


@_jit
def _channels(channels: tl.tensor, position: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """The channels at these positions; int64, since a matrix can have more than 2^31 elements."""
    if channels is None:
        return position.to(tl.int64)
    else:
        return tl.load(channels + position, mask=inside, other=0).to(tl.int64)


@_jit
def _kept(
    keep: tl.tensor, keep_stride: tl.tensor, position: tl.tensor, inside: tl.tensor, rows: tl.tensor, ROWS: tl.constexpr
) -> tl.tensor:
    """Which row keeps which position, `[ROWS, BLOCK_C]`."""
    row = tl.arange(0, ROWS)[:, None]
    kept = (row < rows) & inside[None, :]
    if keep is not None:
        kept &= tl.load(keep + row * keep_stride + position[None, :], mask=kept, other=0) != 0
    return kept


@_jit
def _by_any(kept: tl.tensor) -> tl.tensor:
    """Which positions some row keeps, `[BLOCK_C]`."""
    return tl.max(kept.to(tl.int32), axis=0) != 0


@_jit
def _activate(x: tl.tensor, ACT: tl.constexpr) -> tl.tensor:
    if ACT == "silu":
        return x / (1 + tl.exp(-x))
    elif ACT == "gelu":
        return 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    elif ACT == "gelu_tanh":
        # 0.5 (1 + tanh z) = 1 / (1 + exp(-2 z)), and Triton has no tanh of its own
        return x / (1 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    else:
        tl.static_assert(ACT == "relu")
        return tl.where(x < 0, 0, x)  # lets NaN through
