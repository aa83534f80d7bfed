"""Attacks on a run's own model and images, and a look at what its sites wrote down."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from crossward.cli.audit_canaries import SUPPOSED, canaries, losses_of, train_of
from crossward.cli.audit_rounds import attack_kept_models
from crossward.evaluate.facts import read_result
from crossward.federation.errors import BadInput
from crossward.federation.scopes import Scope, layout_of, names_in
from crossward.imaging.data import Cohort, SiteData, Split
from crossward.imaging.pictures import normalised, pictures_of, pixels_of
from crossward.privacy.audit.checks import Check, check_clipping, check_ledger, check_noise, check_row, check_sampler
from crossward.privacy.audit.findings import Finding, Findings, Pictured, Setting, no_picture
from crossward.privacy.audit.harness import federate
from crossward.privacy.audit.inversion import Attack, gradient_of, guessed_blindly, invert, psnr
from crossward.privacy.audit.membership import by_updates
from crossward.privacy.audit.one_run import CONFIDENCE, Guesses, guess, lower_bound, most_certified
from crossward.privacy.dp.accounting import Spending, epsilon
from crossward.privacy.dp.ledger import Ledger, key_of, name_of
from crossward.privacy.dp.noise import NoiseSource
from crossward.privacy.dp.sampling import PatientSampler
from crossward.privacy.dp.signing import verifier
from crossward.site.devices import Device
from crossward.site.handover import Handover
from crossward.site.record_protection import TRAINED, Prices, prices_of
from crossward.site.update_protection import UPDATE, noise_of

Progress = Callable[[str, int, int], None]

_TRAINED = ("reported", "summed")
_CHECKED = 8
_STRONG = 4.0
_CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much is tried on a run.

    Attributes:
        attack: of gradient inversion.
        steps: of training with canaries, at every site.
        canaries: at every site, at most.
    """

    attack: Attack
    steps: int
    canaries: int


QUICK = Effort(attack=Attack(restarts=1, sweeps=2, smooth=1e-2, seconds=2.0), steps=12, canaries=64)
FULL = Effort(attack=Attack(restarts=1, sweeps=12, smooth=1e-2, seconds=12.0), steps=60, canaries=256)


class AuditedRun:
    """A run to attack.

    Args:
        folder: of the run.
        handover: what it left.
        cohort: the images that it was trained on.
        effort: how much is tried.
    """

    def __init__(self, folder: Path, handover: Handover, cohort: Cohort, effort: Effort) -> None:
        self._folder, self._handover, self._cohort, self._effort = folder, handover, cohort, effort
        self._study = handover.study
        self._privacy = self._study.privacy or SUPPOSED
        # Noise on a whole site's update hides the site: attacks on single images have no rule for it.
        self._by_record = self._privacy.unit != "site"
        self._device = Device(_CPU, None)

    def attack(self, progress: Progress) -> Findings:
        """Run everything."""
        found = Findings()
        parts = [self._kept, self._inversion, self._ledgers]
        if self._by_record:
            parts += [self._checks, self._one_run]
        for done, part in enumerate(parts):
            progress("the run", done, len(parts))
            found.extend(part())
        progress("the run", len(parts), len(parts))
        return found

    @property
    def _setting(self) -> Setting:
        """What protected the run itself."""
        return _setting(private=bool(self._study.privacy), summed=bool(self._study.masking))

    @property
    def _first(self) -> SiteData:
        return next(iter(self._cohort.sites.values()))

    def _prices(self, units: int) -> Prices:
        return prices_of(
            self._privacy,
            self._study.training,
            units=units,
            rounds=self._study.task.rounds,
            releases=bool(self._study.method.extras(self._study.task, self._study.model())),
        )

    def _checks(self) -> Findings:
        """The parts that protect, on the first site's own patients and images, where the run was private."""
        if self._study.privacy is None:
            return Findings()
        split, privacy = self._first.train, self._study.privacy
        owners = self._owners(split)
        rate = self._prices(len(set(owners))).rate
        sampler = PatientSampler(split.patients, rate=rate, unit=privacy.unit, source=NoiseSource())
        images, labels = _first_images(split, _CHECKED)
        looks: tuple[Callable[[], Check], ...] = (
            check_noise,
            partial(check_sampler, sampler, owners, rate=rate),
            partial(check_clipping, self._study.model(), self._losses, images, labels, privacy.clip),
        )
        return Findings([check_row(self._first.name, look) for look in looks])

    def _ledgers(self) -> Findings:
        """Whether everything that was trained was paid for, where sites' ledgers are in the run's folder."""
        result = self._folder / "result.json"
        if self._study.privacy is None or not result.is_file():
            return Findings()
        facts = read_result(result)
        looks = {name: partial(self._ledger, site, facts) for name, site in self._cohort.sites.items()}
        return Findings([check_row(name, look) for name, look in looks.items()])

    def _ledger(self, site: SiteData, facts: Mapping[str, Any]) -> Check:
        folder = self._folder / "sites" / site.name / "ledger"
        name = name_of(folder)
        if name is None:
            return Check("ledger", False, "the site trained under differential privacy, and there is no ledger")
        ledger = Ledger(folder, sign=_no_signing, verify=verifier(key_of(folder)), signer="", name=name)
        prices = self._spendings(site)
        return check_ledger(
            ledger.entries(),
            used=_used(site, facts, prices),
            prices=prices,
            unit=self._privacy.unit,
            shared=self._study.shared,
        )

    def _spendings(self, site: SiteData) -> Mapping[str, Spending]:
        """What the run's own settings and the site's own patients make of each thing that is paid for."""
        if self._by_record:
            return self._prices(len(set(self._owners(site.train)))).spendings
        return {UPDATE: Spending(noise_of(self._privacy, rounds=self._study.task.rounds), 1.0, 1)}

    def _owners(self, split: Split) -> Sequence[str]:
        """Whose presence is hidden, for every image."""
        return split.ids if self._privacy.unit == "image" else split.patients

    def _kept(self) -> Findings:
        """What everybody was given: the models of the best and of the last round."""
        epsilon_ = self._privacy.epsilon
        ruled = self._study.privacy is not None and self._by_record and epsilon_ is not None and epsilon_ <= _STRONG
        models = attack_kept_models(self._folder, self._handover, self._cohort, setting=self._setting, ruled=ruled)
        return Findings(list(models))

    def _inversion(self) -> Findings:
        """One training image of the first site behind a step from the common start."""
        split = self._first.train
        images, labels = _first_images(split, 1 + len(self._cohort.sites))
        pixels, model = pixels_of(images), self._study.model().train()
        _freeze_local(model)
        gradients = [
            gradient_of(model, self._mean_loss, pixels[k : k + 1], labels[k : k + 1]) for k in range(len(pixels))
        ]
        parties = max(2, len(self._cohort.sites))
        seen = {Setting.NONE: gradients[0], Setting.SECAGG: _summed(gradients[:parties])}
        if self._by_record:
            noise = self._prices(len(set(self._owners(split)))).step
            noisy = [self._noisy(gradient, noise) for gradient in gradients]
            seen |= {Setting.DP: noisy[0], Setting.BOTH: _summed(noisy[:parties])}
        blind = psnr(guessed_blindly(pixels[0].shape), pixels[0])
        supposed = "" if self._study.privacy else f"; as if it had been run with --dp {SUPPOSED.epsilon:g}"
        rows, rebuilt, works = [], {}, False
        for setting, gradient in seen.items():
            began = time.perf_counter()
            found = invert(
                model, self._mean_loss, gradient, labels[:1], shape=pixels.shape[1:], attack=self._effort.attack
            )
            likeness = psnr(found.images[0], pixels[0])
            rebuilt[setting] = (_picture(found.images), likeness)
            if setting is Setting.NONE:
                works = likeness > blind + 1
            # An attack that fails in the open as well has not been stopped by a protection.
            ruled = works and setting is not Setting.NONE
            rule, passed = no_picture(likeness, blind) if ruled else ("", None)
            told = supposed if setting in (Setting.DP, Setting.BOTH) else ""
            told += "" if works else "; on this model the attack is too weak to show anything, protected or not"
            rows.append(
                Finding(
                    subject=self._first.name,
                    attack="gradient inversion",
                    setting=setting,
                    figure=likeness,
                    unit="dB",
                    rule=rule,
                    passed=passed,
                    words=f"one image, its label known; a blind guess has {blind:.1f} dB{told}",
                    seconds=time.perf_counter() - began,
                )
            )
        return Findings(rows, [Pictured(subject=self._first.name, original=_picture(pixels[:1]), rebuilt=rebuilt)])

    def _noisy(self, gradient: list[Tensor], noise: float) -> list[Tensor]:
        """What a private step gives away of one image at most: that it was drawn, the attacker knows."""
        length = math.sqrt(sum(float(part.double().square().sum()) for part in gradient))
        clip = self._privacy.clip
        made = [part * min(1.0, clip / max(length, 1e-12)) for part in gradient]
        NoiseSource().add_to(made, scale=noise * clip)
        return made

    def _one_run(self) -> Findings:
        """Train once more, with the run's own step and settings, on images with wrong labels that a coin put in."""
        study = self._study if self._study.privacy else self._study.private(SUPPOSED)
        sites = {
            name: canaries(site, self._effort.canaries, number)
            for number, (name, site) in enumerate(self._cohort.sites.items())
        }
        # The number of those in is a coin's: rate and noise are settled without it.
        units = min(len(canary.split) for canary in sites.values()) // 2
        if units < 2:
            return Findings()
        prices = self._prices(units)
        rounds = max(1, min(study.task.rounds, self._effort.steps // prices.steps))
        steps = min(prices.steps, self._effort.steps)
        claim = epsilon([Spending(prices.step, prices.rate, rounds * steps)], delta=self._privacy.delta)
        rows = []
        for private in (False, True):
            began = time.perf_counter()
            trains = [
                train_of(study, name, canary, prices, expected=prices.rate * units, steps=steps, private=private)
                for name, canary in sites.items()
            ]
            trail = federate(study.model(), trains, rounds=rounds)
            for summed in (False, True):
                setting = _setting(private=private, summed=summed)
                found = Guesses(0, 0, 0)
                for canary, seen in zip(sites.values(), trail.each, strict=True):
                    scores = by_updates(
                        trail.model,
                        partial(losses_of, study),
                        canary.split.images[:],
                        canary.split.labels,
                        trail.summed if summed else seen,
                        clip=self._privacy.clip,
                    )
                    found = _together(found, guess(scores, canary.included, guesses=max(2, len(scores) // 2)))
                bound = lower_bound(found, delta=self._privacy.delta)
                most = most_certified(found.canaries, found.made, delta=self._privacy.delta)
                rows.append(
                    Finding(
                        subject="the run",
                        attack="epsilon at least",
                        setting=setting,
                        figure=bound,
                        unit="epsilon",
                        rule=f"at most the claim, {claim:.2f}" if private else "",
                        passed=bound <= claim if private else None,
                        words=f"{rounds * steps} steps, {found.right} of {found.made} guesses right, "
                        f"{100 * CONFIDENCE:.0f} % confidence; all right would show {most:.2f}",
                        seconds=time.perf_counter() - began,
                    )
                )
                began = time.perf_counter()
        return Findings(rows)

    def _losses(self, model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        return losses_of(self._study, model, images, labels)

    def _mean_loss(self, model: nn.Module, pixels: Tensor, labels: Tensor) -> Tensor:
        return self._losses(model, normalised(pixels, pixels.shape[1]), labels).mean()


def _used(site: SiteData, facts: Mapping[str, Any], prices: Mapping[str, Spending]) -> list[tuple[int, str]]:
    """What a site did that is to be in its ledger, by the run's own record."""
    found = []
    for entry in facts["rounds"]:
        own = entry["sites"].get(site.name, {})
        if own.get("status") in _TRAINED:
            found += [(entry["round"], what) for what in (*TRAINED, UPDATE) if what in prices]
        if len(site.val) and (own.get("received") or own.get("val_accuracy") is not None):
            found += [(entry["round"], what) for what in prices if what == "val counts"]
    return found


def _setting(*, private: bool, summed: bool) -> Setting:
    if private:
        return Setting.BOTH if summed else Setting.DP
    return Setting.SECAGG if summed else Setting.NONE


def _together(first: Guesses, second: Guesses) -> Guesses:
    """Guesses about canaries of sites that have no patient in common: one longer list of coins."""
    return Guesses(first.canaries + second.canaries, first.made + second.made, first.right + second.right)


def _freeze_local(model: nn.Module) -> None:
    """Leave only those gradients that an attacker could see."""
    leaving = set(names_in(layout_of(model), *(scope for scope in Scope if scope.leaves)))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in leaving)


def _first_images(split: Split, count: int) -> tuple[Tensor, Tensor]:
    rows = torch.arange(min(count, len(split)))
    return split.images[rows], split.labels[rows]


def _summed(gradients: list[list[Tensor]]) -> list[Tensor]:
    return [torch.stack(parts).sum(dim=0) for parts in zip(*gradients, strict=True)]


def _picture(pixels: Tensor) -> NDArray[np.uint8]:
    shades: NDArray[np.uint8] = pictures_of(normalised(pixels, pixels.shape[1]))[0]
    return shades


def _no_signing(_message: bytes) -> bytes:
    raise BadInput("a ledger is only read here")
