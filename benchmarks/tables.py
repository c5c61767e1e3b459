"""Write the tables of measured numbers into the documents, from the result files: `python benchmarks/tables.py`.

A test checks that the committed documents are what this script writes. The results come from:
    stageprune bench --threads 2 --seconds 15 --json docs/results/bench.json
    python benchmarks/ablation.py
    python benchmarks/channels.py
    stageprune bench --what ffn --channel-ratio 0.3,0.6 --threads 2 --seconds 12 --repeats 15
        --json docs/results/channels-ffn.json
    stageprune bench --what decode --channel-ratio 0.22475,0.4495 --lengths 128,1024 --threads 2 --seconds 30
        --json docs/results/channels-decode.json
    python benchmarks/decode_split.py
    python benchmarks/fitted.py
    python benchmarks/fitted_speed.py
    python benchmarks/importance.py importance.json  (of stageprune analyze, see there)
    python benchmarks/trained.py
    python benchmarks/sweep.py
    python benchmarks/overlap.py
and docs/results.md, all of them together, from `benchmarks/report.py`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def speed_table(data: dict[str, Any]) -> str:
    """The time to the first token on the demo model."""
    system = data["system"]
    lines = [
        f"SmolLM2-135M-Instruct ({data['dtype']}), batch 1, 10 of 30 layers skipped, {system['cpu']} with",
        f"{system['threads']} threads, torch {system['torch']}, transformers {system['transformers']}. Dense and",
        "pruned turns alternate on the same prompts; medians, and the middle half of the speed-ups. Reproduce with",
        "`stageprune bench --threads 2 --seconds 15`.",
        "",
        "| prompt tokens | dense | pruned | speed-up | middle half | ideal (FLOPs) | peak memory dense / pruned |",
        "|---|---|---|---|---|---|---|",
    ]
    for cell in data["cells"]:
        part, memory = cell["prefill"], cell["memory"]
        speedup = part["speedup"]
        lines.append(
            f"| {cell['prompt_length']:,} | {part['dense_s']['median'] * 1e3:,.0f} ms "
            f"| {part['pruned_s']['median'] * 1e3:,.0f} ms | {_with_middle_half(speedup)} "
            f"| {part['ideal_speedup']:.2f}x "
            f"| {memory['dense_bytes'] / 1e6:.0f} / {memory['pruned_bytes'] / 1e6:.0f} MB |"
        )
    return "\n".join(lines)


def ffn_table(data: dict[str, Any]) -> str:
    """Single FFNs with the paper's partition."""
    system = data["system"]
    lines = [
        f"Single FFNs, paper's partition with γ 0.1, {data['dtype']}, one token at a time, {system['cpu']} with",
        f"{system['threads']} threads, torch {system['torch']}. Dense and pruned passes alternate; medians. More than",
        "the ideal is possible because the kernel also reads faster than torch's dense product does. Reproduce with",
        "`stageprune bench --what ffn --channel-ratio 0.3,0.6 --threads 2 --seconds 12 --repeats 15`.",
        "",
        "| hidden x intermediate | r | dense | pruned | speed-up | middle half | ideal (bytes) | preparation |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for cell in data["cells"]:
        speedup = cell["speedup"]
        lines.append(
            f"| {cell['hidden_size']} x {cell['intermediate_size']:,} | {cell['method']['mlp_ratio']:g} "
            f"| {cell['dense_s']['median'] * 1e3:.2f} ms | {cell['pruned_s']['median'] * 1e3:.2f} ms "
            f"| {_with_middle_half(speedup)} "
            f"| {cell['ideal_speedup']:.2f}x | {cell['preparation_s']['median'] * 1e3:.2f} ms |"
        )
    return "\n".join(lines)


def decode_table(data: dict[str, Any]) -> str:
    """Whole decode steps of the demo model."""
    system = data["system"]
    lines = [
        f"SmolLM2-135M-Instruct ({data['dtype']}), batch 1, paper's partition with γ 0.1, {system['threads']} threads,",
        f"transformers {system['transformers']}. Reproduce with",
        "`stageprune bench --what decode --channel-ratio 0.22475,0.4495 --lengths 128,1024 --threads 2 --seconds 30`.",
        "",
        "| FFN bytes | prompt | dense | pruned | speed-up | middle half | ideal (bytes) | preparation | break-even |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for cell in data["cells"]:
        decode = cell["decode"]
        speedup, after = decode["speedup"], decode["break_even_tokens"]
        lines.append(
            f"| {cell['ffn_bytes']:.0%} | {cell['prompt_length']:,} tokens "
            f"| {decode['dense_tokens_per_s']['median']:.1f} tokens/s "
            f"| {decode['pruned_tokens_per_s']['median']:.1f} tokens/s | {_with_middle_half(speedup)} "
            f"| {decode['ideal_speedup']:.2f}x "
            f"| {decode['preparation_steps']:.2f} steps | {'never' if after is None else f'{after:.0f} tokens'} |"
        )
    return "\n".join(lines)


def split_table(data: dict[str, Any]) -> str:
    """How much of a decode step the FFNs are, and what that leaves to win."""
    lines = [
        f"SmolLM2-135M-Instruct ({data['dtype']}), batch 1, {data['system']['threads']} threads; medians of",
        "alternating answers. *At most*: the speed-up if the FFNs took no time at all. Reproduce with",
        "`python benchmarks/decode_split.py`.",
        "",
        "| prompt | FFN bytes | dense step | of it FFNs | pruned step | of it FFNs | FFNs' speed-up | at most |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for cell in data["cells"]:
        dense, ffn = cell["dense_step_s"], cell["dense_ffn_s"]
        lines.append(
            f"| {cell['prompt_length']:,} tokens | {cell['ffn_bytes']:.0%} | {dense * 1e3:.1f} ms | {ffn * 1e3:.1f} ms "
            f"| {cell['pruned_step_s'] * 1e3:.1f} ms | {cell['pruned_ffn_s'] * 1e3:.1f} ms "
            f"| {ffn / cell['pruned_ffn_s']:.2f}x | {dense / (dense - ffn):.2f}x |"
        )
    return "\n".join(lines)


def _with_middle_half(speedup: dict[str, float]) -> str:
    """Two cells: a speed-up, and where its middle half lies."""
    return f"{speedup['median']:.2f}x | {speedup['lower']:.2f}-{speedup['upper']:.2f}"


def with_section(text: str, name: str, content: str) -> str:
    """The text with the part between `<!-- name -->` and `<!-- /name -->` replaced."""
    pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
    if not re.search(pattern, text, re.DOTALL):
        raise ValueError(f"no section {name!r}")
    return re.sub(pattern, lambda match: f"{match[1]}{content}\n{match[2]}", text, flags=re.DOTALL)


def documents() -> dict[Path, str]:
    """Every generated document and what it shall contain."""
    import fitted
    import fitted_speed
    import importance
    import report
    import sweep
    import trained
    from ablation import table

    import channels

    results = ROOT / "docs" / "results"
    readme = ROOT / "README.md"
    speed = speed_table(json.loads((results / "bench.json").read_text()))
    page = ROOT / "docs" / "channels.md"
    text = with_section(
        page.read_text(), "quality", channels.table(json.loads((results / "channels.json").read_text()))
    )
    text = with_section(text, "ffn-speed", ffn_table(json.loads((results / "channels-ffn.json").read_text())))
    text = with_section(text, "decode-speed", decode_table(json.loads((results / "channels-decode.json").read_text())))
    text = with_section(text, "decode-split", split_table(json.loads((results / "decode-split.json").read_text())))
    fits = json.loads((results / "fitted.json").read_text())
    calibrate = ROOT / "docs" / "calibrate.md"
    fitted_text = with_section(calibrate.read_text(), "fitted", fitted.table(fits))
    layers = ROOT / "docs" / "importance.md"
    scores = importance.table(json.loads((results / "importance.json").read_text()))
    speeds = fitted_speed.table(json.loads((results / "fitted-speed.json").read_text()))
    fitted_text = with_section(fitted_text, "fitted-speed", speeds)
    small = ROOT / "docs" / "trained.md"
    learned = json.loads((results / "trained.json").read_text())
    small_text = small.read_text()
    for name in learned:
        small_text = with_section(small_text, name, trained.table(learned, name))
    all_rows = ROOT / "docs" / "sweep.md"
    swept = sweep.table(json.loads((results / "sweep.json").read_text()))
    return {
        page: text,
        all_rows: with_section(all_rows.read_text(), "sweep", swept),
        small: small_text,
        layers: with_section(layers.read_text(), "importance", scores),
        calibrate: with_section(fitted_text, "fitted-kinds", fitted.kinds_table(fits)),
        readme: with_section(readme.read_text(), "speed", speed),
        ROOT / "docs" / "results.md": report.page(),
        ROOT / "docs" / "ablation.md": table(json.loads((results / "ablation.json").read_text())),
    }


if __name__ == "__main__":
    for path, content in documents().items():
        path.write_text(content)
