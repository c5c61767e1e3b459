"""SliceGPT: rotate the residual stream into its principal components, and cut the least ones off."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from stageprune.baselines.base import Attachment, Baseline, Calibration, refuse_experts
from stageprune.baselines.calibration import run_hooked
from stageprune.errors import UnsupportedModelError
from stageprune.families.decoder import Decoder
from stageprune.methods.base import count, share
from stageprune.stages import StageTracker

_PARTS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


@dataclass(frozen=True)
class SliceGPT(Baseline):
    """Removes a share of the hidden dimensions everywhere (arXiv 2401.15024).

    The gains of all RMS norms move into the linear layers behind them; then a rotation between two blocks changes
    nothing. Each is the principal components of what enters the next norm, and the least ones are cut: of embeddings,
    of every linear layer's input or output, and of the head. The residual stream changes its basis at every block by
    one more product, `Q_l^T Q_(l+1)`. Departure: the components are of the dense model's signals, not of a model whose
    earlier blocks are sliced already.

    For pre-norm layers of the shape of Llama's.

    Args:
        ratio: share of the hidden dimensions; parameters are saved by less, as the extra products have some.
        multiple: the dimensions that are left are rounded to a multiple of this, as in the public code.
    """

    kind: ClassVar[str] = "slicegpt"
    needs_calibration: ClassVar[bool] = True

    ratio: float = 0.25
    multiple: int = 8

    def __post_init__(self) -> None:
        object.__setattr__(self, "ratio", share("ratio", self.ratio))
        count("multiple", self.multiple)

    def attach(self, decoder: Decoder, tracker: StageTracker, calibration: Calibration, owner: Any) -> Attachment:
        """See `Baseline`."""
        refuse_experts(self, decoder)
        _check_shape(decoder)
        _check_layers(decoder, calibration[0])
        bases = principal_components(decoder, calibration)
        size = bases[0].shape[0]
        left = round((1 - self.ratio) * size / self.multiple) * self.multiple
        return slice_model(decoder, [basis[:, : max(left, 1)] for basis in bases], owner)


def slice_model(decoder: Decoder, bases: list[torch.Tensor], owner: Any) -> Attachment:
    """Write the residual stream in other bases.

    Args:
        decoder: of the model.
        bases: in front of each norm, `[hidden_size, left]` in float64: of each layer the attention's and the FFN's, at
            last the final one's.
        owner: of the overrides.
    """
    attachment = Attachment()
    norms = _norms(decoder)
    size = bases[0].shape[0]
    for norm in norms:
        attachment.replace(norm, _scaleless(size, _epsilon(norm)), owner)

    def linear(module: Any, left: torch.Tensor | None, gain: torch.Tensor | None, right: torch.Tensor | None) -> int:
        """Replace a linear layer; returns how many weights that saves."""
        weight, bias = module.weight.detach().double(), module.bias
        bias = None if bias is None else bias.detach().double()
        if gain is not None and right is not None:
            weight = (weight * gain.detach().double()) @ right
        if left is not None:
            weight, bias = left.T @ weight, None if bias is None else left.T @ bias
        new = weight.to(module.weight.dtype).contiguous(), None if bias is None else bias.to(module.weight.dtype)
        attachment.replace(module, lambda inputs: F.linear(inputs, *new), owner)
        attachment.weight_bytes += new[0].nbytes
        return int(module.weight.numel() - weight.numel())

    embeddings: Any = decoder.body.get_input_embeddings()  # type: ignore[operator]
    table = (embeddings.weight.detach().double() @ bases[0]).to(embeddings.weight.dtype)
    attachment.replace(embeddings, lambda ids: F.embedding(ids, table), owner)
    attachment.weight_bytes += table.nbytes
    for index, layer in enumerate(decoder.layers):
        into, middle, out = bases[2 * index : 2 * index + 3]
        query, key, value, output, gate, up, down = (_part(layer, name) for name in _PARTS)
        first, second = norms[2 * index].weight, norms[2 * index + 1].weight
        saved = sum(linear(module, None, first, into) for module in (query, key, value))
        saved += linear(output, middle, None, None) + linear(down, out, None, None)
        saved += sum(linear(module, None, second, middle) for module in (gate, up))
        dtype = query.weight.dtype
        turns = (into.T @ middle).to(dtype), (middle.T @ out).to(dtype)
        attachment.saved[index] = saved - sum(turn.numel() for turn in turns)
        attachment.weight_bytes += sum(turn.nbytes for turn in turns)
        attachment.replace(layer, _rotated(layer, *turns), owner)
    head: Any = decoder.model.get_output_embeddings()  # type: ignore[operator]
    attachment.saved_head = linear(head, None, norms[-1].weight, bases[-1])
    return attachment


@torch.no_grad()
def principal_components(decoder: Decoder, calibration: Calibration) -> list[torch.Tensor]:
    """Of what leaves each norm before its gain, `[hidden_size, hidden_size]`, the largest first, in float64."""
    sums: dict[Any, torch.Tensor] = {}
    norms = _norms(decoder)

    def watch(norm: Any) -> Callable[..., None]:
        def hook(module: Any, args: tuple[torch.Tensor, ...]) -> None:
            rows = args[0].detach().double().flatten(0, -2)
            rows = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + _epsilon(norm))
            sums[norm] = rows.T @ rows + sums.get(norm, 0)

        return hook

    run_hooked(decoder, calibration, [norm.register_forward_pre_hook(watch(norm)) for norm in norms])
    return [torch.linalg.eigh(sums[norm])[1].flip(-1) for norm in norms]


def _plain(layer: Any, turns: tuple[Callable[[Any], Any], Callable[[Any], Any]], hidden: Any, **kwargs: Any) -> Any:
    """A pre-norm layer; `turns` are done to the residual stream where a block is added to it."""
    hidden = turns[0](hidden) + layer.self_attn(hidden_states=layer.input_layernorm(hidden), **kwargs)[0]
    return turns[1](hidden) + layer.mlp(layer.post_attention_layernorm(hidden))


def _rotated(layer: nn.Module, first: torch.Tensor, second: torch.Tensor) -> Callable[..., Any]:
    def forward(hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        return _plain(layer, (lambda x: x @ first, lambda x: x @ second), hidden_states, **kwargs)

    return forward


@torch.no_grad()
def _check_layers(decoder: Decoder, text: Sequence[int]) -> None:
    """Compare each layer with `_plain` on a few tokens.

    Raises:
        UnsupportedModelError: names the layer that differs.
    """
    calls: dict[int, tuple[Any, dict[str, Any], Any]] = {}

    def watch(index: int) -> Callable[..., None]:
        def hook(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            rest = dict(kwargs)
            calls[index] = (args[0] if args else rest.pop("hidden_states")), rest, output

        return hook

    layers = enumerate(decoder.layers)
    run_hooked(decoder, [text[:8]], [layer.register_forward_hook(watch(i), with_kwargs=True) for i, layer in layers])
    for index, (hidden, rest, output) in calls.items():
        ours = _plain(decoder.layers[index], (_same, _same), hidden, **rest)
        if not isinstance(output, torch.Tensor) or not torch.allclose(ours, output, rtol=1e-2, atol=1e-4):
            raise UnsupportedModelError(_shape_problem(index, decoder.layers[index]))


def _same(hidden: torch.Tensor) -> torch.Tensor:
    return hidden


def _shape_problem(index: int, layer: nn.Module) -> str:
    return f"layer {index} ({type(layer).__name__}): SliceGPT is for pre-norm layers of the shape of Llama's"


def _check_shape(decoder: Decoder) -> None:
    for index, layer in enumerate(decoder.layers):
        names = (*_PARTS, "input_layernorm", "post_attention_layernorm")
        plain = all(isinstance(_part(layer, name), nn.Linear) for name in _PARTS)
        if (
            not plain
            or any(_part(layer, name) is None for name in names)
            or hasattr(layer, "pre_feedforward_layernorm")
        ):
            raise UnsupportedModelError(_shape_problem(index, layer))
    if getattr(decoder.body, "norm", None) is None:
        raise UnsupportedModelError(f"{type(decoder.body).__name__} has no final norm")
    for norm in _norms(decoder):
        _epsilon(norm)


def _norms(decoder: Decoder) -> list[Any]:
    parts = [norm for layer in decoder.layers for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
    return [*parts, decoder.body.norm]


def _epsilon(norm: Any) -> float:
    for name in ("variance_epsilon", "eps"):
        if isinstance(getattr(norm, name, None), float):
            return float(getattr(norm, name))
    raise UnsupportedModelError(f"{type(norm).__name__} is no RMS norm whose epsilon is known")


def _scaleless(size: int, epsilon: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """An RMS norm without gain, over `size` dimensions of which some may be cut off."""

    def forward(hidden_states: torch.Tensor) -> torch.Tensor:
        wide = hidden_states.to(torch.promote_types(hidden_states.dtype, torch.float32))
        return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) / size + epsilon)).to(hidden_states.dtype)

    return forward


def _part(layer: nn.Module, path: str) -> Any:
    found: Any = layer
    for name in path.split("."):
        found = getattr(found, name, None)
    return found
