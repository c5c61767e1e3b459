"""How generated tokens' channels relate to the prompt's ranking, on the demo model: `python benchmarks/overlap.py`.

Runs `stageprune compare` with channels and keeps of its result what `stageprune report` shows, in
docs/results/overlap.json; then `python benchmarks/report.py` puts the table into docs/results.md. Half a minute.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from stageprune.files import write_file

ROOT = Path(__file__).resolve().parent.parent
COMMAND = (
    *("compare", "--channel-ratio", "0.22475", "--length", "256", "--max-new-tokens", "32"),
    *("--repeats", "1", "--threads", "2", "--json"),
)


def summary(data: dict[str, Any]) -> dict[str, Any]:
    """Without the heat maps, the answers and the times of this one prompt."""
    kept = ("kind", "command", "model", "dtype", "device", "system", "prompt_tokens", "teacher_forced_agreement")
    channels = []
    for row in data["report"]["channels"]:
        seen = row["observed"]
        watched = ("tokens", "turnover", "overlap", "rank_difference")
        channels.append({"layer": row["layer"], "observed": seen and {name: _rounded(seen[name]) for name in watched}})
    return {**{name: data[name] for name in kept}, "prefill": None, "report": {"channels": channels}}


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [round(number, 5) for number in value]
    return round(value, 5) if isinstance(value, float) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "overlap.json")
    options = parser.parse_args()
    done = subprocess.run([sys.executable, "-m", "stageprune", *COMMAND], check=True, stdout=subprocess.PIPE)
    write_file(options.out, json.dumps(summary(json.loads(done.stdout))) + "\n")


if __name__ == "__main__":
    main()
