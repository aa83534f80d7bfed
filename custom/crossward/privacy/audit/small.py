"""The built-in set-up: small models and made-up images on which every attack works where nothing protects.

An attack that fails in a protected setting says something only if it succeeds beside it in the open one. A run's own
model and images may be too hard for an attacker of minutes; these are not.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor, nn

from crossward.privacy.audit import harness
from crossward.privacy.audit.checks import Check, check_clipping, check_noise, check_row, check_sampler
from crossward.privacy.audit.findings import Finding, Findings, Pictured, Setting, below, no_picture, worked
from crossward.privacy.audit.harness import Private, Train, canaries, federate, plain_step, private_step, small_net
from crossward.privacy.audit.inversion import Attack, best_psnr, gradient_of, guessed_blindly, invert, psnr
from crossward.privacy.audit.labels import agreement, label_of, labels_of
from crossward.privacy.audit.masked import Opened, sum_up, telling
from crossward.privacy.audit.membership import by_loss, by_updates, membership
from crossward.privacy.audit.one_run import CONFIDENCE, guess, lower_bound, most_certified
from crossward.privacy.audit.setup import (
    CLASSES,
    SITES,
    Size,
    attacked_net,
    drawn_images,
    flat,
    like,
    mean_loss,
    private_gradient,
)
from crossward.privacy.dp.noise import NoiseSource
from crossward.privacy.dp.sampling import PatientSampler

SUBJECT = "built-in"
Progress = Callable[[str, int, int], None]

_LABEL_CHANCE = 1e-4


def audit_small(size: Size, *, progress: Progress = lambda what, done, total: None) -> Findings:
    """Run every attack on the built-in set-up, and check the parts that protect."""
    found = Findings()
    private = size.private()
    parts = (check_parts, invert_updates, recover_labels, infer_membership)
    for done, part in enumerate(parts):
        progress("built-in set-up", done, len(parts))
        found.extend(part(size, private))
    progress("built-in set-up", len(parts), len(parts))
    return found


def check_parts(size: Size, private: Private) -> Findings:
    """What sampler, clipping and noise give out."""
    patients = [str(row) for row in range(size.canaries // 2)]
    sampler = PatientSampler(patients, rate=private.rate, source=NoiseSource())
    made = canaries(32, seed=5)
    looks: tuple[Callable[[], Check], ...] = (
        check_noise,
        partial(check_sampler, sampler, patients, rate=private.rate),
        partial(check_clipping, small_net(0), harness.losses_of, made.images, made.labels, private.clip),
    )
    return Findings([check_row(SUBJECT, look) for look in looks])


def invert_updates(size: Size, private: Private) -> Findings:
    """One image behind one step: what the server sees of it in each setting."""
    model, images, labels = attacked_net(), drawn_images(SITES), torch.arange(SITES) % CLASSES
    open_ = [gradient_of(model, mean_loss, images[k : k + 1], labels[k : k + 1]) for k in range(SITES)]
    noisy = [private_gradient(model, images[k : k + 1], labels[k : k + 1], private=private) for k in range(SITES)]
    summed, summed_noisy = sum_up([flat(each) for each in open_]), sum_up([flat(each) for each in noisy])
    seen = {
        Setting.NONE: open_[0],
        Setting.DP: noisy[0],
        Setting.SECAGG: like(summed.total, open_[0]),
        Setting.BOTH: like(summed_noisy.total, open_[0]),
    }
    blind = psnr(guessed_blindly(images[0].shape), images[0])
    rows, rebuilt = [], {}
    for setting, gradient in seen.items():
        began = time.perf_counter()
        found = invert(model, mean_loss, gradient, labels[:1], shape=images.shape[1:], attack=size.attack)
        likeness = psnr(found.images[0], images[0])
        rebuilt[setting] = (_picture(found.images[0]), likeness)
        rule, passed = worked(likeness, 25, unit="dB") if setting is Setting.NONE else no_picture(likeness, blind)
        rows.append(
            Finding(
                subject=SUBJECT,
                attack="gradient inversion",
                setting=setting,
                figure=likeness,
                unit="dB",
                rule=rule,
                passed=passed,
                words=f"label known; a blind guess has {blind:.1f} dB",
                seconds=time.perf_counter() - began,
            )
        )
    rows += _joint(model, size)
    rows += _masked(Setting.SECAGG, summed, open_[0])
    rows += _masked(Setting.BOTH, summed_noisy, noisy[0])
    return Findings(rows, [Pictured(subject=SUBJECT, original=_picture(images[0]), rebuilt=rebuilt)])


def _joint(model: nn.Module, size: Size) -> Iterator[Finding]:
    """All images of all sites at once, from the sum of their gradients."""
    for each in (1, size.batch) if size.batch else (1,):
        began, count = time.perf_counter(), SITES * each
        images, labels = drawn_images(count, seed=5), torch.arange(count) % CLASSES
        seen = gradient_of(model, mean_loss, images, labels)
        attack = Attack(restarts=1, sweeps=size.attack.sweeps if each == 1 else 6)
        found = invert(model, mean_loss, seen, labels, shape=images.shape[1:], attack=attack)
        likeness = best_psnr(found.images, images)
        # The best of so many pairs looks like something by chance: as much as with images that were not in the sum.
        blind = best_psnr(found.images, drawn_images(count, seed=6))
        rule, passed = ("", None) if each == 1 else no_picture(likeness, blind)
        words = (
            f"the best of {count} images in a sum over {SITES} sites, labels known; {blind:.1f} dB with other images"
        )
        if each == 1:
            words += "; a sum of few images hides none of them from who looks for all: that takes noise"
        yield Finding(
            subject=SUBJECT,
            attack=f"inversion of all, {each} each",
            setting=Setting.SECAGG,
            figure=likeness,
            unit="dB",
            rule=rule,
            passed=passed,
            words=words,
            seconds=time.perf_counter() - began,
        )


def _masked(setting: Setting, opened: Opened, update: list[Tensor]) -> Iterator[Finding]:
    began = time.perf_counter()
    found = telling(opened.masked[0], flat(update))
    yield Finding(
        subject=SUBJECT,
        attack="masked vector",
        setting=setting,
        figure=abs(found.correlation),
        unit="correlation",
        rule="as by chance",
        passed=found.nothing,
        words=f"p = {found.by_chance:.2g} for the correlation, {found.uniform:.2g} for its octets",
        seconds=time.perf_counter() - began,
    )


def recover_labels(size: Size, private: Private) -> Findings:
    """The class of the one image behind an update."""
    model, images = attacked_net(), drawn_images(size.labels, seed=9)
    labels = torch.from_numpy(np.random.default_rng(9).integers(CLASSES, size=size.labels))
    open_ = [gradient_of(model, mean_loss, images[k : k + 1], labels[k : k + 1])[-1] for k in range(size.labels)]
    noisy = [
        private_gradient(model, images[k : k + 1], labels[k : k + 1], private=private)[-1] for k in range(size.labels)
    ]
    by_chance = int(stats.binom.isf(_LABEL_CHANCE, size.labels, 1 / CLASSES))
    rows = []
    for setting, seen in ((Setting.NONE, open_), (Setting.DP, noisy)):
        began = time.perf_counter()
        right = sum(label_of(rows_) == label for rows_, label in zip(seen, labels.tolist(), strict=True))
        if setting is Setting.NONE:
            rule, passed = "all", right == size.labels
        else:
            rule, passed = f"at most {100 * by_chance / size.labels:.0f} %, as by guessing", right <= by_chance
        rows.append(_label_finding("label of an image", setting, right / size.labels, rule, passed, began))
    began = time.perf_counter()
    bias = gradient_of(model, mean_loss, images, labels)[-1]
    with torch.no_grad():
        predicted = model(drawn_images(size.labels, seed=11)).softmax(dim=1).mean(dim=0)
    share = agreement(labels_of(bias, predicted, size.labels), Counter(labels.tolist()))
    said = f"of {size.labels} images in one sum; whose they are, it does not tell"
    rows.append(_label_finding("labels of a sum", Setting.SECAGG, share, "", None, began, said))
    return Findings(rows)


def _label_finding(
    attack: str, setting: Setting, share: float, rule: str, passed: bool | None, began: float, words: str = ""
) -> Finding:
    return Finding(
        subject=SUBJECT,
        attack=attack,
        setting=setting,
        figure=100 * share,
        unit="%",
        rule=rule,
        passed=passed,
        words=words,
        seconds=time.perf_counter() - began,
    )


def infer_membership(size: Size, private: Private) -> Findings:
    """Canaries at one site of three: by the finished model, by all updates, and the bound on epsilon."""
    own = canaries(size.canaries, seed=1)
    others = [canaries(size.canaries, seed=seed) for seed in (101, 102)]
    batch, rows = int(private.expected), []

    def site(number: int, images: Tensor, labels: Tensor, setting: Setting) -> Train:
        if setting in (Setting.DP, Setting.BOTH):
            return private_step(images, labels, private=private, steps=size.steps, rate=0.5)
        return plain_step(images, labels, batch=batch, steps=size.steps, rate=0.5, seed=number)

    claim = private.epsilon(size.rounds * size.steps)
    most = most_certified(size.canaries, size.guesses, delta=size.delta)
    for setting in Setting:
        began = time.perf_counter()
        alone = setting in (Setting.NONE, Setting.DP)
        data = [own.trained_on] if alone else [own.trained_on, *(other.trained_on for other in others)]
        sites = [site(number, *each, setting) for number, each in enumerate(data)]
        trail = federate(small_net(0), sites, rounds=size.rounds)
        found = membership(by_loss(trail.model, harness.losses_of, own.images, own.labels), own.included)
        rule, passed = _membership_rule(setting, found.auc)
        made = partial(Finding, subject=SUBJECT, setting=setting)
        rows.append(
            made(
                attack="membership",
                figure=found.auc,
                unit="AUC",
                rule=rule,
                passed=passed,
                words=f"{100 * found.tpr:.1f} % of members found at 1 % false alarms",
                seconds=time.perf_counter() - began,
            )
        )
        began = time.perf_counter()
        seen = trail.each[0] if alone else trail.summed
        scores = by_updates(trail.model, harness.losses_of, own.images, own.labels, seen, clip=private.clip)
        guesses = guess(scores, own.included, guesses=size.guesses)
        bound = lower_bound(guesses, delta=size.delta)
        private_ = setting in (Setting.DP, Setting.BOTH)
        rows.append(
            made(
                attack="epsilon at least",
                figure=bound,
                unit="epsilon",
                rule=f"at most the claim, {claim:.2f}" if private_ else "",
                passed=bound <= claim if private_ else None,
                words=f"{guesses.right} of {guesses.made} guesses right, {100 * CONFIDENCE:.0f} % confidence; all "
                f"right would show {most:.2f}",
                seconds=time.perf_counter() - began,
            )
        )
    return Findings(rows)


def _membership_rule(setting: Setting, auc: float) -> tuple[str, bool | None]:
    """Secure aggregation alone hides whose data it was, not what a model learnt by heart: it has no rule here."""
    if setting is Setting.NONE:
        return worked(auc, 0.9, unit="")
    return ("", None) if setting is Setting.SECAGG else below(auc, 0.65)


def _picture(image: Tensor) -> NDArray[np.uint8]:
    shades = (image.clamp(0, 1) * 255).round().to(torch.uint8).numpy()
    return shades[0] if len(shades) == 1 else np.ascontiguousarray(shades.transpose(1, 2, 0))
