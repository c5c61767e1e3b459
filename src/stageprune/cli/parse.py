"""From the text of an option to its value; each parser raises `typer.BadParameter` that quotes what was given."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar, get_args

import typer

from stageprune.evaluate.peers import NAMES as PEERS
from stageprune.methods import LayerRule
from stageprune.methods.online_channels import PRESETS, BackendName

DTYPES = {
    "auto": "auto",
    **{name: name for name in ("float64", "float32", "bfloat16", "float16")},
    "fp64": "float64",
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
}
LayerChoice = LayerRule | tuple[int, ...]
Number = TypeVar("Number", int, float)

_MOST_LAYERS = 100_000  # a range such as 0-99999999999 shall be an error, not fill the memory


def ratio(text: str) -> float:
    """A share in [0, 1): a decimal number such as 0.25, or a fraction such as 1/3."""
    match = re.fullmatch(r"\s*([0-9.eE+-]+)\s*(?:/\s*([0-9.eE+-]+)\s*)?", text)
    try:
        if match is None:
            raise ValueError
        value = float(match[1]) / float(match[2] or 1)
    except (ValueError, ZeroDivisionError):
        raise typer.BadParameter(f"{text!r} is no number or fraction; give for example 0.25 or 1/3") from None
    if not (math.isfinite(value) and 0 <= value < 1):
        raise typer.BadParameter(f"{text!r} is not at least 0 and less than 1; give for example 0.25 or 1/3")
    return value


def layers(text: str) -> LayerChoice:
    """A rule's name, or zero-based indices and ranges of them, such as `20-29` or `3,5,20-29`."""
    name = text.strip()
    if name in get_args(LayerRule):
        return name  # type: ignore[return-value]
    indices: list[int] = []
    for part in name.split(","):
        match = re.fullmatch(r"\s*(\d{1,6})\s*(?:-\s*(\d{1,6})\s*)?", part, re.ASCII)
        if match is None:
            rules = ", ".join(get_args(LayerRule))
            raise typer.BadParameter(f"{text!r} is neither {rules}, nor layer indices such as 20-29 or 3,5,20-29")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise typer.BadParameter(f"the range {part.strip()!r} in {text!r} ends before it begins")
        if last >= _MOST_LAYERS:
            raise typer.BadParameter(f"layer {last} in {text!r}: no model has that many layers")
        indices.extend(range(first, last + 1))
    indices.sort()
    repeated = next((index for index, following in pairwise(indices) if index == following), None)
    if repeated is not None:
        raise typer.BadParameter(f"layer {repeated} is named twice in {text!r}")
    return tuple(indices)


def counts(text: str) -> tuple[int, ...]:
    """Positive whole numbers, such as `32,128,512`."""
    values = []
    for part in text.split(","):
        if not re.fullmatch(r"\s*0*[1-9]\d{0,8}\s*", part, re.ASCII):
            raise typer.BadParameter(f"{text!r} is no list of positive numbers such as 32,128,512")
        values.append(int(part))
    return _distinct(text, values)


def count(text: str) -> int:
    """One positive whole number."""
    return _whole(text, 1)


def threads(text: str) -> int:
    """How many threads; far more than any machine has would bring it down."""
    value = _whole(text, 1)
    if value > 4096:
        raise typer.BadParameter(f"{text!r} is more than 4096 threads")
    return value


def seed(text: str) -> int:
    """A whole number that a random generator can start from."""
    return _whole(text, 0)


def size(text: str) -> int:
    """A whole number, which may be 0."""
    return _whole(text, 0)


def port(text: str) -> int:
    """A port of TCP; 0: any that is free."""
    value = _whole(text, 0)
    if value > 65535:
        raise typer.BadParameter(f"{text!r} is no port; they end at 65535")
    return value


def seconds(text: str) -> float:
    """A time of up to an hour."""
    value = _number(text)
    if not 0 <= value <= 3600:
        raise typer.BadParameter(f"{text!r} is not from 0 to 3600 seconds")
    return value


def _whole(text: str, least: int) -> int:
    if not re.fullmatch(r"\s*\d{1,18}\s*", text, re.ASCII) or int(text) < least:
        raise typer.BadParameter(f"{text!r} is no whole number of at least {least}")
    return int(text)


def ratios(text: str) -> tuple[float, ...]:
    """Shares as in `ratio`, separated by commas."""
    return _distinct(text, [ratio(part) for part in text.split(",")])


def fraction(text: str) -> float:
    """A share from 0 to 1, both included: a decimal number or a fraction."""
    return 1.0 if re.fullmatch(r"\s*1(\.0*)?\s*", text) else ratio(text)


def confidence(text: str) -> float:
    """A share above 0 and below 1."""
    value = ratio(text)
    if value == 0:
        raise typer.BadParameter(f"{text!r} is not above 0 and less than 1; give for example 0.95")
    return value


def names(text: str) -> tuple[str, ...]:
    """Words, separated by commas."""
    values = [part.strip() for part in text.split(",")]
    if not all(values):
        raise typer.BadParameter(f"{text!r} is no list of names such as a,b")
    if len(set(values)) != len(values):
        raise typer.BadParameter(f"{text!r} names a value twice")
    return tuple(values)


def backends(text: str) -> tuple[BackendName, ...]:
    """Names of what runs pruned FFNs, separated by commas."""
    return _names(text, get_args(BackendName))  # type: ignore[return-value]


def peers(text: str) -> tuple[str, ...]:
    """Names of what the dense model is compared with, separated by commas."""
    return _names(text, PEERS)


def _names(text: str, known: Sequence[str]) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(","))
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(known)}")
    if len(set(names)) != len(names):
        raise typer.BadParameter(f"{text!r} names a value twice")
    return names


def preset(text: str) -> str:
    """The name of settings of channel pruning."""
    if text not in PRESETS:
        raise typer.BadParameter(f"{text!r} is none of {', '.join(PRESETS)}")
    return text


def shapes(text: str) -> tuple[tuple[int, int], ...]:
    """FFN shapes, `hidden_size` and `intermediate_size`, such as `2048x8192,4096x14336`."""
    values = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,6})x(\d{1,6})\s*", part, re.ASCII)
        if match is None or int(match[1]) < 1 or int(match[2]) < 1:
            raise typer.BadParameter(f"{text!r} is no list of shapes such as 2048x8192,4096x14336")
        values.append((int(match[1]), int(match[2])))
    return tuple(values)


def image_sizes(text: str) -> tuple[tuple[int, int], ...]:
    """Widths and heights in pixels, such as `640x480,1280x720`."""
    try:
        return shapes(text)
    except typer.BadParameter:
        raise typer.BadParameter(f"{text!r} is no list of image sizes such as 640x480,1280x720") from None


def dtype(text: str) -> str:
    """The full name of a floating-point type."""
    if text not in DTYPES:
        raise typer.BadParameter(f"{text!r} is none of {', '.join(DTYPES)}")
    return DTYPES[text]


def nats(text: str) -> float:
    """A divergence, from 0 up."""
    value = _number(text)
    if not (math.isfinite(value) and value >= 0):
        raise typer.BadParameter(f"{text!r} is no divergence of at least 0 nats")
    return value


def ridge(text: str) -> float:
    """A number above 0."""
    value = _number(text)
    if not (math.isfinite(value) and value > 0):
        raise typer.BadParameter(f"{text!r} is not above 0")
    return value


def temperature(text: str) -> float:
    """A number from 0 (greedy) up."""
    value = _number(text)
    if not (math.isfinite(value) and value >= 0):
        raise typer.BadParameter(f"{text!r} is not 0 (greedy) or more")
    return value


def top_p(text: str) -> float:
    """A probability above 0 and up to 1."""
    value = _number(text)
    if not 0 < value <= 1:
        raise typer.BadParameter(f"{text!r} is not above 0 and up to 1")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no number") from None


def _distinct(text: str, values: list[Number]) -> tuple[Number, ...]:
    if len(set(values)) != len(values):
        raise typer.BadParameter(f"{text!r} names a value twice")
    return tuple(values)
