"""lmms-eval's own registry, base class and arguments, around a tiny vision-language model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("lmms_eval.api.model", reason="lmms-eval is not installed: pip install 'stageprune[vision-eval]'")

import lmms_eval.models
from lmms_eval.api.model import lmms
from lmms_eval.models.registry_v2 import ModelRegistryV2

import stageprune as sp
from helpers import close, exact_logits
from reference import vision as ref
from stageprune.evaluate.lmms_eval_adapter import StagePruneLMM, manifest
from vlm_zoo import PROMPTS, VISION_BY_NAME

pytestmark = pytest.mark.usefixtures("everything_in_float64")
KIND = VISION_BY_NAME["qwen3-vl"]


class Tiny(lmms):
    """What a class of lmms-eval looks like: a model of transformers, and batches through its `generate`."""

    def __init__(self, pretrained: str, batch_size: int = 1) -> None:
        super().__init__()
        self.pretrained, self.batch_size = pretrained, batch_size
        self._model = KIND.build()

    @property
    def model(self) -> Any:
        return self._model

    def generate_until(self, requests: Any) -> list[list[int]]:
        inputs = KIND.inputs(self.model, PROMPTS["one image"])
        return self.model.generate(**inputs, max_new_tokens=3, do_sample=False).tolist()

    def loglikelihood(self, requests: Any) -> Any:
        return [(0.0, True)]

    def generate_until_multi_round(self, requests: Any) -> Any:
        raise NotImplementedError


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmms_eval.models, "get_model", {"tiny": Tiny}.__getitem__)


def test_the_manifest_is_one_of_lmms_eval() -> None:
    registry = ModelRegistryV2()
    registry.register_manifest(manifest())
    assert registry.resolve("stageprune").class_path == f"{StagePruneLMM.__module__}.StagePruneLMM"


@torch.no_grad()
def test_what_it_generates_is_pruned() -> None:
    made = StagePruneLMM.create_from_arg_string("base=tiny,pretrained=x,prefill_ratio=1/2", {"batch_size": 2})
    assert isinstance(made, Tiny)
    assert (made.pretrained, made.batch_size) == ("x", 2)
    inputs = KIND.inputs(made.model, PROMPTS["one image"])
    with made.stageprune.dense():
        expected, logits = ref.greedy(made.model, inputs, 3, (2, 3))
    with exact_logits(made.model) as ours:
        assert made.generate_until([]) == expected.tolist()
    assert close(torch.stack(ours, 1), logits) < 1e-10
    with pytest.raises(sp.UnsupportedModelError, match="choose tasks that generate"):
        made.loglikelihood([])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("pretrained=x,prefill_ratio=1/2", "base must name a model"),
        ("base=stageprune,prefill_ratio=1/2", "base must name a model"),
        ("base=tiny,pretrained=x", "nothing to prune"),
        ("base=tiny,pretrained=x,prefill_ratio=half", "a number or a fraction"),
        ("base=tiny,pretrained=x,prefill_ratio=1/2,settings=f.json", "give one of them"),
    ],
)
def test_wrong_arguments(arguments: str, says: str) -> None:
    with pytest.raises(sp.SettingError, match=says):
        StagePruneLMM.create_from_arg_string(arguments)
