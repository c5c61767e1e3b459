"""What users would otherwise use: other papers' pruning, on the same handle, blind to the stages."""

from stageprune.baselines.base import Baseline
from stageprune.baselines.flap import FLAP
from stageprune.baselines.layer_dropping import LayerDropping
from stageprune.baselines.magnitude import Magnitude
from stageprune.baselines.probe_pruning import ProbePruning
from stageprune.baselines.random_channels import RandomChannels
from stageprune.baselines.shortgpt import ShortGPT
from stageprune.baselines.slicegpt import SliceGPT
from stageprune.baselines.wanda import Wanda
from stageprune.baselines.wanda_sp import WandaSp

BASELINES: dict[str, type[Baseline]] = {
    kind.kind: kind
    for kind in (LayerDropping, ShortGPT, SliceGPT, Wanda, WandaSp, FLAP, ProbePruning, Magnitude, RandomChannels)
}
"""All of them, by name."""

__all__ = [
    "BASELINES",
    "FLAP",
    "Baseline",
    "LayerDropping",
    "Magnitude",
    "ProbePruning",
    "RandomChannels",
    "ShortGPT",
    "SliceGPT",
    "Wanda",
    "WandaSp",
]
