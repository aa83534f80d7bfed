"""Which tensors are compared between sites as one: under masks, so many that their sketch does not give them away."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

SKETCH_WIDTH = 512
"""Numbers in a sketch: cosines are off by about one over the square root of it."""

_FEWEST_PER_NUMBER = 8


def smallest_block() -> int:
    """A block with fewer values than this is not sketched by itself: the sketch would nearly determine it."""
    return _FEWEST_PER_NUMBER * SKETCH_WIDTH


def merge_blocks(blocks: Mapping[str, Sequence[str]], sizes: Mapping[str, int]) -> dict[str, list[str]]:
    """Join neighbouring blocks until each has more than ``smallest_block()`` values.

    A merged block has the name of its first; what is left over joins the last one. All of it may be too small: then
    there is one block.

    Args:
        blocks: names of tensors by block, in the model's order.
        sizes: number of values of every tensor.
    """
    merged: dict[str, list[str]] = {}
    waiting: dict[str, list[str]] = {}
    for block, names in blocks.items():
        first = next(iter(waiting), block)
        waiting.setdefault(first, []).extend(names)
        if sum(sizes[name] for name in waiting[first]) > smallest_block():
            merged |= waiting
            waiting = {}
    for first, names in waiting.items():
        merged.setdefault(next(reversed(merged), first), []).extend(names)
    return merged
