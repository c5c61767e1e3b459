"""What `handle.observe()` sees, against a plain computation from the definition."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import stageprune as sp
from helpers import generate, tokens
from reference import channel_ffn as ref
from reference.channel_oracle import ReferenceFFN
from stageprune.evaluate.channel_plot import plot_channels
from zoo import BY_NAME

LLAMA = replace(BY_NAME["llama"], options=BY_NAME["llama"].options | dict(num_hidden_layers=2))
METHOD = sp.OnlineChannelPruning(mlp_ratio=0.4, partition_fraction=0.3, backend="masked")
NEW = 5


@pytest.fixture(scope="module")
def llama():
    return LLAMA.build()


@pytest.mark.parametrize("selection", ["partition", "fixed", "full", "cascade"])
def test_observed_equals_the_definition(llama, selection: str) -> None:
    method = replace(METHOD, selection=selection)
    ids = tokens(1, 11)
    inputs: list[torch.Tensor] = []
    with sp.prune(llama, method) as handle:
        hook = llama.model.layers[0].mlp.register_forward_pre_hook(lambda module, args: inputs.append(args[0][0]))
        with handle.observe():
            _, watched = generate(llama, ids, NEW)
        hook.remove()
        seen = handle.report().channels[0].observed
        _, unwatched = generate(llama, ids, NEW)
    assert torch.equal(watched, unwatched), "watching changes nothing"
    x = torch.cat(inputs)
    module = llama.model.layers[0].mlp
    layer = ReferenceFFN(module, method, 0.4, torch.ones(1, 1, dtype=torch.bool), torch.ones(1, 1), ())
    ffn, prompt, rows = layer.ffn, x[:10], x[10:]
    parts = ref.partition(
        ffn, ref.add_rows(ffn, ref.no_rows(ffn), prompt), layer.sizes, ref.add_up_rows(ffn, ref.no_rows(ffn), prompt)
    )
    channels = ffn.channels
    overlaps, differences, chosen = [], [], []
    for row in rows:
        order = ref.ranked(ref.column_norms(ffn) * ref.hidden(ffn, row[None])[0].abs())
        overlaps.append(len(set(order[: channels // 2]) & set(parts.order[: channels // 2])) / (channels // 2))
        differences.append(sum(abs(order.index(c) - parts.order.index(c)) for c in range(channels)) / channels**2)
        chosen.append(set(ref.chosen(ffn, row[None], parts, selection)))
    assert seen is not None
    assert seen.tokens == NEW
    assert seen.overlap == pytest.approx(overlaps)
    assert seen.rank_difference == pytest.approx(differences)
    assert len(seen.ranks) == NEW
    if selection == "fixed":
        assert seen.turnover is None
    else:
        count = layer.sizes.picked if selection == "partition" else layer.sizes.active
        new = [len(after - before) / count for before, after in itertools.pairwise(chosen)]
        assert seen.turnover == pytest.approx(sum(new) / len(new))
        assert seen.turnover > 0


def test_the_report_shows_it(llama) -> None:
    with sp.prune(llama, METHOD) as handle:
        assert all(part.observed is None for part in handle.report().channels)
        with handle.observe():
            generate(llama, tokens(2, 9), 3)
        report = handle.report()
    text = str(report)
    for part in report.channels:
        assert part.observed is not None
        assert part.observed.turnover is not None
        line = next(line for line in text.splitlines() if line.startswith(f"{part.layer:>5} "))
        for shown in (part.sizes.retained, part.sizes.candidates, part.sizes.pruned, part.sizes.picked):
            assert f" {shown} " in line
        assert f"{part.observed.turnover:.1%}" in line
        assert f"{part.observed.mean_overlap:.1%}" in line
    assert report.to_dict()["channels"][0]["observed"]["tokens"] == 3


def test_a_batch_and_sequences_of_their_own(llama) -> None:
    for scope in ("batch", "sequence"):
        with sp.prune(llama, replace(METHOD, scope=scope)) as handle:
            with handle.observe():
                generate(llama, tokens(3, 9), 4)
            seen = handle.report().channels[0].observed
        assert seen is not None
        assert seen.tokens == 4
        assert 0 < seen.mean_overlap <= 1


def test_nothing_to_observe(llama, tmp_path: Path) -> None:
    with sp.prune(llama, sp.PrefillOnlyPruning(0.5)) as handle:
        with pytest.raises(sp.SettingError, match="OnlineChannelPruning"):
            handle.observe()
        with pytest.raises(sp.SettingError, match="observe"):
            plot_channels(handle.report(), tmp_path / "picture.png")


@pytest.mark.parametrize(("kind", "head"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_plot(llama, kind: str, head: bytes, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need the extra [plots]")
    with sp.prune(llama, METHOD) as handle:
        with handle.observe():
            generate(llama, tokens(1, 9), 4)
        plot_channels(handle.report(), tmp_path / f"picture.{kind}")
    picture = (tmp_path / f"picture.{kind}").read_bytes()
    assert picture.startswith(head)
    assert len(picture) > 5_000
