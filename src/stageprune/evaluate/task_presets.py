"""The papers' tasks, under their names in lm-evaluation-harness; docs/eval.md says what of it is our choice."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """A task, and how to run and read it.

    Attributes:
        name: in the harness; a task or a group.
        shots: examples before each question; None for the harness's own number.
        metric: the one to show, such as `"acc"` or `"exact_match,strict-match"`; None for all.
    """

    name: str
    shots: int | None = None
    metric: str | None = None


PRESETS: dict[str, tuple[Task, ...]] = {
    # arXiv 2602.03295, Table 1: likelihood tasks 0-shot, ranked by length-normalised likelihood; greedy generation.
    "paper-prefill": (
        Task("mmlu", 0, "acc"),
        Task("hellaswag", 0, "acc_norm"),
        Task("winogrande", 0, "acc"),
        Task("piqa", 0, "acc_norm"),
        Task("gsm8k", None, "exact_match"),
        Task("humaneval", None, "pass@1"),
        Task("longbench_multifieldqa_en", None, "qa_f1_score"),
        Task("longbench_hotpotqa", None, "qa_f1_score"),
    ),
    # arXiv 2602.06822, Table 10: QA 0-shot, plain accuracy; five generation tasks.
    "paper-channels": (
        *(
            Task(name, 0, "acc")
            for name in ("boolq", "rte", "hellaswag", "winogrande", "arc_easy", "arc_challenge", "openbookqa")
        ),
        Task("coqa", None, "f1"),
        Task("mbpp", None, "pass_at_1"),
        Task("humaneval", None, "pass@1"),
        Task("nq_open", None, "exact_match"),
        Task("gsm8k", None, "exact_match"),
    ),
}


def tasks_of(names: tuple[str, ...]) -> tuple[Task, ...]:
    """The tasks of names of presets and of the harness's tasks, each once."""
    return tuple(dict.fromkeys(task for name in names for task in PRESETS.get(name, (Task(name),))))
