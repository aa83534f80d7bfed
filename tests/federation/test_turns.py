from __future__ import annotations

import pytest

from crossward.federation.turns import in_turn


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        (["abc", "d", "", "ef"], "adebfc"),
        (["", ""], ""),
        ([], ""),
        (["abc"], "abc"),
    ],
)
def test_groups_take_turns_and_those_used_up_are_passed_over(groups: list[str], expected: str) -> None:
    assert "".join(in_turn(groups)) == expected
    assert in_turn(group for group in groups) == list(expected)


def test_what_is_nothing_in_itself_is_kept() -> None:
    assert in_turn([[None, 0], [False]]) == [None, False, 0]
