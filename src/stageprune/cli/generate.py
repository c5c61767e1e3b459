"""`stageprune generate`: answer one prompt."""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import Annotated, Any

import typer

from stageprune.cli import channel_options, options, parse, prompts, show
from stageprune.cli.common import UsageProblem, console, load_model, set_threads, shown_name


def generate(
    prompt: options.Prompt = None,
    model: options.Model = "demo",
    file: options.PromptFile = None,
    chat: options.Chat = None,
    max_new_tokens: options.MaxNewTokens = "256",
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
    temperature: Annotated[
        float,
        typer.Option("--temperature", "-t", parser=parse.temperature, metavar="T", help="0: always the likeliest."),
    ] = 0,
    top_p: Annotated[
        float, typer.Option("--top-p", parser=parse.top_p, metavar="P", help="Sample from the likeliest tokens only.")
    ] = 1,
    seed: Annotated[
        Any, typer.Option("--seed", parser=parse.seed, metavar="N", help="Of the sampling.", show_default=False)
    ] = None,
    dtype: options.Dtype = "auto",
    device: options.Device = None,
    threads: options.Threads = None,
    as_json: options.Json = False,
) -> None:
    """Answer a prompt; the answer appears as it is generated.

    The prompt skips the last third of the layers, unless --ratio, --layers, --settings or --dense say otherwise. With
    options about channels and none about layers, only channels are pruned.
    """
    channels = channel_options.channels_of(
        channel_ratio, partition_fraction, selection, channel_preset, channel_backend, channel_setting
    )
    layer_options = options.LayerOptions(layers, importance, contiguous, projections)
    methods = channel_options.methods_or_file(settings, ratio, layer_options, channels)
    if dense and (ratio is not None or layer_options.given or channels is not None or settings is not None):
        raise UsageProblem("--dense does not prune, so no option about layers or channels can apply")
    if not temperature and (top_p != 1 or seed is not None):
        raise UsageProblem(
            f"--{'seed' if top_p == 1 else 'top-p'} is about sampling, which needs a --temperature above 0"
        )
    text = prompts.read_prompt(prompt, file) or prompts.piped_prompt()
    set_threads(threads)
    loaded = load_model(model, dtype, device)
    channel_options.check_model(loaded.model, settings, layer_options)
    tokens = prompts.tokens_of(loaded.tokenizer, text, chat)
    prompts.check_fits(loaded.model, len(tokens), max_new_tokens)

    import torch
    from transformers import TextStreamer

    from stageprune.evaluate.clock import timed_generate
    from stageprune.pruning import prune

    sampling: dict[str, Any] = {"do_sample": False}
    if temperature:
        sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
        if seed is not None:
            torch.manual_seed(seed)
    with ExitStack() as stack:
        handle = None if dense else stack.enter_context(prune(loaded.model, *methods))
        if not as_json:
            sampling["streamer"] = TextStreamer(loaded.tokenizer, skip_prompt=True, skip_special_tokens=True)
        input_ids = torch.tensor([tokens], device=loaded.model.device)
        answer = timed_generate(loaded.model, input_ids, max_new_tokens, **sampling)
        report = handle.report(len(tokens)) if handle else None
    if as_json:
        result = {
            "model": shown_name(model),
            "prompt_tokens": len(tokens),
            "new_tokens": answer.tokens[0].tolist(),
            "text": loaded.tokenizer.decode(answer.tokens[0], skip_special_tokens=True),
            "first_token_s": answer.first_token_s,
            "tokens_per_s": answer.tokens_per_s,
            "report": report and report.to_dict(),
        }
        typer.echo(json.dumps(result, indent=2))
        return
    pruned = show.pruned(report) if report else "dense"
    console.print(
        f"prompt {len(tokens):,} tokens ({pruned}); first token after {show.seconds(answer.first_token_s)}, then "
        f"{show.rate(answer.tokens_per_s)}",
        style="dim",
        highlight=False,
        soft_wrap=True,
    )
