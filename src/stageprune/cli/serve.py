"""`stageprune serve`: an OpenAI-compatible server for a pruned model, on transformers or on vLLM."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from typing import Annotated, Any, Literal

import typer

from stageprune.cli import channel_options, options, parse, show, vllm
from stageprune.cli.common import UsageProblem, load_model, note, set_threads, shown_name
from stageprune.errors import PromptError
from stageprune.settings_file import settings_beside

_TRANSFORMERS_ONLY = {
    "max_queue": "--max-queue", "max_new_tokens": "--max-new-tokens", "grace": "--grace", "device": "--device",
    "threads": "--threads",
}  # fmt: skip
_VLLM_ONLY = {"role": "--role", "prefix_cache": "--prefix-cache", "check": "--check/--no-check"}


def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help=options.MODEL_HELP)],
    ratio: options.Ratio = None,
    layers: options.Layers = None,
    importance: options.Importance = None,
    contiguous: options.Contiguous = None,
    projections: options.Projections = None,
    settings: options.Settings = None,
    channel_ratio: channel_options.ChannelRatio = None,
    partition_fraction: channel_options.PartitionFraction = None,
    selection: channel_options.SelectionRule = None,
    channel_preset: channel_options.Preset = None,
    channel_backend: channel_options.Backend = None,
    channel_setting: channel_options.Others = None,
    dense: Annotated[bool, typer.Option("--dense", help="Do not prune.")] = False,
    host: Annotated[str, typer.Option("--host", help="Address to listen on; by default only this machine's.")] = (
        "127.0.0.1"
    ),
    port: Annotated[
        Any, typer.Option("--port", parser=parse.port, metavar="N", help="Port to listen on; 0: any that is free.")
    ] = "8000",
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key",
            envvar="STAGEPRUNE_API_KEY",
            metavar="KEY",
            show_default=False,
            help="Refuse clients that do not send this key. Others on this machine see options; prefer the variable.",
        ),
    ] = None,
    served_model_name: Annotated[
        str | None,
        typer.Option(
            "--served-model-name", metavar="NAME", show_default=False, help="What clients call it. Default: its name."
        ),
    ] = None,
    max_queue: Annotated[
        Any, typer.Option("--max-queue", parser=parse.size, metavar="N", help="Requests that may wait while one runs.")
    ] = "64",
    max_model_len: Annotated[
        Any,
        typer.Option(
            "--max-model-len",
            parser=parse.count,
            metavar="N",
            show_default=False,
            help="Tokens of a prompt and its answer at most. Default: the model's context.",
        ),
    ] = None,
    max_new_tokens: Annotated[
        Any,
        typer.Option(
            "--max-new-tokens",
            "-n",
            parser=parse.count,
            metavar="N",
            show_default=False,
            help="Tokens of an answer at most. Default: what the prompt leaves.",
        ),
    ] = None,
    grace: Annotated[
        Any,
        typer.Option("--grace", parser=parse.seconds, metavar="S", help="Seconds to finish what runs at a signal."),
    ] = "5",
    dtype: options.Dtype = "auto",
    device: options.Device = None,
    threads: options.Threads = None,
    engine: Annotated[
        Literal["transformers", "vllm"],
        typer.Option("--engine", help="transformers: one request at a time; vllm: many, with its scheduler."),
    ] = "transformers",
    role: Annotated[
        Literal["both", "prefill"] | None,
        typer.Option(
            "--role",
            show_default=False,
            help="vllm: prefill holds of skipped layers only what encodes prompts, for another instance.",
        ),
    ] = None,
    prefix_cache: Annotated[
        Literal["exact", "shared"] | None,
        typer.Option(
            "--prefix-cache",
            show_default=False,
            help="vllm: shared reuses earlier answers in later prompts as they were generated. Default: exact.",
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="vllm: compare it with the library first, once for each version.")
    ] = True,
) -> None:
    """Answer the requests of OpenAI clients until a signal stops it.

    With --engine vllm, arguments behind -- are vLLM's own, such as -- --tensor-parallel-size 2.

    Prompts skip the last third of the layers, unless --ratio, --layers, --settings or --dense, or a stageprune.json
    in the checkpoint's folder, say otherwise. With options about channels and none about layers, only channels are
    pruned.
    """
    channels = channel_options.channels_of(
        channel_ratio, partition_fraction, selection, channel_preset, channel_backend, channel_setting
    )
    layer_options = options.LayerOptions(layers, importance, contiguous, projections)
    said = ratio is not None or layer_options.given or channels is not None or settings is not None
    if not said and not dense:
        settings = settings_beside(model)
        if settings is not None:
            note(f"following {str(settings)!r}")
    methods = channel_options.methods_or_file(settings, ratio, layer_options, channels)
    if dense and said:
        raise UsageProblem("--dense does not prune, so no option about layers or channels can apply")
    if dense and (role is not None or prefix_cache is not None):
        option = "--prefix-cache" if role is None else "--role"
        raise UsageProblem(f"--dense does not prune, and {option} says how a pruned model is served")
    if api_key is not None and not (api_key.strip() and api_key.isascii() and api_key.isprintable()):
        raise UsageProblem("the API key must be of printable ASCII characters, and not empty")
    if engine == "vllm":
        _check_options(context, _TRANSFORMERS_ONLY, "is for --engine transformers")
        vllm_options = {
            "host": host, "port": port, "max-model-len": max_model_len, "dtype": None if dtype == "auto" else dtype,
        }  # fmt: skip
        vllm.start(
            model, served_model_name, () if dense else methods, vllm_options, context.args, api_key, check,
            role=role, prefix_cache=prefix_cache,
        )  # fmt: skip
    _check_options(context, _VLLM_ONLY, "is for --engine vllm")
    if context.args:
        raise UsageProblem(f"unexpected argument {context.args[0]!r}; further ones are for --engine vllm")

    from stageprune.serving.transformers.extra import require_extra

    require_extra()
    from stageprune.pruning import prune
    from stageprune.serving import address
    from stageprune.serving.transformers import server
    from stageprune.serving.transformers.limits import Limits
    from stageprune.serving.transformers.service import Service

    set_threads(threads)
    with ExitStack() as stack:
        sock = stack.enter_context(address.bind(host, port))
        loaded = load_model(model, dtype, device)
        channel_options.check_model(loaded.model, settings, layer_options)
        limits = Limits(_context(loaded.model, max_model_len), max_new_tokens, max_queue, grace_s=grace)
        handle = None if dense else stack.enter_context(prune(loaded.model, *methods))
        name = served_model_name or shown_name(model)
        service = Service.of(loaded.model, loaded.tokenizer, name, limits, api_key)
        pruned = show.pruned(handle.report(limits.max_model_len)) if handle else "dense"

        def started() -> None:
            note(f"serving {name!r} ({pruned}) at {address.url(sock)}")

        ended = server.serve(service, sock, started)
    if not ended:  # Python would end the thread in the middle of a forward pass, which brings the process down
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _check_options(context: typer.Context, names: dict[str, str], problem: str) -> None:
    """Options that do nothing must not be given."""
    for name, option in names.items():
        source = context.get_parameter_source(name)
        if source is not None and source.name != "DEFAULT":
            raise UsageProblem(f"{option} {problem}")


def _context(model: Any, asked: int | None) -> int:
    """Tokens of prompt and answer at most."""
    longest: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if longest is None and asked is None:
        raise UsageProblem("the model does not say how long its context is; give --max-model-len")
    if longest is not None and asked is not None and asked > longest:
        raise PromptError(f"--max-model-len {asked} is more than the model's context of {longest} tokens")
    return asked or longest or 1
