"""The settings of each method. Plain data: what they do lives in `prefill/` and `channels/`."""

from stageprune.methods.base import Method
from stageprune.methods.online_channels import OnlineChannelPruning
from stageprune.methods.prefill_only import LayerRule, PrefillOnlyPruning

__all__ = ["LayerRule", "Method", "OnlineChannelPruning", "PrefillOnlyPruning"]
