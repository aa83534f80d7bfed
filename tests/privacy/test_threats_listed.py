"""No row of the threat table is without its test."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.privacy.threats import NOT_STOPPED, THREATS

TESTS = Path(__file__).resolve().parents[1]
NAMES = [
    name
    for path in sorted(TESTS.rglob("test_*.py"))
    for name in re.findall(r"^def (test_\w+)\(", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
]


def named_after(row: str) -> list[str]:
    return [name for name in NAMES if re.match(rf"test_{row.replace(' ', '_')}(_|$)", name)]


@pytest.mark.parametrize("row", THREATS)
def test_every_row_of_the_threat_table_has_a_test_named_after_it(row: str) -> None:
    assert named_after(row)


def test_what_nothing_stops_is_in_the_documents() -> None:
    document = (TESTS.parent / "docs" / "secure-aggregation.md").read_text(encoding="utf-8")
    (limits,) = re.findall(r"\*\*What it does not protect against\.\*\*(.*?)\n## ", document, flags=re.DOTALL)
    assert all(threat in limits for threat in NOT_STOPPED)


def test_a_row_without_a_test_is_seen() -> None:
    assert not named_after("a threat that nobody thought of")
    assert not named_after("poison")
