"""Checks of what protects: statistics on what sampler, clipping and noise really give out, and a look at the ledger.

An attack shows a loss that is large. These find a part that is broken although no attack of seconds would notice: noise
that repeats, batches that are shuffled where accounting reckons with Poisson sampling, a round that nobody paid for.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn

from crossward.federation.contract import Vector
from crossward.privacy.audit.findings import Finding, Setting
from crossward.privacy.dp.accounting import Spending
from crossward.privacy.dp.clipping import clipper_for
from crossward.privacy.dp.lines import Entry, Shared
from crossward.privacy.dp.noise import NoiseSource
from crossward.privacy.dp.sampling import PatientSampler

BY_CHANCE = 1e-6
"""What is as it should be fails a check with this chance at most."""

_VALUES = 20_000
_ROUNDING = 1e-4


@dataclass(frozen=True)
class Check:
    """What was looked at.

    Attributes:
        name: of the part.
        passed: whether it is as the guarantee takes it to be.
        words: what was found, for a reader.
    """

    name: str
    passed: bool
    words: str


def check_row(subject: str, look: Callable[[], Check]) -> Finding:
    """Look, and give what was seen as a row of the report."""
    began = time.perf_counter()
    check = look()
    return Finding(
        subject=subject,
        attack=f"check: {check.name}",
        setting=Setting.DP,
        figure=None,
        unit="",
        rule="holds",
        passed=check.passed,
        words=check.words,
        seconds=time.perf_counter() - began,
    )


def check_noise(make: Callable[[], NoiseSource] = NoiseSource) -> Check:
    """Noise is Gaussian, of the scale that was asked for, and never the same twice: not in one source, nor in two."""
    first, second = make(), make()
    draws = [source.normal([_VALUES], scale=3.0).double().numpy() for source in (first, first, second)]
    for draw in draws:
        if float(np.abs(draw).max()) == 0.0:
            return Check("noise", False, "there is no noise at all")
    pairs = [(draws[0], draws[1]), (draws[0], draws[2]), (draws[1], draws[2])]
    if any(_alike(*pair) for pair in pairs):
        return Check("noise", False, "two draws have the same noise, which their difference takes away")
    chance = min(float(stats.kstest(draw / 3.0, "norm").pvalue) for draw in draws)
    said = f"{3 * _VALUES} values: Gaussian of the scale asked for (p = {chance:.2g}), no two draws alike"
    if chance < BY_CHANCE:
        said = f"{3 * _VALUES} values are not Gaussian of the scale that was asked for (p = {chance:.1g})"
    return Check("noise", chance >= BY_CHANCE, said)


def check_sampler(sampler: PatientSampler, patients: Sequence[str], *, rate: float, steps: int = 200) -> Check:
    """Every patient is drawn on its own, anew in every step, and never twice in one.

    Poisson sampling lets a step's size vary, and two steps in a row share patients as chance has it. Shuffled batches
    do neither, and a sampler that takes everybody shares them all.

    Args:
        sampler: that the training uses.
        patients: whose each row is; their number is the sampler's number of units.
        rate: that is claimed.
        steps: to draw.
    """
    drawn = [[patients[row] for row in sampler.draw().tolist()] for _ in range(steps)]
    if any(len(set(step)) < len(step) for step in drawn):
        return Check("sampler", False, "a patient was drawn twice in one step, and so adds twice what is allowed")
    units = len(set(patients))
    sizes = np.array([len(step) for step in drawn], dtype=float)
    # Pairs that have no step in common, so that each tells something of its own.
    shared = np.array([len(set(a) & set(b)) for a, b in zip(drawn[::2], drawn[1::2], strict=False)], dtype=float)
    chance = min(_of_mean(sizes, units, rate), _of_spread(sizes, units, rate), _of_mean(shared, units, rate**2))
    said = (
        f"{steps} steps of {sizes.mean():.1f} patients on average (claimed {units * rate:.1f}), standard deviation "
        f"{sizes.std():.1f} (claimed {math.sqrt(units * rate * (1 - rate)):.1f}), {shared.mean():.1f} in common with "
        f"the next (claimed {units * rate**2:.1f}), p = {chance:.2g}"
    )
    return Check("sampler", chance >= BY_CHANCE, said)


def check_clipping(
    model: nn.Module, losses: Callable[[nn.Module, Tensor, Tensor], Tensor], images: Tensor, labels: Tensor, clip: float
) -> Check:
    """No image adds more to a step than the norm that noise is measured by: each is stepped with alone."""
    clipper, longest, before = clipper_for(model, clip=clip), 0.0, 0.0
    for row in range(len(images)):
        rows = slice(row, row + 1)
        norms = clipper.backward(lambda rows=rows: losses(model, images[rows], labels[rows])).norms  # type: ignore[misc]
        parts = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        longest = max(longest, float(torch.stack([part.double().square().sum() for part in parts]).sum().sqrt()))
        before = max(before, float(norms.max()))
    passed = 0 < longest <= clip * (1 + _ROUNDING)
    return Check(
        "clipping",
        passed,
        f"{len(images)} images add up to {longest:.4f} each (allowed {clip:g}; {before:.3g} unclipped)",
    )


def check_ledger(
    entries: Sequence[Entry],
    *,
    used: Collection[tuple[int, str]],
    prices: Mapping[str, Spending],
    unit: str,
    shared: Shared | None = None,
) -> Check:
    """Everything that a site used was reserved in its ledger, and as what it was.

    Args:
        entries: of the run, in the site's ledger.
        used: what the site did, as rounds and the names of entries.
        prices: by name, what the run really does at the site each time.
        unit: whose presence the run hides.
        shared: with whom its sites share the noise.
    """
    for entry in entries:
        price = prices.get(entry.what)
        if price is None:
            continue
        told, is_ = _claim(entry.spending, entry.unit, entry.shared), _claim(price, unit, shared)
        if told != is_:
            said = f"round {entry.round}: '{entry.what}' is in the ledger with {told}, and the run's own is {is_}"
            return Check("ledger", False, said)
    for number, what in sorted(used):
        paid = sum(each.spending.steps for each in entries if (each.round, each.what) == (number, what))
        if paid < prices[what].steps:
            said = f"round {number} used {what}, {prices[what].steps} times; the ledger has {paid} of them"
            return Check("ledger", False, said)
    said = ", ".join(f"{what} with {_claim(prices[what], unit, shared)}" for what in sorted({what for _, what in used}))
    return Check("ledger", True, f"all that was used in {len({number for number, _ in used})} rounds: {said}")


def _claim(spending: Spending, unit: str, shared: Shared | None) -> str:
    """What an entry says of every step, in words that are the same where it is the same."""
    told = f"noise {spending.noise:g}, rate {spending.rate:.6g} of {spending.part} patients, hiding a {unit}"
    return told if shared is None else f"{told}, shared by {shared.fewest} sites with {shared.colluders} colluding"


def _alike(first: Vector, second: Vector) -> bool:
    """Whether two draws have values in common, or go together."""
    correlation = abs(float(np.corrcoef(first, second)[0, 1]))
    return bool((first == second).mean() > 0.01) or 2 * stats.norm.sf(correlation * math.sqrt(len(first))) < BY_CHANCE


def _of_mean(counts: Vector, units: int, rate: float) -> float:
    """The chance of a total as far off as this, if every unit was counted with the same chance, each by itself."""
    return float(stats.binomtest(int(counts.sum()), units * len(counts), rate).pvalue)


def _of_spread(counts: Vector, units: int, rate: float) -> float:
    """The chance of counts that vary so much, or so little."""
    one = rate * (1 - rate)
    if one == 0:
        return 1.0
    spread, count = float(((counts - units * rate) ** 2).sum() / (units * one)), len(counts)
    # A gamma distribution with the mean and the variance that the sum of squares has.
    variance = count * (2 + (1 - 6 * one) / (units * one))
    found = stats.gamma(count**2 / variance, scale=variance / count)
    return float(2 * min(found.cdf(spread), found.sf(spread)))
