"""Differential privacy of a whole site: one clipped and noisy update a round."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.site.made_up_sites import CPU, cohort_of, made_up_site, made_up_study
from torch import Tensor

from crossward.federation.contract import ALL, CORRECT, LOSS, SAMPLES, SEEN, VALIDATION, Payload, Plan, Share
from crossward.federation.errors import BadInput, PrivacyRefusal
from crossward.federation.scopes import Scope, names_in
from crossward.imaging.data import Cohort
from crossward.methods.registry import available
from crossward.privacy.dp.accounting import Spending, epsilon
from crossward.privacy.dp.lines import Shared
from crossward.privacy.dp.noise import NoiseSource
from crossward.privacy.dp.settings import Privacy
from crossward.privacy.secagg.settings import Settings
from crossward.privacy.secagg.vector import VectorLayout
from crossward.privacy.sums import Kind, MaskedAlgebra, Request
from crossward.site.inprocess import simulate
from crossward.site.participant import Participant
from crossward.site.protection import own_book
from crossward.site.study import Study
from crossward.site.summing import Opened, Summing
from crossward.site.update_protection import UpdateProtection, noise_of

NAME = "alder"


def whole_sites(method: Any = "fedavg", *, rounds: int = 2, masked: bool = False, **privacy: Any) -> Study:
    study = made_up_study(method, rounds=rounds)
    study = study.masked(Settings()) if masked else study
    return study.private(Privacy(**{"noise": 1.0, "unit": "site", **privacy}))


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., Participant]:
    def make(study: Study, *, run: str = "run") -> Participant:
        book = own_book(tmp_path / run, site=NAME, run=run)
        return study.participant(made_up_site(NAME), tmp_path / run, device=CPU, book=book)

    return make


def start(study: Study) -> Payload:
    return Payload(0, study.method.start(study.task, study.model()).tensors)


def length(tensors: Any) -> float:
    return math.hypot(*(float(tensor.norm()) for tensor in tensors))


def moved(site: Participant, update: dict[str, Tensor], payload: Payload) -> list[Tensor]:
    personal = names_in(site.algebra.layout, Scope.PERSONAL)
    return [value - payload.tensors[name] if name in personal else value for name, value in update.items()]


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """No noise; how much there would have been."""
    scales: list[float] = []
    monkeypatch.setattr(NoiseSource, "add_to", lambda self, tensors, *, scale: scales.append(scale))
    return scales


@pytest.mark.parametrize("method", sorted(set(available()) - {"local"}))
def test_an_update_is_clipped_as_a_whole_whatever_the_method(made: Any, quiet: list[float], method: str) -> None:
    study = whole_sites(method, clip=1e-3, noise=2.0)
    site = made(study)
    report = site.train(start(study))
    site.algebra.check(report)
    assert length(moved(site, dict(report.update), start(study))) == pytest.approx(1e-3, rel=1e-3)
    assert quiet == [2e-3]


def test_what_is_short_enough_is_left_as_it_is(made: Any, quiet: list[float]) -> None:
    plain, wide = (made(whole_sites(clip=clip), run=str(clip)) for clip in (1e6, 1e7))
    one, other = (site.train(start(whole_sites())).update for site in (plain, wide))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_noise_is_in_every_value_and_of_the_size_that_is_accounted_for(made: Any) -> None:
    study = whole_sites(clip=1e-4, noise=5.0)
    site = made(study)
    report = site.train(start(study))
    values = torch.cat([tensor.reshape(-1) for tensor in report.update.values()]).double()
    assert values.count_nonzero() == len(values)
    # The update itself is at most a fifth of one value's noise, spread over all of them.
    assert float(values.std()) == pytest.approx(5e-4, rel=5 / math.sqrt(2 * len(values)))
    (entry,) = site.protection._book.ledger.entries()
    assert (entry.what, entry.spending) == ("update", Spending(5.0, 1.0, 1))


def test_noise_is_drawn_once_and_given_again_from_the_outbox(made: Any) -> None:
    study = whole_sites()
    site = made(study)
    one, other = (site.train(start(study)).update for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert len(site.protection._book.ledger.entries()) == 1


def test_of_a_sites_images_no_count_leaves(made: Any) -> None:
    study = whole_sites()
    site = made(study)
    report = site.train(start(study))
    assert report.tally[SAMPLES].item() == 1
    assert [report.tally[key].item() for key in (LOSS, SEEN, CORRECT)] == [0, 0, 0]
    counts = site.receive(Payload(1, start(study).tensors))
    assert [counts[key].item() for key in VALIDATION] == [0, 0, 0]
    assert site.tested(site.finish(1)) == (0.0, 0.0)


def test_an_update_that_is_not_finite_is_refused(made: Any) -> None:
    study = whole_sites()
    site = made(study)
    spoilt = {name: torch.full_like(tensor, math.nan) for name, tensor in start(study).tensors.items()}
    with pytest.raises(PrivacyRefusal, match="not finite"):
        site.protection.released(spoilt, start(study), personal=())


@pytest.mark.parametrize("asked", [1.0, 8.0])
def test_the_planned_rounds_together_just_fit_into_epsilon(made: Any, asked: float) -> None:
    site = made(whole_sites(rounds=5, noise=None, epsilon=asked))
    assert isinstance(site.protection, UpdateProtection)
    spent = epsilon([Spending(site.protection.noise, 1.0, 5)], delta=1e-5)
    assert 0.98 * asked < spent <= asked


# noise that sites share


def test_shared_noise_takes_masks_and_a_method_that_compares_nobody() -> None:
    with pytest.raises(BadInput, match="--dp-unit site"):
        Privacy(noise=1.0, distributed=True)
    with pytest.raises(BadInput, match="secure aggregation"):
        whole_sites(distributed=True)
    for method in ("fdse", "fedcode"):
        with pytest.raises(BadInput, match="more of a site than its part of one sum"):
            whole_sites(method, masked=True, distributed=True)
    study = whole_sites(masked=True, distributed=True)
    assert Study.from_options(study.options()) == study
    with pytest.raises(BadInput, match="secure aggregation"):
        replace(study, masking=None)


@pytest.mark.parametrize(("fewest", "colluders"), [(3, 1), (6, 1), (6, 2)])
def test_the_honest_sites_of_the_smallest_sum_bring_all_of_the_noise(
    made: Any, quiet: list[float], fewest: int, colluders: int
) -> None:
    study = made_up_study("fedavg").masked(Settings(min_sites=fewest, colluders=colluders))
    study = study.private(Privacy(noise=4.0, clip=0.5, unit="site", distributed=True))
    made(study).train(start(study))
    assert study.masking is not None
    honest = study.masking.fewest - colluders
    assert quiet == [pytest.approx(4.0 * 0.5 / math.sqrt(honest))]


def four_sites() -> Cohort:
    names = ("alder", "birch", "cedar", "dogwood")
    return cohort_of({name: made_up_site(name, number=number) for number, name in enumerate(names)})


def test_sums_of_shared_noise_tell_nothing_but_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """How large one site's update is, or how many of its values a range cuts off, has a share of the noise only."""
    asked: list[Kind] = []
    opened: list[Opened] = []
    summed = Summing.sum

    def noted(self: Summing, kind: Kind, *arguments: Any, **options: Any) -> Opened:
        asked.append(kind)
        opened.append(summed(self, kind, *arguments, **options))
        return opened[-1]

    monkeypatch.setattr(Summing, "sum", noted)
    study = whole_sites(masked=True, distributed=True, rounds=3)
    simulate(four_sites(), study, tmp_path / "run", jobs=1)
    assert set(asked) == {Kind.UPDATES, Kind.VALIDATION, Kind.TEST}
    limits = [each.request.limits for each in opened if each.request.kind is Kind.UPDATES]
    assert len(limits) == 3
    assert {limit for each in limits for limit in each.values()} == {study.reach}
    cut_off = [value for each in opened for key, value in each.numbers.items() if key[0] == "outside"]
    assert cut_off
    assert not any(value.any() for value in cut_off)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("noise", "clip"), [(1e-3, 10.0), (1.0, 1.0), (50.0, 1e-3)])
def test_no_noise_goes_beyond_the_range_that_all_sites_have_in_common(
    made: Any, monkeypatch: pytest.MonkeyPatch, noise: float, clip: float, sign: int
) -> None:
    """Not even the farthest that there is: a number of 64 zeros, in the direction of an update with one value."""

    def zeros(self: NoiseSource, buffer: bytearray, words: int) -> None:
        buffer[:] = bytes(len(buffer))

    monkeypatch.setattr(NoiseSource, "_fill", zeros)
    study = whole_sites(masked=True, distributed=True, noise=noise, clip=clip)
    site = made(study)
    update = {name: torch.zeros(spec.shape) for name, spec in site.algebra.sent.items()}
    first = next(iter(update))
    update[first].view(-1)[0] = sign * 1e6
    released = site.protection.released(update, start(study), personal=())
    farthest = max(float(value.abs().max()) for value in released.values())
    share = noise * clip / math.sqrt(2)
    assert farthest > 9.4 * share
    assert study.reach is not None
    assert farthest < study.reach < 1.01 * clip + 10.2 * share


def test_a_site_adds_to_no_other_sum_of_what_has_a_share_of_the_noise_only(made: Any) -> None:
    study = whole_sites(masked=True, distributed=True)
    site, names = made(study), (NAME, "birch", "cedar")
    masked = MaskedAlgebra(site.algebra, bits=32, reach=site.reach)
    plan = Plan(1, names)
    limits = dict.fromkeys(site.algebra.sent, site.reach)
    request = Request(kind=Kind.UPDATES, round_number=1, attempt=1, cohort=names, plan=plan, limits=limits)
    masked.check(request)
    narrower = {**limits, next(iter(limits)): 0.5 * study.reach}
    for other in (replace(request, kind=Kind.RANGES, limits={}), replace(request, limits=narrower)):
        with pytest.raises(PrivacyRefusal, match="share of the noise"):
            masked.check(other)


def test_what_would_have_to_be_cut_off_is_not_masked_at_all() -> None:
    """A value beyond the range was never noised as it should be; a count of such values is a release of its own."""
    share = {ALL: {"bias": Share(1.0, torch.tensor([0.5, 3.0]))}}
    layout = VectorLayout(share, {}, parties=3)
    assert layout.numbers(layout.encode(share, {}, {"bias": 1.0}))["outside", "bias"] == 1
    with pytest.raises(PrivacyRefusal, match="bias"):
        layout.encode(share, {}, {"bias": 1.0}, cut_off=False)
    layout.encode(share, {}, {"bias": 3.5}, cut_off=False)


def test_a_run_under_masks_says_what_was_spent(tmp_path: Path) -> None:
    cohort = four_sites()
    study = whole_sites(masked=True, distributed=True, noise=None, epsilon=8.0)
    result = simulate(cohort, study, tmp_path / "run", jobs=1)
    assert result["privacy"]["dp"]["unit"] == "site"
    assert all(7.8 < spent <= 8.0 for spent in result["privacy"]["epsilon"].values())
    assert result["privacy"]["test"] == {"n": 0.0, "accuracy": None}
    shared = Shared(fewest=3, colluders=1)
    for name in cohort.sites:
        book = own_book(tmp_path / "run" / "sites" / name, site=name, run="run")
        assert [entry.shared for entry in book.ledger.entries()] == [shared, shared]
    told = result["privacy"]["dp"]["shared"]
    assert (told["fewest"], told["colluders"]) == (3, 1)
    assert told["epsilon"] == pytest.approx(max(result["privacy"]["epsilon"].values()))
    noise = noise_of(Privacy(epsilon=8.0, unit="site"), rounds=2) * math.sqrt(3 / 2)
    assert told["epsilon_server_alone"] == pytest.approx(epsilon([Spending(noise, 1.0, 2)], delta=1e-5))
