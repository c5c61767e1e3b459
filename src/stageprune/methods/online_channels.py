"""The settings of online channel pruning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Self, TypeAlias, get_args

from stageprune.errors import SettingError
from stageprune.methods.base import Method, choice, count, flag, layer_list, share

Selection: TypeAlias = Literal["partition", "fixed", "full", "gate", "cascade"]
PrefillRule: TypeAlias = Literal["candidates", "budget", "dense"]
Scope: TypeAlias = Literal["batch", "sequence"]
Unseen: TypeAlias = Literal["weights", "layer", "dense"]
BackendName: TypeAlias = Literal["auto", "masked", "sliced", "indexed"]


@dataclass(frozen=True)
class OnlineChannelPruning(Method):
    """Prune FFN channels online: the prompt partitions them, each generated token picks (arXiv 2602.06822).

    Per layer, the prompt's activations rank the `intermediate_size` channels and split them into retained ones (always
    active), candidates (each token activates the best of them) and pruned ones (never computed for this prompt).

    Args:
        ratio: the paper's overall target: share of the attention and FFN parameters that is not used, 0 <= ratio < 1.
            All of it is taken from the FFN, so the MLP ratio is higher (Table 8).
        mlp_ratio: sets the MLP ratio r directly: 1 - r of the channels are active; overrides `ratio`.
        partition_fraction: the paper's gamma: share of the channels that are candidates. The partition's half-width
            delta is half of it (the paper never writes the relation; for the reading delta = gamma give 2 * gamma).
        pruned_share: share of the channels pruned by the prompt, instead of the paper's r - delta.
        selection: how a token's channels are chosen: `"partition"` (the method), `"fixed"` (the prompt's choice for all
            tokens: Variant 1), `"full"` (all channels rescored: Variant 2), or beyond the paper `"gate"`: by the
            activated gate alone, so that up and down projections are computed only for what was chosen; `"cascade"`: by
            the gate, and how large the prompt's up projections were, which up projections to compute, and by those
            which channels are active.
        up_share: share of the channels whose up projection `"cascade"` computes; None: halfway between the active ones
            and all.
        prefill: channels active in the prompt itself: `"candidates"` (retained and candidates), `"budget"` (the best
            1 - r), `"dense"`.
        scope: `"batch"`: one partition and one choice per step for the whole batch (the paper's formula);
            `"sequence"`: each sequence its own, as if it were alone.
        backend: what runs the FFN of generated tokens: `"masked"` (no speed-up), `"sliced"`, `"indexed"`, `"auto"`.
        ratios: MLP ratios layer by layer; overrides `ratio` and `mlp_ratio`.
        protect: layers that stay dense.
        refresh: renew the partition at every n-th generated token, which computes all channels and counts as n tokens;
            None: never (the paper).
        multiple: round the number of retained, computed and active channels up to a multiple of this.
        unseen: what an expert goes by that the prompt did not use: `"weights"` (the norms of its down projection
            alone), `"layer"` (the layer's prompt tokens, as if they had been routed to it), `"dense"` (all channels).
        unseen_below: an expert that fewer of the prompt's tokens used counts as unseen.
        routing_weights: multiply an expert's activations with the router's weight for the token before they are scored.
        shared_experts: prune the channels of shared experts, too, by the ratio of the routed ones.

    Routed experts are pruned each by its own tokens (the router is not touched); the last four are about them.

    Raises:
        SettingError: on a wrong type or value.
    """

    kind: ClassVar[str] = "online-channel-pruning"

    ratio: float = 0.2
    mlp_ratio: float | None = None
    partition_fraction: float = 0.1
    pruned_share: float | None = None
    selection: Selection = "partition"
    up_share: float | None = None
    prefill: PrefillRule = "candidates"
    scope: Scope = "batch"
    backend: BackendName = "auto"
    ratios: Sequence[float] | None = None
    protect: Sequence[int] = ()
    refresh: int | None = None
    multiple: int = 1
    unseen: Unseen = "weights"
    unseen_below: int = 1
    routing_weights: bool = False
    shared_experts: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "ratio", share("ratio", self.ratio))
        for name in ("mlp_ratio", "pruned_share"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, share(name, getattr(self, name)))
        object.__setattr__(self, "partition_fraction", _fraction("partition_fraction", self.partition_fraction))
        choice("selection", self.selection, get_args(Selection))
        if self.up_share is not None:
            if self.selection != "cascade":
                raise SettingError(f"up_share is for selection='cascade', but selection is {self.selection!r}")
            object.__setattr__(self, "up_share", _fraction("up_share", self.up_share))
        choice("prefill", self.prefill, get_args(PrefillRule))
        choice("scope", self.scope, get_args(Scope))
        choice("backend", self.backend, get_args(BackendName))
        count("multiple", self.multiple)
        choice("unseen", self.unseen, get_args(Unseen))
        count("unseen_below", self.unseen_below)
        flag("routing_weights", self.routing_weights)
        flag("shared_experts", self.shared_experts)
        if self.refresh is not None:
            count("refresh", self.refresh)
        if self.ratios is not None:
            if isinstance(self.ratios, (str, bytes)) or not isinstance(self.ratios, Sequence):
                raise SettingError(f"ratios must list one MLP ratio per layer, got {type(self.ratios).__name__}")
            object.__setattr__(self, "ratios", tuple(share("ratios", ratio) for ratio in self.ratios))
        object.__setattr__(self, "protect", layer_list("protect", self.protect))

    @property
    def delta(self) -> float:
        """Half-width of the partition around the MLP ratio (paper, section 3.3)."""
        return self.partition_fraction / 2

    @classmethod
    def preset(cls, name: str) -> Self:
        """Settings by name: `paper`, the faithful default; `careful`, `balanced`, `fast` (see `PRESETS`).

        Raises:
            SettingError: for an unknown name.
        """
        if name not in PRESETS:
            raise SettingError(f"unknown preset {name!r}; known: {', '.join(PRESETS)}")
        return cls.from_dict(PRESETS[name])


PRESETS: dict[str, dict[str, object]] = {
    "paper": {},
    "careful": {"selection": "cascade", "mlp_ratio": 0.4, "up_share": 0.8, "pruned_share": 0.0},
    "balanced": {"selection": "cascade", "mlp_ratio": 0.5, "up_share": 0.7, "pruned_share": 0.0},
    "fast": {"selection": "cascade", "mlp_ratio": 0.6, "up_share": 0.55, "pruned_share": 0.0},
}
"""Named settings. `paper` is the faithful default; the others read 80, 73 and 65 % of the FFN weights for each token.

They lie on the best curve of docs/channels.md. All of them compute every gate, so that the prompt rules nothing out.
"""


def _fraction(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise SettingError(f"{name} must satisfy 0 <= {name} <= 1, got {value!r}")
    return float(value)
