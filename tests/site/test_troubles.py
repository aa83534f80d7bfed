from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.site.made_up_sites import made_up_study

from crossward.site import messages
from crossward.site.declaration import Declaration
from crossward.site.troubles import SITE_CODES, Code, Refusal, figures_of, settings_of, words

# Part of the protocol: a site of an older version says these numbers, and means these things.
NUMBERS = {
    "VERSION": 10, "STUDY": 11, "NO_DATA": 12, "UNREADABLE_DATA": 13, "LABELS": 14, "TOO_FEW_IMAGES": 15,
    "POLICY": 16, "BUSY": 17, "DATA_CHANGED": 18, "DIVERGED": 20, "MEMORY": 21, "INTERNAL": 22, "BAD_TASK": 23,
    "DISK_FULL": 30, "STORAGE": 31, "OTHER_VAULT": 32, "NO_ANSWER": 40, "NOT_EXECUTED": 41, "QUORUM": 42,
    "SERVER_DISK_FULL": 43, "SERVER_STORAGE": 44, "SERVER_INTERNAL": 45, "NOT_RESUMABLE": 46, "ABORTED": 47,
    "GATE": 50, "NOT_DECLARED": 51,
}  # fmt: skip


def test_a_number_keeps_its_meaning_for_ever() -> None:
    known = {code.name: int(code) for code in Code}
    assert known.items() >= NUMBERS.items()
    assert len(set(known.values())) == len(Code.__members__)
    assert messages.OK not in known.values()


@pytest.mark.parametrize("code", list(Code))
def test_every_code_says_cause_and_remedy_with_and_without_its_numbers(code: Code) -> None:
    for numbers in (None, {}, dict.fromkeys((*settings_of(code), *figures_of(code)), 3.0), {"foreign": 9.0}):
        text = words(code, numbers)
        cause, _, remedy = text.partition(". ")
        assert len(cause) > 10
        assert len(remedy) > 10
        assert not re.search(r"[{}]|\.\.|  ", text)
        assert text == words(int(code), numbers)


def test_numbers_stand_where_a_reader_expects_them() -> None:
    assert "one of the job's classes (3 of 40 images)." in words(Code.LABELS, {"unknown": 3, "images": 40})
    assert "one of the job's classes." in words(Code.LABELS, {"unknown": 3})
    assert words(Code.QUORUM, {"reports": 1, "needed": 3}).startswith("only 1 of the 3 reports")


@given(st.integers().filter(lambda code: code not in set(Code)))
def test_an_unknown_code_says_so(code: int) -> None:
    assert f"unknown code ({code})" in words(code, {"x": 1.0})


@given(st.sampled_from(sorted(SITE_CODES)), st.data())
def test_a_refusal_makes_the_way_to_the_server_whole(code: Code, data: st.DataObject) -> None:
    values = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**53), 2**53)
    given_numbers = {name: data.draw(values, label=name) for name in settings_of(code)}
    refusal = Refusal(code, site="alder", **given_numbers, unheard=5.0)
    assert refusal.numbers == {name: float(value) for name, value in given_numbers.items()}
    arrived = DECLARATION.rebuild(messages.JOIN, messages.trouble(refusal))
    again = Refusal(Code(arrived["code"]), **arrived["numbers"])
    assert (again.code, again.numbers, str(again)) == (code, refusal.numbers, str(refusal))
    assert (refusal.site, again.site) == ("alder", None)
    assert refusal.exit_code == 3


DECLARATION = Declaration(made_up_study("local"))
