"""What an evaluation found: for each setting and bucket of prompt lengths, metrics with confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from stageprune.errors import ResultFileError
from stageprune.evaluate.bootstrap import Bootstrap, Estimate, ratio
from stageprune.evaluate.score import Score
from stageprune.records import read_record, write_record

KIND, VERSION = "stageprune-eval", 1

KINDS = ("answers", "references")
"""Of what is predicted: the dense model's own greedy answers, and given ones."""


@dataclass(frozen=True)
class Scores:
    """Of one example.

    Attributes:
        answers: on the dense model's answer.
        references: on the given answer; None if there is none.
    """

    answers: Score
    references: Score | None

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready data."""
        return {"answers": self.answers.to_dict(), "references": self.references and self.references.to_dict()}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """The inverse of `to_dict`.

        Raises:
            KeyError, TypeError, ValueError: if something is missing or wrong.
        """
        references = data["references"]
        return cls(Score.from_dict(data["answers"]), None if references is None else Score.from_dict(references))


@dataclass(frozen=True)
class Ideal:
    """Speed-ups by counting, for the mean prompt length of a bucket.

    Attributes:
        prompt_tokens: that they are for.
        prefill: of the time to the first token, in floating-point operations.
        decode: of generation, in weights and cached values read.
    """

    prompt_tokens: int
    prefill: float
    decode: float


@dataclass(frozen=True)
class Row:
    """One setting, measured.

    Attributes:
        setting: name and methods, as `Setting.to_dict` gives them.
        scores: of each example.
        ideal: of each bucket.
    """

    setting: dict[str, Any]
    scores: tuple[Scores, ...]
    ideal: dict[int, Ideal]

    @property
    def name(self) -> str:
        """Of the setting."""
        return str(self.setting["name"])


@dataclass(frozen=True)
class Evaluation:
    """The whole result.

    Attributes:
        model: name, architecture, number of layers and checksum of the weights.
        settings: of the measurement.
        bootstrap: how intervals are computed.
        buckets: of each example, the longest prompt of its bucket.
        rows: the settings; the dense model is the first.
    """

    model: dict[str, Any]
    settings: dict[str, Any]
    bootstrap: Bootstrap
    buckets: tuple[int, ...]
    rows: tuple[Row, ...]

    def metrics(self, row: Row, kind: str, bucket: int | None = None) -> dict[str, Estimate]:
        """By name: `kl` (nats per token), `agreement` (share of tokens), `perplexity`, `dense_perplexity`, and of the
        dense model's answers `matched` (tokens) and `matched_share` of them.

        Means are over all tokens of all answers, `matched` over answers.

        Args:
            row: of this evaluation.
            kind: one of `KINDS`.
            bucket: of prompts; None for all.

        Returns:
            Nothing if no such example has an answer of this kind.
        """
        wanted = [scores for scores, other in zip(row.scores, self.buckets, strict=True) if bucket in (None, other)]
        found: list[Score] = [score for scores in wanted if (score := getattr(scores, kind)) is not None]
        if not found:
            return {}
        tokens = [score.tokens for score in found]

        def mean(name: str, counts: Sequence[float] = tokens) -> Estimate:
            return ratio([getattr(score, name) for score in found], counts, self.bootstrap)

        metrics = {
            "kl": mean("kl"),
            "agreement": mean("agreed"),
            "perplexity": mean("nll").map(_exp),
            "dense_perplexity": mean("dense_nll").map(_exp),
        }
        if all(score.matched is not None for score in found):
            metrics["matched"] = mean("matched", [1] * len(found))
            metrics["matched_share"] = mean("matched")
        return metrics

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready data: what was measured, and the metrics that follow from it."""
        return {
            "model": self.model,
            "settings": self.settings,
            "bootstrap": vars(self.bootstrap),
            "buckets": list(self.buckets),
            "rows": [self._row(row) for row in self.rows],
        }

    def _row(self, row: Row) -> dict[str, Any]:
        summary = {
            "all" if bucket is None else str(bucket): {
                kind: {name: estimate.to_dict() for name, estimate in self.metrics(row, kind, bucket).items()}
                for kind in KINDS
            }
            for bucket in (None, *row.ideal)
        }
        return {
            "setting": row.setting,
            "ideal": {str(bucket): vars(ideal) for bucket, ideal in row.ideal.items()},
            "summary": summary,
            "scores": [scores.to_dict() for scores in row.scores],
        }

    def save(self, path: str | Path) -> None:
        """Write a JSON file, whole or not at all.

        Raises:
            OutputFileError: if that fails.
        """
        write_record(Path(path), KIND, VERSION, self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what `save` wrote.

        Raises:
            ResultFileError: if the file is missing, damaged or truncated, or of another kind or version.
        """
        data = read_record(Path(path), KIND, VERSION)
        try:
            rows = tuple(
                Row(
                    dict(row["setting"]),
                    tuple(map(Scores.from_dict, row["scores"])),
                    {int(bucket): Ideal(**ideal) for bucket, ideal in row["ideal"].items()},
                )
                for row in data["rows"]
            )
            return cls(
                dict(data["model"]),
                dict(data["settings"]),
                Bootstrap(**data["bootstrap"]),
                tuple(map(int, data["buckets"])),
                rows,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ResultFileError(f"{str(path)!r} is no complete {KIND} file: {error}") from error


def _exp(value: float) -> float:
    """Of a mean negative log-likelihood; JSON has no infinity, so a perplexity beyond all numbers is the largest."""
    return math.exp(min(value, 700))
