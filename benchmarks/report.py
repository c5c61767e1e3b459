"""The report of the demo model: `python benchmarks/report.py`, or `make report`.

Measures what is missing in docs/results, then writes report.html in the current folder and docs/results.md, the same
tables as Markdown. A test checks that docs/results.md is what the committed result files say.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

from stageprune.evaluate.report import html, markdown
from stageprune.evaluate.report.build import report
from stageprune.evaluate.report.document import Document
from stageprune.evaluate.report.figures import Drawing, draw_figure, no_figure
from stageprune.files import write_file

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
TITLE = "Quality and speed of the demo model"

COMMANDS = {
    "plan.json": "stageprune plan demo --max-kl 0.05 --prompts 8 --prompt-tokens 256 --answer-tokens 32 --dtype fp32 "
    "--threads 1 --output docs/results/plan.json",
    "bench.json": "stageprune bench --threads 2 --seconds 15 --json docs/results/bench.json",
    "ablation.json": "benchmarks/ablation.py",
    "channels.json": "benchmarks/channels.py",
    "channels-decode.json": "stageprune bench --what decode --channel-ratio 0.22475,0.4495 --lengths 128,1024 "
    "--threads 2 --seconds 30 --json docs/results/channels-decode.json",
    "channels-ffn.json": "stageprune bench --what ffn --channel-ratio 0.3,0.6 --threads 2 --seconds 12 --repeats 15 "
    "--json docs/results/channels-ffn.json",
    "overlap.json": "benchmarks/overlap.py",
    "fitted.json": "benchmarks/fitted.py",
    "importance.json": "stageprune analyze demo --samples 200 --batch 8 --threads 2 --output importance.json"
    " && benchmarks/importance.py importance.json",
}
"""The result files in the order of the report, and what writes each."""


def document(drawing: Drawing) -> Document:
    """The report of the committed files."""
    return report([RESULTS / name for name in COMMANDS], drawing, TITLE)


def page() -> str:
    """docs/results.md."""
    return markdown.render(document(no_figure))


def measure(name: str) -> None:
    """Run what writes a result file."""
    for command in COMMANDS[name].split(" && "):
        program, *arguments = shlex.split(command)
        module = ["-m", program] if program == "stageprune" else [program]
        print(f"{name}: {command}", file=sys.stderr)
        subprocess.run([sys.executable, *module, *arguments], check=True, cwd=ROOT)


def main() -> None:
    for name in COMMANDS:
        if not (RESULTS / name).exists():
            measure(name)
    write_file(Path("report.html"), html.render(document(draw_figure)))
    write_file(ROOT / "docs" / "results.md", page())
    print("written: report.html, docs/results.md", file=sys.stderr)


if __name__ == "__main__":
    main()
