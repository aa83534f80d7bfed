from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.ndimage import gaussian_filter

from crossward.federation.errors import BadInput
from crossward.imaging.rules.site import Step
from crossward.imaging.transforms.statistics import DomainStatistics
from crossward.imaging.transforms.style import MOST, STYLES, check_style, ranges, style

ALL = [Step(name=name) for name in STYLES]


def step(name: str, **options: Any) -> Step:
    return Step(name=name, options=options)


def statistics(**figures: tuple[float, ...]) -> DomainStatistics:
    """A domain whose pictures have these figures."""
    made = DomainStatistics()
    for name, numbers in figures.items():
        made.figures[name].add(np.array(numbers))
    return made


def always(name: str, amount: float) -> Any:
    return style(statistics(), [step(name, most=amount, probability=1)])


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_ranges_by_hand() -> None:
    domain = statistics(
        noise=(0.03, *[0.04] * 17, 0.05, 0.05),
        sharpness=(0.6, *[0.7] * 17, 0.75, 0.75),
        mean=(0.25, *[0.5] * 17, 0.5, 0.5),
        shading=(0.05, *[0.1] * 17, 0.13, 0.13),
    )
    found = ranges(domain, ALL)
    # 3, 4, 5; and 5, 12, 13.
    assert found["noise"] == pytest.approx(0.04, rel=0.03)
    assert found["bias_field"] == pytest.approx(0.12, rel=0.03)
    # 1/0.6² - 1/0.75² is 1, so blur of 1 pixel takes a sharpness of 0.75 to 0.6.
    assert found["blur"] == pytest.approx(1, rel=0.05)
    # 0.5 to the power of 2 is 0.25.
    assert found["gamma"] == pytest.approx(math.log(2), rel=0.02)


def test_options_change_the_range_and_bounds_hold() -> None:
    domain = statistics(noise=(0.03, *[0.04] * 17, 0.05, 0.05))
    assert ranges(domain, [step("noise", strength=0.5)])["noise"] == pytest.approx(0.02, rel=0.03)
    assert ranges(domain, [step("noise", most=0.1)])["noise"] == 0.1
    assert ranges(domain, [step("noise", most=1.9)])["noise"] == MOST["noise"]
    assert ranges(domain, [step("noise", strength=10)])["noise"] == MOST["noise"]


@pytest.mark.parametrize("domain", [statistics(), statistics(noise=(0.1,), sharpness=(0.1,), mean=(0.1,))])
def test_a_domain_without_spread_is_left_as_it_is(domain: DomainStatistics) -> None:
    assert set(ranges(domain, ALL).values()) == {0.0}
    images = torch.rand(4, 1, 16, 16, generator=seeded())
    np.testing.assert_allclose(style(domain, ALL)(images, seeded(1)), images, atol=1e-6)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (step("blurr"), "there is no augmentation blurr; did you mean blur?"),
        (step("noise", sigma=1), "noise has no option sigma"),
        (step("noise", probability=2), "probability must be a number from 0 to 1"),
    ],
)
def test_a_wrong_step_is_named(wrong: Step, says: str) -> None:
    with pytest.raises(BadInput) as error:
        check_style(wrong)
    assert says in str(error.value)


def test_noise_has_the_spread_that_was_drawn() -> None:
    flat = torch.full((400, 1, 16, 16), 0.5)
    spread = always("noise", 0.1)(flat, seeded()).std((1, 2, 3))
    # Even from 0 to 0.1: a mean of 0.05 and a standard deviation of 0.1 / sqrt(12).
    assert spread.mean().item() == pytest.approx(0.05, rel=0.1)
    assert spread.std().item() == pytest.approx(0.1 / math.sqrt(12), rel=0.15)
    assert spread.max() < 0.11


def test_every_picture_has_its_own_blur_and_keeps_its_mean() -> None:
    dots = torch.full((6, 1, 33, 33), 0.1)
    dots[:, :, 16, 16] = 0.9
    blurred = always("blur", 1.0)(dots, seeded(3))
    np.testing.assert_allclose(blurred.mean((1, 2, 3)), dots.mean((1, 2, 3)), rtol=1e-5)
    assert blurred[:, 0, 16, 16].max() - blurred[:, 0, 16, 16].min() > 0.2
    amounts = torch.rand((2, 6, 1, 1, 1), generator=seeded(3))[0].flatten()
    for picture, amount in zip(blurred[:, 0].numpy(), amounts.tolist(), strict=True):
        wanted = gaussian_filter(dots[0, 0].numpy(), amount, truncate=3 / amount, mode="mirror")
        np.testing.assert_allclose(picture, wanted, atol=2e-3)


def test_gamma_bends_both_ways_and_keeps_black_and_white() -> None:
    images = torch.tensor([0.0, 0.5, 1.0]).repeat(200, 1, 3, 1)
    bent = always("gamma", math.log(2))(images, seeded())
    assert (bent[..., 0] == 0).all()
    assert (bent[..., 2] == 1).all()
    middle = bent[:, 0, 0, 1]
    # 0.5 to the power of 2 and of 1/2.
    assert 0.25 <= middle.min() < 0.3
    assert 0.65 < middle.max() <= 0.7072


def test_a_bias_field_is_smooth_and_as_strong_as_was_drawn() -> None:
    flat = torch.full((100, 1, 24, 24), 0.3)
    logs = always("bias_field", 0.2)(flat, seeded()).div(0.3).log()
    assert logs.std((1, 2, 3)).max() <= 0.2 + 1e-3
    assert logs.std((1, 2, 3)).mean().item() == pytest.approx(0.1, rel=0.15)
    # A parabola's second differences are all the same; noise would not be.
    second = logs.diff(n=2, dim=3)
    assert (second.amax((2, 3)) - second.amin((2, 3))).max() < 1e-4


def test_a_probability_of_a_half_leaves_half_of_the_pictures() -> None:
    flat = torch.full((1000, 1, 8, 8), 0.5)
    changed = style(statistics(), [step("noise", most=0.1)])(flat, seeded())
    same = (changed == flat).flatten(1).all(1).float().mean().item()
    assert same == pytest.approx(0.5, abs=0.06)
    assert (style(statistics(), [step("noise", most=0.1, probability=0)])(flat, seeded()) == flat).all()


def test_only_the_generator_decides() -> None:
    images = torch.rand(5, 1, 16, 16, generator=seeded())
    change = style(statistics(), [step(name, most=0.2, probability=1) for name in STYLES])
    torch.manual_seed(1)
    first = change(images, seeded(7))
    state = torch.get_rng_state()
    second = change(images, seeded(7))
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(first, change(images, seeded(8)))


@settings(max_examples=30)
@given(
    st.integers(0, 5),
    st.sampled_from([1, 3]),
    st.integers(2, 20),
    st.integers(2, 20),
    st.permutations(list(STYLES)),
    st.integers(0, 2**31),
)
def test_pictures_stay_pictures(
    count: int, channels: int, height: int, width: int, order: list[str], seed: int
) -> None:
    images = torch.rand(count, 1, height, width, generator=seeded(seed))
    images[:, :, 0] = 0
    images = images.expand(-1, channels, -1, -1)
    given_images = images.clone()
    changed = style(statistics(), [step(name, most=2, probability=1) for name in order])(images, seeded(seed))
    assert torch.equal(images, given_images)
    assert changed.shape == images.shape
    assert changed.dtype == torch.float32
    assert torch.isfinite(changed).all()
    assert ((changed >= 0) & (changed <= 1)).all()
    assert not changed[:, :, 0].any()
    # Grey stays grey, but for how a convolution rounds.
    np.testing.assert_allclose(changed, changed[:, :1].expand_as(changed), atol=1e-5)
