"""`stageprune compare`: dense and pruned side by side on one prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from stageprune.cli import channel_options, options, parse, prompts, show
from stageprune.cli.command_line import command_line
from stageprune.cli.common import UsageProblem, console, load_model, output, progress, set_threads, shown_name
from stageprune.methods import OnlineChannelPruning

if TYPE_CHECKING:
    from stageprune.evaluate.comparison import Comparison
    from stageprune.evaluate.speed import DecodeSpeed

TOPIC, QUESTION = "string-methods", "What does str.capitalize() do?"
"""The built-in prompt: technical prose with a question about its beginning."""

PATIENCE = 60.0
"""Seconds for the timed turns, after which fewer than `--repeats` are enough: a slow machine shall finish, too."""


def compare(
    prompt: options.Prompt = None,
    model: options.Model = "demo",
    file: options.PromptFile = None,
    chat: options.Chat = None,
    length: Annotated[
        Any, typer.Option("--length", parser=parse.count, metavar="N", help="Tokens of the built-in prompt.")
    ] = "2000",
    max_new_tokens: options.MaxNewTokens = "48",
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
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot", help="Draw how the answer chooses channels: a PNG, SVG or PDF file.", show_default=False
        ),
    ] = None,
    repeats: Annotated[
        Any, typer.Option("--repeats", parser=parse.count, metavar="N", help="Pairs of dense and pruned turns to time.")
    ] = "5",
    dtype: options.Dtype = "bfloat16",
    device: options.Device = None,
    threads: options.Threads = None,
    as_json: options.Json = False,
) -> None:
    """Compare the dense and the pruned model on one prompt: time to the first token, and the answers.

    Without a prompt, a built-in one is used: technical prose with a question about it.
    """
    channels = channel_options.channels_of(
        channel_ratio, partition_fraction, selection, channel_preset, channel_backend, channel_setting
    )
    layer_options = options.LayerOptions(layers, importance, contiguous, projections)
    methods = channel_options.methods_or_file(settings, ratio, layer_options, channels)
    channels = next((method for method in methods if isinstance(method, OnlineChannelPruning)), None)
    if plot is not None:
        if channels is None:
            raise UsageProblem("--plot draws how channels are chosen; give --channel-ratio, too")
        from stageprune.evaluate.figure import check_figure

        check_figure(plot)
    text = prompts.read_prompt(prompt, file)
    set_threads(threads)
    loaded = load_model(model, dtype, device)
    channel_options.check_model(loaded.model, settings, layer_options)

    import torch

    from stageprune.evaluate.comparison import compare as run
    from stageprune.evaluate.comparison import observed, turns_of
    from stageprune.evaluate.system import system_info
    from stageprune.evaluate.text import prompt_of
    from stageprune.pruning import prune

    if text is None:
        prompts.check_fits(loaded.model, length, max_new_tokens)
        tokens = prompt_of(loaded.tokenizer, length, QUESTION, topic=TOPIC)
    else:
        tokens = prompts.tokens_of(loaded.tokenizer, text, chat)
    prompts.check_fits(loaded.model, len(tokens), max_new_tokens)
    input_ids = torch.tensor([tokens], device=loaded.model.device)
    with prune(loaded.model, *methods) as handle, progress("comparing", turns_of(repeats)) as step:
        result = run(handle, input_ids, max_new_tokens=max_new_tokens, pairs=repeats, patience=PATIENCE, on_turn=step)
        if channels is not None:
            result = observed(handle, result, input_ids)
    if plot is not None:
        from stageprune.evaluate.channel_plot import plot_channels

        plot_channels(result.report, plot)
        console.print(f"written: {plot}", style="dim", markup=False, soft_wrap=True)
    answers = [
        loaded.tokenizer.decode(answer.tokens[0], skip_special_tokens=True) for answer in (result.dense, result.pruned)
    ]
    if as_json:
        data = {
            "kind": "stageprune-compare",
            "command": command_line(),
            "model": shown_name(model),
            "dtype": str(loaded.model.dtype).removeprefix("torch."),
            "device": str(loaded.model.device),
            "system": system_info(),
            "prompt_tokens": len(tokens),
            **result.to_dict(),
            "dense_text": answers[0],
            "pruned_text": answers[1],
        }
        typer.echo(json.dumps(data, indent=2))
        return
    where = f"{str(loaded.model.dtype).removeprefix('torch.')} on {loaded.model.device}"
    if loaded.model.device.type == "cpu":
        where += f" with {torch.get_num_threads()} threads"
    _show(result, model, where, text or f"{len(tokens):,} tokens of technical prose, then: {QUESTION}", answers)


def _show(result: Comparison, model: str, where: str, prompt: str, answers: list[str]) -> None:
    report, prefill = result.report, result.prefill
    skips = (
        f"The prompt of {report.prompt_length:,} tokens skips {len(report.skipped_layers)} of "
        f"{report.num_hidden_layers} layers ({options.shown(report.skipped_layers)}); "
        "its last token and the answer use all."
        if report.skipped_layers or not report.channels
        else f"The prompt of {report.prompt_length:,} tokens uses all layers."
    )
    output.print(f"{model}: {report.model}, {where}\n{skips}", markup=False, soft_wrap=True)
    if report.channels:
        output.print(f"Each generated token: {show.pruned_channels(report)}.", markup=False, soft_wrap=True)
    output.print(_table(result))
    if result.decode is not None and report.channels:
        output.print(_decode_line(result.decode), soft_wrap=True)
    output.print(
        f"Speed-up of the first token: {show.factor(prefill.speedup.median)}, "
        f"{prefill.achieved:.0%} of the ideal {show.factor(prefill.ideal_speedup)}. "
        f"The middle half of {prefill.speedup.count} alternating pairs lies at {show.quartiles(prefill.speedup)}.\n",
        soft_wrap=True,
    )
    if prefill.dense_s.is_wide or prefill.pruned_s.is_wide:
        output.print(f"{show.BUSY}\n", soft_wrap=True)
    shortened = " ".join(prompt.split())
    output.print(Text(f"Prompt: {shortened[:200]}{'…' if len(shortened) > 200 else ''}"), soft_wrap=True)
    for title, answer in zip(("dense", "pruned"), answers, strict=True):
        output.print(Panel(Text(answer.strip()), title=title, title_align="left"))
    output.print(_verdict(result), soft_wrap=True)


def _table(result: Comparison) -> Table:
    report, prefill = result.report, result.prefill
    table = Table("", title_justify="left")
    for name in ("dense", "pruned", "speed-up"):
        table.add_column(name, justify="right")
    rows: list[tuple[Any, ...]] = [
        (
            "first token",
            *map(show.seconds, prefill.typical_s),
            show.factor(prefill.speedup.median),
        ),
        (
            "operations until then",
            f"{report.dense_flops / 1e9:,.0f} GFLOP",
            f"{report.pruned_flops / 1e9:,.0f} GFLOP",
            f"{show.factor(prefill.ideal_speedup)} ideal",
        ),
        _decode_row(result),
    ]
    for row in rows:
        table.add_row(*row)
    return table


def _decode_row(result: Comparison) -> tuple[str, ...]:
    if result.decode is None:
        return ("tokens after it", "-", "-", "-")
    rates = map(show.rate, result.decode.typical_tokens_per_s)
    return ("tokens after it", *rates, show.factor(result.decode.speedup.median))


def _decode_line(decode: DecodeSpeed) -> str:
    after = decode.break_even_tokens
    pays = "never, here" if after is None else "at once" if after == 0 else f"after {after:.0f} generated tokens"
    return (
        f"Speed-up of generation: {show.factor(decode.speedup.median)}, {decode.achieved:.0%} of the ideal "
        f"{show.factor(decode.ideal_speedup)} by bytes read; it makes up for the time after the prompt {pays}."
    )


def _verdict(result: Comparison) -> str:
    dense, pruned = (answer.tokens.shape[1] for answer in (result.dense, result.pruned))
    if result.first_difference is None:
        return f"The answers are equal, all {dense} tokens."
    return (
        f"Equal tokens: {result.equal_share:.0%} of {max(dense, pruned)}; the answers part at token "
        f"{result.first_difference + 1}. After the same tokens before, the pruned model chooses the dense model's "
        f"next token {result.agreement:.0%} of the time."
    )
