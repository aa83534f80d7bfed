from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from crossward.federation.blocks import SKETCH_WIDTH, merge_blocks, smallest_block


def test_a_block_has_more_than_eight_values_for_each_number_of_its_sketch() -> None:
    assert SKETCH_WIDTH == 512
    assert smallest_block() == 4096


def test_small_blocks_are_joined_with_their_neighbours() -> None:
    blocks = {"a": ["a.w"], "b": ["b.w", "b.b"], "c": ["c.w"], "d": ["d.w"]}
    sizes = {"a.w": 10, "b.w": 4097, "b.b": 1, "c.w": 4097, "d.w": 5}
    assert merge_blocks(blocks, sizes) == {"a": ["a.w", "b.w", "b.b"], "c": ["c.w", "d.w"]}
    # 4096 are not more than 4096.
    assert merge_blocks({"a": ["x"], "b": ["y"]}, {"x": 4096, "y": 5000}) == {"a": ["x", "y"]}
    assert merge_blocks({"a": ["x"], "b": ["y"]}, {"x": 4097, "y": 4097}) == {"a": ["x"], "b": ["y"]}
    assert merge_blocks({"a": ["x"]}, {"x": 3}) == {"a": ["x"]}
    assert merge_blocks({}, {}) == {}


@given(st.lists(st.lists(st.integers(0, 9000), min_size=1, max_size=3), max_size=12))
def test_merging_keeps_every_tensor_in_order_and_leaves_no_block_too_small(counts: list[list[int]]) -> None:
    sizes = {f"{row}.{column}": size for row, own in enumerate(counts) for column, size in enumerate(own)}
    blocks = {str(row): [f"{row}.{column}" for column in range(len(own))] for row, own in enumerate(counts)}
    before = {block: list(names) for block, names in blocks.items()}
    merged = merge_blocks(blocks, sizes)
    assert blocks == before
    assert [name for names in merged.values() for name in names] == list(sizes)
    assert all(names[0] == f"{block}.0" for block, names in merged.items())
    assert len(merged) == 1 or all(sum(sizes[name] for name in names) > 4096 for names in merged.values())
    # No more is joined than must be: without its last part, a block that is not the last would be too small.
    for names in list(merged.values())[:-1]:
        last = names[-1].partition(".")[0]
        assert sum(sizes[name] for name in names if name.partition(".")[0] != last) <= 4096
    assert merge_blocks(merged, sizes) == merged
