"""Tables in docs/ that say what the code does are what the code says."""

from __future__ import annotations

import re

import pytest

from crossward.federation.contract import VALIDATION
from crossward.methods.registry import available
from crossward.site.messages import SCORES
from crossward.site.troubles import Code, settings_of
from tests.made_tables import ARISES, DOCS, MARKED, MEANING, REWRITE, SAMPLE_NUMBERS, TABLES, rewritten

PLACES = [
    (path.name, found[1], found[2])
    for path in sorted(DOCS.glob("*.md"))
    for found in MARKED.finditer(path.read_text(encoding="utf-8"))
]


@pytest.mark.parametrize(("document", "name", "written"), PLACES, ids=[f"{place[0]}:{place[1]}" for place in PLACES])
def test_a_table_is_what_the_code_gives(document: str, name: str, written: str) -> None:
    assert written == TABLES[name](), f"docs/{document} is out of date; write its tables anew with: {REWRITE}"


def test_every_table_stands_in_one_document() -> None:
    assert sorted(name for _, name, _ in PLACES) == sorted(TABLES)


def test_every_mark_has_its_end() -> None:
    for path in DOCS.glob("*.md"):
        text = path.read_text(encoding="utf-8")
        begun, ended = len(re.findall("<!-- made:", text)), len(re.findall("<!-- end -->", text))
        assert begun == ended == len(MARKED.findall(text)), path.name


def test_every_code_and_every_number_is_explained() -> None:
    assert set(ARISES) == set(Code), "ARISES in tests/made_tables.py says where every code comes from"
    assert set(SAMPLE_NUMBERS) == {name for code in Code for name in settings_of(code)}
    assert set(MEANING) >= {*SCORES, *VALIDATION}


def test_no_code_is_shown_with_a_number_missing() -> None:
    assert "nan" not in TABLES["failures"]()


def test_a_local_tensor_is_never_in_what_a_method_sends() -> None:
    header, _, *rows = TABLES["tensors"]().splitlines()
    methods = [cell.strip() for cell in header.strip("|").split("|")][2:]
    assert methods == list(available())
    cells = [[cell.strip(" `") for cell in row.strip("|").split("|")] for row in rows]
    scopes = {name: dict(zip(methods, own, strict=True)) for name, _, *own in cells}
    # A dash stands for a tensor that the method does not have.
    assert {scope["local"] for scope in scopes.values()} == {"local", "-"}
    assert {scope["fedbn"] for scope in scopes.values()} == {"shared", "local", "-"}
    for method, part in (("f2dc", "block."), ("rfeddis", "head.local.")):
        kept = {scope[method] for name, scope in scopes.items() if name.startswith(part)}
        assert kept == {"local"}, method


def test_a_changed_table_is_found_and_written_anew() -> None:
    stale = "before\n<!-- made: scores -->\n| nothing |\n<!-- end -->\nafter\n"
    fresh = rewritten(stale)
    assert fresh == f"before\n<!-- made: scores -->\n{TABLES['scores']()}<!-- end -->\nafter\n"
    assert rewritten(fresh) == fresh
