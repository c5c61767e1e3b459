"""Skip decoder layers while the context is encoded (arXiv 2602.03295, section 3; Eq. 14 and 15).

A skipped layer does three things: it projects the keys and values of the prefill rows from the hidden states that
arrive (Eq. 14), runs its own unmodified forward on the decode rows only, and passes the prefill rows on unchanged
(Eq. 15). In a run of skipped layers the prefill rows are the same for all, so they are set aside once, at the run's
first layer, and only decode rows flow on; after a run that ends before the last layer the two are joined again. Behind
the last run nothing needs the prefill rows any more: no norm and no language-model head is computed for them. Where the
model itself adds visual features between two layers (DeepStack), a run ends, so that they reach the prefill rows, too.

The last layer's output at prefill rows feeds nothing (paper, section 1.4: its importance is exactly zero), so whenever
any layer is skipped the last one is treated like a skipped layer, too; the result is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from stageprune.errors import SettingError, StageError, UnsupportedModelError
from stageprune.families.caches import PrefixedCache
from stageprune.families.calls import LayerCall, execution_device
from stageprune.families.decoder import Decoder
from stageprune.families.verify import VerifiedLayer, verify_layers
from stageprune.methods import PrefillOnlyPruning
from stageprune.overrides import MethodOverride
from stageprune.prefill.fitted import FittedProjection
from stageprune.prefill.layers import runs_of, skipped_layers
from stageprune.prefill.projections import KVProjections
from stageprune.stages import Stage, StageTracker


class PrefillPruner:
    """Prefill-only pruning, attached to one model.

    Attributes:
        skipped: the layers that the method skips.
        weight_bytes: memory of fitted projections.
        context_free: layers whose prefill rows stop at their keys and values: the skipped ones, and the last.

    Raises:
        SettingError: if the setting does not fit the model.
        UnsupportedModelError: if a layer's keys and values cannot be described.
    """

    def __init__(self, decoder: Decoder, method: PrefillOnlyPruning, tracker: StageTracker) -> None:
        self.method = method
        count = len(decoder.layers)
        self.skipped = skipped_layers(method, count)
        self.context_free = tuple(sorted({*self.skipped, count - 1})) if self.skipped else ()
        if not method.kv_projection:
            _check_unprojected(decoder, self.skipped)
        if self.skipped and getattr(decoder.config, "output_router_logits", False):
            raise UnsupportedModelError(
                "the loss that balances experts needs every token in every layer; set output_router_logits=False in "
                "the model's configuration: it is for training"
            )
        tracker.keeps_prefill_rows = not self.context_free or count - 1 in decoder.whole
        self.weight_bytes = 0
        self._overrides: list[MethodOverride] = []
        for layer in self._describe(decoder, tracker):
            self._overrides.append(MethodOverride(layer.module, "forward", layer, owner=self))

    def _describe(self, decoder: Decoder, tracker: StageTracker) -> list[SkippedLayer]:
        verified = verify_layers(decoder, self.context_free)
        if self.method.projections is not None:
            verified = self._fitted(decoder, verified, self.method.projections)
        layers = []
        for run in runs_of(self.context_free, decoder.whole):
            for index in run:
                skipped = index in self.skipped
                kind = UnprojectedLayer if skipped and not self.method.kv_projection else SkippedLayer
                joins = index == run[-1] and (index != len(decoder.layers) - 1 or index in decoder.whole)
                prunes_boundary = skipped and not self.method.boundary
                layers.append(kind(verified[index], tracker, run[0], joins, prunes_boundary))
        return layers

    def _fitted(self, decoder: Decoder, verified: dict[int, VerifiedLayer], folder: str) -> dict[int, VerifiedLayer]:
        projections = KVProjections.load(folder)
        if projections.layers != self.skipped:
            raise SettingError(
                f"the K/V projections in {folder!r} are for layers {list(projections.layers)}, but the setting skips "
                f"{list(self.skipped)}"
            )
        fitted = projections.fitted(decoder, verified)
        self.weight_bytes = sum(
            one.project.nbytes for one in fitted.values() if isinstance(one.project, FittedProjection)
        )
        return fitted

    def detach(self) -> None:
        """Give the layers their own forward back."""
        for override in reversed(self._overrides):
            override.remove()
        self._overrides.clear()


class SkippedLayer:
    """Stands in for the forward of one layer; see the module's docstring.

    Args:
        verified: the layer and its description.
        tracker: knows the stages of the current pass.
        run: the first layer of the run of skipped layers that this one belongs to.
        joins: whether the run ends here and what follows needs the prefill rows again.
        prunes_boundary: whether the last prompt token skips the layer, too (an ablation of the paper).
    """

    def __init__(
        self, verified: VerifiedLayer, tracker: StageTracker, run: int, joins: bool, prunes_boundary: bool
    ) -> None:
        self.module = verified.layer
        self._index = verified.index
        self._project = verified.project
        self._signature = verified.signature
        self._extra_outputs = verified.extra_outputs
        self._tracker = tracker
        self._run = run
        self._joins = joins
        self._prunes_boundary = prunes_boundary
        # Its shapes change with every prompt; see also `StageTracker`.
        self._pruned = torch.compiler.disable(self._pruned)  # type: ignore[method-assign, no-untyped-call]

    def __call__(self, forward: Any, *args: Any, **kwargs: Any) -> Any:
        """Answer one call of the layer."""
        stage = self._tracker.current
        if stage is None or not (stage.prefill or (stage.boundary and self._prunes_boundary)):
            return self._dense(forward, args, kwargs)
        return self._pruned(forward, stage, args, kwargs)

    def _dense(self, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return forward(*args, **kwargs)

    def _pruned(self, forward: Any, stage: Stage, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = self._signature.bind(args, kwargs)
        hidden_states = _to(call.hidden_states, execution_device(self.module))
        if self._index == self._run:
            context, rows = hidden_states[:, : stage.prefill], hidden_states[:, stage.prefill :]
            stage.carry[self._run] = context
        else:
            context, rows = _to(stage.carry[self._run], hidden_states.device), hidden_states
        length = context.shape[1] + rows.shape[1]
        skipping, rows = self._split(stage, rows)
        context_rows = torch.cat((context, skipping), dim=1) if skipping.shape[1] else context
        outputs = self._run_rows(forward, call, context_rows, rows, length)
        hidden_states = outputs[0]
        if skipping.shape[1]:
            hidden_states = torch.cat((skipping, hidden_states), dim=1)
        if self._joins:
            hidden_states = torch.cat((stage.carry.pop(self._run), hidden_states), dim=1)
        return (hidden_states, *outputs[1:]) if self._extra_outputs else hidden_states

    def _split(self, stage: Stage, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The boundary row if it skips the layer (else none), and the rows that the layer runs."""
        skipping = 1 if stage.boundary and self._prunes_boundary else 0
        return rows[:, :skipping], rows[:, skipping:]

    def _run_rows(
        self, forward: Any, call: LayerCall, context: torch.Tensor, rows: torch.Tensor, length: int
    ) -> tuple[Any, ...]:
        """Cache keys and values for the context rows, run the layer on the others; returns the layer's outputs."""
        prefill = context.shape[1]
        positions = _to(call.positions(slice(0, prefill), length), context.device)
        keys, values = self._project(self.module, context, positions)
        if rows.shape[1] == 0:
            if call.cache is not None:
                call.cache.update(keys, values, self._index)
            return (rows, *[None] * self._extra_outputs)
        visible = length if call.attention_mask is None else None
        cache = PrefixedCache(call.cache, keys, values, visible)
        return _as_tuple(forward(**call.decode_rows(rows, cache, prefill, length)))


class UnprojectedLayer(SkippedLayer):
    """A skipped layer that caches nothing for the prefill rows: the paper's ablation without K/V projection.

    Its cache holds the decode rows alone, so the masks, which speak of all positions, are cut to those.
    """

    def _dense(self, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = self._signature.bind(args, kwargs)
        length = call.hidden_states.shape[1]
        return forward(**self._cut_mask(call.decode_rows(call.hidden_states, call.cache, 0, length), call.cache))

    def _run_rows(
        self, forward: Any, call: LayerCall, context: torch.Tensor, rows: torch.Tensor, length: int
    ) -> tuple[Any, ...]:
        cache = call.cache
        if cache is not None:
            if cache.is_compileable:
                raise StageError("kv_projection=False leaves gaps in the cache, which a static cache cannot have")
            if cache.get_seq_length(self._index):
                raise StageError("kv_projection=False is an ablation for single prompts, not for further turns")
        if rows.shape[1] == 0:
            return (rows, *[None] * self._extra_outputs)
        arguments = call.decode_rows(rows, cache, context.shape[1], length)
        return _as_tuple(forward(**self._cut_mask(arguments, cache)))

    def _cut_mask(self, arguments: dict[str, Any], cache: Any) -> dict[str, Any]:
        rows = arguments["hidden_states"].shape[1]
        keys = rows if cache is None else cache.get_mask_sizes(rows, self._index)[0]
        if arguments["attention_mask"] is not None:
            arguments["attention_mask"] = arguments["attention_mask"][..., -keys:]
        return arguments


def _check_unprojected(decoder: Decoder, skipped: Sequence[int]) -> None:
    """Masks and positions are derived from the cache of the first layer of each kind; these must be complete."""
    kinds = getattr(decoder.config, "layer_types", None) or ["full_attention"] * len(decoder.layers)
    for kind in dict.fromkeys(kinds):
        first = kinds.index(kind)
        if first in skipped:
            raise SettingError(
                f"kv_projection=False cannot skip layer {first}: it is the first of its kind ({kind}), and the model "
                "reads its cache to place all positions; choose deeper layers"
            )


def _as_tuple(outputs: Any) -> tuple[Any, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def _to(value: Any, device: Any) -> Any:
    """Move tensors, also inside tuples, to a device; None leaves them."""
    if isinstance(value, tuple):
        return tuple(_to(part, device) for part in value)
    return value.to(device) if isinstance(value, torch.Tensor) and device is not None else value
