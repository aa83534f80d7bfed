from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from crossward.federation.errors import BadInput
from crossward.site.augment import SHIFT, Augmentation, augmented
from crossward.site.trainer import Training


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def moved(image: Tensor, down: int, right: int, *, mirrored: bool) -> Tensor:
    """One image moved pixel by pixel; what comes in from outside repeats the edge."""
    height, width = image.shape[1:]
    out = torch.empty_like(image)
    for row in range(height):
        for column in range(width):
            from_row = min(max(row + down, 0), height - 1)
            from_column = min(max((width - 1 - column if mirrored else column) + right, 0), width - 1)
            out[:, row, column] = image[:, from_row, from_column]
    return out


@settings(max_examples=15, deadline=None)
@given(
    kind=st.sampled_from(["shift", "shift-flip"]),
    count=st.integers(1, 5),
    channels=st.sampled_from([1, 3]),
    size=st.sampled_from([8, 16]),
    seed=st.integers(0, 99),
)
def test_every_image_is_moved_and_perhaps_mirrored_and_nothing_else(
    kind: Augmentation, count: int, channels: int, size: int, seed: int
) -> None:
    images = torch.randn(count, channels, size, size, generator=seeded(1))
    out = augmented(images, kind, seeded(seed))
    most = size // SHIFT
    turns = (False, True) if kind == "shift-flip" else (False,)
    for image, after in zip(images, out, strict=True):
        assert any(
            torch.equal(after, moved(image, down, right, mirrored=mirrored))
            for down in range(-most, most + 1)
            for right in range(-most, most + 1)
            for mirrored in turns
        )


def test_images_move_by_amounts_of_their_own_and_half_are_mirrored() -> None:
    image = torch.arange(64.0).reshape(1, 1, 8, 8)
    out = augmented(image.expand(400, -1, -1, -1), "shift-flip", seeded())
    falling = out[:, 0, 4, 3] > out[:, 0, 4, 4]
    assert 150 < falling.sum() < 250
    assert len({tuple(each.flatten().tolist()) for each in out}) == 3 * 3 * 2


def test_the_generator_decides_and_the_given_images_stay() -> None:
    images = torch.randn(6, 3, 16, 16, generator=seeded(1))
    before = images.clone()
    one, same, other = (augmented(images, "shift-flip", seeded(seed)) for seed in (3, 3, 4))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert torch.equal(images, before)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_memory_layout_is_kept(layout: torch.memory_format) -> None:
    images = torch.randn(4, 3, 16, 16, generator=seeded(1)).to(memory_format=layout)
    assert augmented(images, "shift", seeded()).is_contiguous(memory_format=layout)


def test_without_augmentation_or_images_nothing_is_drawn() -> None:
    generator = seeded()
    state = generator.get_state()
    images = torch.randn(4, 1, 8, 8)
    assert augmented(images, "none", generator) is images
    assert augmented(images[:0], "shift-flip", generator).shape == (0, 1, 8, 8)
    assert torch.equal(generator.get_state(), state)


def test_an_unknown_augmentation_is_refused() -> None:
    with pytest.raises(BadInput, match="augment 'rotate' is not there; there is: none, shift, shift-flip"):
        Training(augment="rotate")  # type: ignore[arg-type]
