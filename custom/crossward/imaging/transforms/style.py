"""Scanner-style augmentation: training pictures as the same domain's scanners might have taken them on another day.

How far each change goes is not a constant but what the domain's own training pictures differ by, from the 5th to the
95th of a hundred (``domain_statistics``, of finished pictures):

- noise: what must be added to the quietest to get the noisiest, sqrt(noise_95² - noise_5²); independent variances add.
- blur: the Gaussian that makes the sharpest as soft as the softest, sqrt(1 / sharpness_5² - 1 / sharpness_95²); with a
  Gaussian autocorrelation of length L, sharpness is sqrt(2) / L, and blurring by s makes L² into L² + 2 s².
- gamma: the exponents that take the middle picture's mean to the 5th's and the 95th's.
- bias_field: what must be added to the shading of the evenest to get the most uneven, as for noise.

Anatomy differs from picture to picture too, and is counted in: these are upper ends, of which every picture gets a
random part. ``MOST`` bounds them.

MONAI's RandGaussianNoise, RandGaussianSmooth, RandAdjustContrast and RandBiasField do such things picture by picture
and with NumPy's generators; here a whole batch is done at once on its device, and a torch generator decides everything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from crossward.federation.errors import BadInput
from crossward.imaging.rules.site import Step
from crossward.imaging.transforms.options import hint, number, settled
from crossward.imaging.transforms.statistics import DomainStatistics

if TYPE_CHECKING:
    from torch import Generator, Tensor

LOW, HIGH = 0.05, 0.95
# No statistic, of however odd a domain, takes a change further than this.
MOST = {"noise": 0.2, "blur": 1.0, "gamma": math.log(2.0), "bias_field": 0.5}
_OPTIONS = {
    "strength": number(1.0, 0, 10),
    "probability": number(0.5, 0, 1),
    "most": number(None, 0, 2),
}
Change = Callable[["Tensor", "Tensor", "Generator"], "Tensor"]


def _from_spread(statistics: DomainStatistics, figure: str, *, inverse: bool = False) -> float:
    low, high = (statistics.figures[figure].quantile(part) for part in (LOW, HIGH))
    if low is None or high is None or low >= high or (inverse and low <= 0):
        return 0.0
    return math.sqrt(1 / low**2 - 1 / high**2) if inverse else math.sqrt(high**2 - low**2)


def _gammas(statistics: DomainStatistics) -> float:
    """The larger of the two logarithms of an exponent; brighter and darker are as likely."""
    low, middle, high = (statistics.figures["mean"].quantile(part) for part in (LOW, 0.5, HIGH))
    if low is None or middle is None or high is None or not 0 < low <= middle <= high < 1:
        return 0.0
    return max(abs(math.log(math.log(end) / math.log(middle))) for end in (low, high))


def _noise(images: Tensor, amount: Tensor, generator: Generator) -> Tensor:
    """The same grain in all colours, so that grey stays grey."""
    return images + amount * _normal((len(images), 1, *images.shape[2:]), images, generator)


def _blur(images: Tensor, amount: Tensor, generator: Generator) -> Tensor:
    import torch
    from torch.nn import functional

    del generator
    count, channels, height, width = images.shape
    radius = min(math.ceil(3 * MOST["blur"]), height - 1, width - 1)
    offsets = torch.arange(-radius, radius + 1, device=images.device, dtype=images.dtype)
    # A picture that is not to be blurred has a kernel of one pixel.
    kernels = torch.exp(-0.5 * (offsets / amount.view(count, 1).clamp_min(1e-3)) ** 2)
    kernels = (kernels / kernels.sum(1, keepdim=True)).repeat_interleave(channels, 0)
    flat = functional.pad(images.reshape(1, count * channels, height, width), (radius,) * 4, mode="reflect")
    flat = functional.conv2d(flat, kernels.view(-1, 1, 1, 2 * radius + 1), groups=count * channels)
    flat = functional.conv2d(flat, kernels.view(-1, 1, 2 * radius + 1, 1), groups=count * channels)
    return flat.reshape(images.shape)


def _gamma(images: Tensor, amount: Tensor, generator: Generator) -> Tensor:
    """Bend the greys by exp of up to the amount, either way."""
    return images.clamp(0, 1) ** (amount * _even((len(images), 1, 1, 1), images, generator)).exp()


def _bias_field(images: Tensor, amount: Tensor, generator: Generator) -> Tensor:
    """Multiply by the exp of a random plane and bowl, whose standard deviation over the picture is the amount."""
    import torch

    height, width = images.shape[2:]
    down = torch.linspace(-1, 1, height, device=images.device, dtype=images.dtype)[:, None].expand(height, width)
    across = torch.linspace(-1, 1, width, device=images.device, dtype=images.dtype).expand(height, width)
    terms = torch.stack([down, across, down * across, down**2 - down.pow(2).mean(), across**2 - across.pow(2).mean()])
    weights = _normal((len(images), len(terms)), images, generator)
    field = (weights @ terms.flatten(1)).view(-1, 1, height, width)
    return images * (amount * field / field.std((2, 3), keepdim=True).clamp_min(1e-6)).exp()


@dataclass(frozen=True)
class _Kind:
    apply: Change
    most: Callable[[DomainStatistics], float]


STYLES: dict[str, _Kind] = {
    "blur": _Kind(_blur, lambda statistics: _from_spread(statistics, "sharpness", inverse=True)),
    "bias_field": _Kind(_bias_field, lambda statistics: _from_spread(statistics, "shading")),
    "gamma": _Kind(_gamma, _gammas),
    "noise": _Kind(_noise, lambda statistics: _from_spread(statistics, "noise")),
}


def check_style(step: Step) -> None:
    """Check the name and the options of one step of augmentation.

    Raises:
        BadInput: what is wrong and what would do, without the line.
    """
    _settled(step)


def learning(steps: Sequence[Step]) -> tuple[str, ...]:
    """The steps whose range comes from a domain's training pictures, and not from ``most``."""
    return tuple(step.name for step in steps if _settled(step)["most"] is None)


def ranges(statistics: DomainStatistics, steps: Sequence[Step]) -> dict[str, float]:
    """How far each step goes for a domain: a standard deviation (of noise, blur in pixels, field), or log of gamma."""
    return {name: most for name, most, _ in _plan(statistics, steps)}


def style(statistics: DomainStatistics, steps: Sequence[Step]) -> Callable[[Tensor, Generator], Tensor]:
    """Augmentation in the style of a domain.

    Args:
        statistics: of the domain's finished training pictures (``domain_statistics.measure_picture``).
        steps: blur, bias_field, gamma, noise, in the order in which they are to be done; options ``strength``
            (multiplies the domain's own range), ``most`` (a range in its place) and ``probability`` (of a picture being
            changed).

    Returns:
        A function of images [b,c,h,w] in [0, 1] and a generator, giving new images in [0, 1]. Every picture is changed
        by its own random amount; what is exactly dark (margins, padding) stays so.
    """
    plan = _plan(statistics, steps)

    def styled(images: Tensor, generator: Generator) -> Tensor:
        if not len(images):
            return images
        lit = images.amax(1, keepdim=True) > 0
        changed = images
        for name, most, probability in plan:
            draws = _uniform((2, len(images), 1, 1, 1), images, generator)
            amount = most * draws[0] * (draws[1] < probability)
            changed = STYLES[name].apply(changed, amount, generator).clamp(0, 1)
        return changed * lit

    return styled


def _settled(step: Step) -> dict[str, Any]:
    if step.name not in STYLES:
        raise BadInput(f"there is no augmentation {step.name}{hint(step.name, STYLES)}")
    return settled(step, _OPTIONS)


def _plan(statistics: DomainStatistics, steps: Sequence[Step]) -> list[tuple[str, float, float]]:
    return [_planned(statistics, step.name, _settled(step)) for step in steps]


def _planned(statistics: DomainStatistics, name: str, options: Mapping[str, Any]) -> tuple[str, float, float]:
    own = STYLES[name].most(statistics) if options["most"] is None else options["most"]
    return name, min(own * options["strength"], MOST[name]), options["probability"]


def _uniform(shape: tuple[int, ...], like: Tensor, generator: Generator) -> Tensor:
    import torch

    return torch.rand(shape, generator=generator, device=generator.device).to(like)


def _even(shape: tuple[int, ...], like: Tensor, generator: Generator) -> Tensor:
    return 2 * _uniform(shape, like, generator) - 1


def _normal(shape: tuple[int, ...], like: Tensor, generator: Generator) -> Tensor:
    import torch

    return torch.randn(shape, generator=generator, device=generator.device).to(like)
