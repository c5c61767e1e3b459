"""`stageprune report` on the command line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import report_files as results


def damaged(folder: Path, name: str) -> Path:
    path = results.bench(folder, f"{name}.json")
    data = json.loads(path.read_text())
    match name:
        case "cut":
            path.write_text(path.read_text()[:-20])
        case "list":
            path.write_text("[1]")
        case "other":
            path.write_text('{"a": 1}')
        case "missing-field":
            del data["cells"][0]["prefill"]["speedup"]
            results.write(path, data)
        case "no-number":
            data["cells"][1]["prefill"]["speedup"]["median"] = "fast"
            results.write(path, data)
        case "infinite":
            data["cells"][1]["prefill"]["speedup"]["median"] = float("nan")
            results.write(path, data)
        case "cells":
            results.write(path, {**data, "cells": 3})
        case "binary":
            path.write_bytes(b"\x00\xff\xfe")
        case "checksum":
            path = results.plan(folder)
            path.write_text(path.read_text().replace("0.05", "0.04"))
        case "importance":
            path = results.importance(folder)
            path.write_text(path.read_text().replace("3.0", "3.5", 1))
        case "absent":
            path.unlink()
    return path


DAMAGES = (
    "cut",
    "list",
    "other",
    "missing-field",
    "no-number",
    "infinite",
    "cells",
    "binary",
    "checksum",
    "importance",
    "absent",
)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_wrong_file_is_named_and_nothing_is_written(command, tmp_path: Path, damage: str) -> None:
    wrong, output = damaged(tmp_path, damage), tmp_path / "out.html"
    output.write_text("before")
    result = command("report", results.channels(tmp_path), wrong, "-o", output)
    assert result.code == 1
    assert str(wrong) in result.err
    assert len(result.err.splitlines()) == 1
    assert output.read_text() == "before"
    assert not result.out


def test_the_command_writes_either_format(command, tmp_path: Path) -> None:
    path = results.bench(tmp_path)
    for name, options, begin in (
        ("a.html", (), "<!doctype html>"),
        ("a.md", (), "# stageprune"),
        ("a.txt", ("--format", "md"), "# stageprune"),
        ("b.md", ("--format", "html", "--title", "Mine"), "<!doctype html>"),
    ):
        result = command("report", path, "-o", tmp_path / name, *options)
        assert result.code == 0, result.err
        assert (tmp_path / name).read_text().startswith(begin)
        assert "written" in result.err
    assert "<title>Mine</title>" in (tmp_path / "b.md").read_text()
    for arguments, part in (
        (("-o", tmp_path / "a.txt"), "--format"),
        (("-o", path, "--format", "md"), "overwrite"),
        ((path, "-o", tmp_path / "a.md"), "twice"),
    ):
        result = command("report", path, *arguments)
        assert result.code == 2
        assert part in result.err
    assert command("report").code == 2


def test_without_matplotlib(command, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    path = results.plan(tmp_path)
    result = command("report", path, "-o", tmp_path / "a.html")
    assert result.code == 1
    assert "stageprune[plots]" in result.err
    assert command("report", path, "-o", tmp_path / "a.md").code == 0, "Markdown has no figures"
