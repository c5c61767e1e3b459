"""Write the tables of measured numbers into the documents, from the result files: `python benchmarks/tables.py`.

A test checks that the committed documents are what this script writes. The results come from:
    stageprune bench --threads 2 --seconds 15 --json docs/results/bench.json
    python benchmarks/ablation.py
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
            f"| {part['pruned_s']['median'] * 1e3:,.0f} ms | {speedup['median']:.2f}x "
            f"| {speedup['lower']:.2f}-{speedup['upper']:.2f} | {part['ideal_speedup']:.2f}x "
            f"| {memory['dense_bytes'] / 1e6:.0f} / {memory['pruned_bytes'] / 1e6:.0f} MB |"
        )
    return "\n".join(lines)


def with_section(text: str, name: str, content: str) -> str:
    """The text with the part between `<!-- name -->` and `<!-- /name -->` replaced."""
    pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
    if not re.search(pattern, text, re.DOTALL):
        raise ValueError(f"no section {name!r}")
    return re.sub(pattern, lambda match: f"{match[1]}{content}\n{match[2]}", text, flags=re.DOTALL)


def documents() -> dict[Path, str]:
    """Every generated document and what it shall contain."""
    from ablation import table

    results = ROOT / "docs" / "results"
    readme = ROOT / "README.md"
    speed = speed_table(json.loads((results / "bench.json").read_text()))
    return {
        readme: with_section(readme.read_text(), "speed", speed),
        ROOT / "docs" / "ablation.md": table(json.loads((results / "ablation.json").read_text())),
    }


if __name__ == "__main__":
    for path, content in documents().items():
        path.write_text(content)
