"""docs/support.md says which classes each method supports, and that is so."""

from __future__ import annotations

import transformers

import support


def test_the_page_is_what_is_recorded() -> None:
    assert support.DOCUMENT.read_text() == support.document(support.recorded()), "run: python tests/support.py"


def test_what_is_recorded_is_what_is_found() -> None:
    """For a version of transformers that nobody recorded: nothing is lost against the newest recorded one."""
    results, found = support.recorded(), support.found()
    if transformers.__version__ in results:
        assert found == results[transformers.__version__], "run: python tests/support.py"
        return
    newest = next(iter(results.values()))
    lost = {
        (name, method): row[method]
        for name, row in found.items()
        for method in support.METHODS
        if row[method] != support.YES and newest.get(name, {}).get(method) == support.YES
    }
    assert not lost


def test_every_group_is_there_and_only_refused_classes_are_refused() -> None:
    found = support.found()
    assert {row["group"] for row in found.values()} == set(support.GROUPS)
    for name, row in found.items():
        if row["group"] in ("text", "mixture of experts", "vision-language"):
            assert row["prefill"] == row["channels"] == support.YES, name
        elif row["group"] == "image encoder":
            assert row["channels"] == support.YES, name
            assert "image encoder" in row["prefill"]
        else:
            assert row["prefill"] != support.YES, name
