"""Taking from several groups in turn, so that a long one does not crowd out the others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def in_turn(groups: Iterable[Sequence[Item]]) -> list[Item]:
    """The first of every group, then the second of every group, and so on; a group that is used up is passed over."""
    queues = list(groups)
    longest = max(map(len, queues), default=0)
    return [queue[turn] for turn in range(longest) for queue in queues if turn < len(queue)]
