"""What is said about personal tensors at the end of a run."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from crossward.cli.show import show_personal


def shown(sent: dict[str, str], received: dict[str, str | None]) -> str:
    console = Console(file=io.StringIO(), width=100, record=True)
    result: dict[str, Any] = {"personal": sent, "sites": {name: {"personal": got} for name, got in received.items()}}
    show_personal(console, result)
    return console.export_text()


def test_every_hospital_is_shown_with_what_it_was_sent_and_whether_it_got_it() -> None:
    one, two = "1" * 64, "2" * 64
    text = shown({"a": one, "b": two, "c": two}, {"a": one, "b": one, "c": None, "d": two})
    rows = {line.split()[0]: line for line in text.splitlines() if line.strip()[:2] in ("a ", "b ", "c ", "d ")}
    assert one[:16] in rows["a"]
    assert "the same" in rows["a"]
    assert f"other: {one[:16]}" in rows["b"]
    assert "not told" in rows["c"]
    # Never invited so far, it still has what everybody began with.
    assert "the common start" in rows["d"]
    assert "the same" in rows["d"]


def test_a_method_without_personal_tensors_says_nothing() -> None:
    assert shown({}, {"a": None}) == ""
