"""lmms-eval with a pruned vision-language model: the model `stageprune`, found through the package's entry points.

lmms-eval has a class for each family of models, with its own processing of images, templates and batches. This adapter
makes such a model, prunes what it generates with, and hands it over: everything else stays as it is.
"""

from __future__ import annotations

from typing import Any

from stageprune.errors import SettingError, UnsupportedModelError
from stageprune.evaluate.setting import Setting
from stageprune.evaluate.task_arguments import setting_of_arguments
from stageprune.settings_file import SettingsFile

NAME = "stageprune"
_CLASS = f"{__name__}.StagePruneLMM"


def manifest() -> Any:
    """What lmms-eval is told about this package."""
    from lmms_eval.models.registry_v2 import ModelManifest

    return ModelManifest(NAME, simple_class_path=_CLASS, chat_class_path=_CLASS)


class StagePruneLMM:
    """Makes the models of lmms-eval that are pruned."""

    is_simple = False

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> Any:
        """A pruned model of another class of lmms-eval.

        Args:
            arg_string: `--model_args`: `base`, the name of that class in lmms-eval, such as `qwen2_5_vl`; how to prune,
                as `prefill_ratio`, `channel_ratio`, `channel_preset` or `settings`; everything else is that class's.
            additional_config: of lmms-eval, such as the batch size.

        Returns:
            The model, with the handle as its attribute `stageprune`. Likelihoods are refused: that class does not say
            where the context ends.

        Raises:
            SettingError: if `base` or what to prune is missing, or settings contradict each other.
            UnsupportedModelError: if the class has no model of transformers, or it cannot be pruned.
        """
        from lmms_eval.models import get_model

        own, rest = _parted(arg_string)
        base = own.pop("base", None)
        if base is None or base == NAME:
            raise SettingError(f"base must name a model of lmms-eval, such as base=qwen2_5_vl; got {base!r}")
        setting = setting_of_arguments(**own)
        if not setting.methods:
            raise SettingError("nothing to prune: give prefill_ratio, channel_ratio, channel_preset or settings")
        model = get_model(base).create_from_arg_string(rest, additional_config)
        return _pruned(model, setting, own.get("settings"))


def _pruned(model: Any, setting: Setting, file: str | None) -> Any:
    inner = next((found for name in ("_model", "model") if (found := getattr(model, name, None)) is not None), None)
    if not hasattr(inner, "generate"):
        raise UnsupportedModelError(f"{type(model).__name__} of lmms-eval keeps no model of transformers to prune")
    assert inner is not None
    if file is not None:
        SettingsFile.load(file, inner)
    model.stageprune = setting.attach(inner.eval())
    model.loglikelihood = _refuse
    return model


def _refuse(requests: Any) -> Any:
    raise UnsupportedModelError(
        "likelihoods of a pruned model need the place where the context ends, which this class of lmms-eval does not "
        "say; choose tasks that generate"
    )


_OWN = ("base", "prefill_ratio", "channel_ratio", "channel_preset", "settings")


def _parted(arg_string: str) -> tuple[dict[str, Any], str]:
    """Our arguments, and the text of the others."""
    parts = [part for part in arg_string.split(",") if part.strip()]
    pairs = [part.partition("=") for part in parts]
    own = {name.strip(): value.strip() for name, _, value in pairs if name.strip() in _OWN}
    return own, ",".join(part for part, (name, _, _) in zip(parts, pairs, strict=True) if name.strip() not in _OWN)
