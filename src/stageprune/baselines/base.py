"""What all baselines have in common: a setting that attaches itself to a model, and what is then attached.

Unlike the two methods of this library they know no stages: every forward pass is pruned, prompt and answer alike.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

from torch import nn

from stageprune.errors import SettingError, UnsupportedModelError
from stageprune.families.decoder import Decoder
from stageprune.families.experts import find_experts
from stageprune.methods.base import Method
from stageprune.overrides import MethodOverride
from stageprune.stages import StageTracker

Calibration: TypeAlias = Sequence[Sequence[int]]
"""Token ids of some texts."""


@dataclass
class Attachment:
    """What a baseline did to a model.

    Attributes:
        dropped: layers that never run.
        saved: weights that no token is multiplied with any more, by layer; negative where more were added.
        saved_head: likewise of the language-model head.
        weight_bytes: memory that it adds to the weights.
    """

    dropped: frozenset[int] = frozenset()
    saved: dict[int, int] = field(default_factory=dict)
    saved_head: int = 0
    weight_bytes: int = 0
    _dense: bool = False
    _undo: list[Callable[[], object]] = field(default_factory=list)
    _switches: list[Callable[[bool], object]] = field(default_factory=list)

    def replace(self, module: nn.Module, forward: Callable[..., Any], owner: Any) -> None:
        """Answer a module's calls by `forward(*args, **kwargs)` wherever the model is not dense."""

        def call(original: Any, *args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs) if self._dense else forward(*args, **kwargs)

        self._undo.append(MethodOverride(module, "forward", call, owner).remove)

    def on_switch(self, set_dense: Callable[[bool], object]) -> None:
        """For what must be put into a module: called with True before the model is dense, with False afterwards."""
        set_dense(False)
        self._switches.append(set_dense)

    @contextmanager
    def dense(self) -> Iterator[None]:
        """Inside the block the model is the original."""
        before = self._dense
        self._set(True)
        try:
            yield
        finally:
            self._set(before)

    def detach(self) -> None:
        """Give the model back as it was."""
        self._set(True)
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        self._switches.clear()

    def _set(self, dense: bool) -> None:
        if dense != self._dense:
            for switch in self._switches:
                switch(dense)
        self._dense = dense


@dataclass(frozen=True)
class Baseline(Method, ABC):
    """A setting of one baseline.

    Attributes:
        needs_calibration: whether `prune()` must be given texts.
    """

    needs_calibration: ClassVar[bool] = False

    @abstractmethod
    def attach(self, decoder: Decoder, tracker: StageTracker, calibration: Calibration, owner: Any) -> Attachment:
        """Prune the model, which is untouched; `owner` owns the overrides.

        Raises:
            SettingError: if the setting does not fit the model.
            UnsupportedModelError: if the model does not have the shape that the baseline is for.
        """


def check_calibration(method: Baseline, calibration: Calibration | None) -> Calibration:
    """The texts to calibrate on.

    Raises:
        SettingError: if they are needed and missing, or are no token ids.
    """
    if calibration is None or not len(calibration):
        if method.needs_calibration:
            raise SettingError(f"{type(method).__name__} needs calibration=[[token ids], ...] in prune()")
        return ()
    for text in calibration:
        if isinstance(text, (str, bytes)) or not isinstance(text, Sequence) or len(text) < 2:
            raise SettingError("calibration must list texts of two token ids or more each")
        if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in text):
            raise SettingError("calibration must list token ids, integers of at least 0")
    return calibration


def refuse_experts(method: Baseline, decoder: Decoder) -> None:
    """Raise for mixtures of experts: these baselines are about FFNs that every token uses."""
    for index, layer in enumerate(decoder.layers):
        if find_experts(layer) is not None:
            raise UnsupportedModelError(
                f"layer {index} ({type(layer).__name__}) has routed experts; {type(method).__name__} is for dense FFNs"
            )
