"""lm-evaluation-harness with a pruned model: importing this module registers the model `stageprune`.

The harness has no way to find models of other packages by itself, so `stageprune lm-eval` imports this module and runs
the harness's own command line; `stageprune eval --tasks` uses the class.

What lm_eval's own class `hf` does stays as it is: tokens, chat templates, stop sequences, post-processing. Likelihoods
of a pruned model are scored in its stages (`likelihood.py`); `generate()` is pruned by itself. Without anything to
prune, this is that class.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from tqdm import tqdm

from stageprune.errors import SettingError
from stageprune.evaluate.likelihood import Request, log_likelihoods
from stageprune.evaluate.setting import Setting
from stageprune.evaluate.task_arguments import setting_of_arguments
from stageprune.methods import Method, OnlineChannelPruning
from stageprune.models import LoadedModel, load
from stageprune.pruning import Handle
from stageprune.settings_file import SettingsFile

NAME = "stageprune"

_OF_HARNESS = (
    "add_bos_token",
    "chat_template_args",
    "enable_thinking",
    "max_length",
    "prefix_token_id",
    "softmax_dtype",
    "think_end_token",
    "truncation",
)


@register_model(NAME)
class StagePruneLM(HFLM):
    """A model of the harness.

    Args:
        pretrained: what `stageprune.models.load` takes, such as a hub id, a folder, or `"demo"`; or a model that is
            loaded already, with its tokenizer.
        prefill_ratio: share of the layers that the prompt skips, such as 0.25 or `"1/3"`.
        channel_ratio: share of the attention and FFN weights that generated tokens do not use.
        channel_preset: instead, named settings of channel pruning.
        settings: instead of all three, the settings file that says how to prune.
        setting: instead of all four, the methods themselves.
        channel_scope: `"sequence"`: each sequence of a batch chooses channels as if it were alone, so that results do
            not depend on the batch; `"batch"`: all together (the paper's formula), as the settings say.
        dtype: of the weights.
        device: of the model; None: cuda if there is one, else the CPU.
        attn_implementation, trust_remote_code, revision: as `load` takes them.
        batch_size: rows at a time, or `"auto"`.
        max_batch_size: at most, for `"auto"`.
        options: of lm_eval's class: `add_bos_token`, `chat_template_args`, `enable_thinking`, `max_length`,
            `prefix_token_id`, `softmax_dtype`, `think_end_token`, `truncation`.

    Attributes:
        handle: of the pruned model; None if nothing is pruned.

    Raises:
        SettingError: for an unknown option, settings that contradict each other, or ones that do not fit the model.
        ModelLoadError: if the model cannot be loaded.
        ResultFileError: if the settings file cannot be read, or is of another model.
        UnsupportedModelError: if the model cannot be pruned.
    """

    def __init__(
        self,
        pretrained: str | LoadedModel = "demo",
        prefill_ratio: float | str | None = None,
        channel_ratio: float | str | None = None,
        channel_preset: str | None = None,
        settings: str | None = None,
        setting: Setting | None = None,
        channel_scope: str = "sequence",
        dtype: str = "auto",
        device: str | None = None,
        attn_implementation: str | None = None,
        trust_remote_code: bool = False,
        revision: str | None = None,
        batch_size: int | str = 1,
        max_batch_size: int = 64,
        **options: Any,
    ) -> None:
        unknown = sorted(set(options) - set(_OF_HARNESS))
        if unknown:
            raise SettingError(f"the model {NAME!r} of lm_eval has no option {', '.join(unknown)}")
        arguments = (prefill_ratio, channel_ratio, channel_preset, settings)
        if setting is None:
            setting = setting_of_arguments(*arguments)
        elif any(value is not None for value in arguments):
            raise SettingError("settings and ratios each say how to prune; give one of them")
        if isinstance(pretrained, str):
            pretrained = load(
                pretrained,
                dtype=dtype,
                device=device or _device(),
                attn_implementation=attn_implementation,
                trust_remote_code=trust_remote_code,
                revision=revision,
            )
        if settings is not None:
            SettingsFile.load(settings, pretrained.model)
        super().__init__(
            pretrained=pretrained.model,
            tokenizer=pretrained.tokenizer,
            batch_size=batch_size,
            max_batch_size=max_batch_size,
            **options,
        )
        self.handle: Handle | None = None
        if setting.methods:
            methods = tuple(_scoped(method, channel_scope) for method in setting.methods)
            self.handle = replace(setting, methods=methods).attach(self.model)

    def remove(self) -> None:
        """Give the model back unpruned. Doing so twice is harmless."""
        if self.handle is not None:
            self.handle.remove()

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """Answer requests of texts, context tokens and continuation tokens."""
        if self.handle is None:
            answers: list[tuple[float, bool]] = super()._loglikelihood_tokens(requests, disable_tqdm, override_bs)
            return answers
        rows = [_request(texts, context, continuation, self.max_length) for texts, context, continuation in requests]
        size = override_bs or self.batch_size
        if size == "auto":
            longest = max(requests, key=lambda request: len(request[1]) + len(request[2]))
            size = self._detect_batch_size([longest])
        with tqdm(total=len(rows), disable=disable_tqdm, desc="Running loglikelihood requests") as bar:
            found = log_likelihoods(self.handle, rows, int(size), dtype=self.softmax_dtype, on_done=bar.update)
        for (texts, _, _), answer in zip(requests, found, strict=True):
            if texts is not None:  # a window of a rolling request, which caches their sum
                self.cache_hook.add_partial("loglikelihood", texts, answer)
        return found


def _request(texts: Any, context: list[int], continuation: list[int], most: int) -> Request:
    """The stages of one request; too long a context loses its beginning, as with lm_eval's own class."""
    context = context[max(0, len(context) + len(continuation) - most - 1) :]
    # A rolling request has no context: its text is all continuation, also what another window has scored before.
    prefill = 0 if texts is None else len(context) - 1
    return Request(tuple(context), tuple(continuation), prefill)


def _scoped(method: Method, scope: str) -> Method:
    if scope not in ("sequence", "batch"):
        raise SettingError(f"channel_scope must be 'sequence' or 'batch', got {scope!r}")
    if scope == "sequence" and isinstance(method, OnlineChannelPruning):
        return replace(method, scope="sequence")
    return method


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
