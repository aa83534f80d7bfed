"""Attacks on the models that a finished run has kept: who was trained on, and how often each label was there.

A site's report is deleted as soon as its sum has arrived, so that of a finished run no update is left to attack. What
is left is what everybody was given: the model of the best round, which is deployed, and that of the last one. What a
model has moved since the public start is the sum of everything that left the sites until then.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from crossward.federation.contract import Tensors
from crossward.federation.errors import BadInput
from crossward.federation.scopes import Scope, layout_of, names_in
from crossward.imaging.data import Cohort
from crossward.methods.base import Model
from crossward.privacy.audit.findings import Finding, Setting, below
from crossward.privacy.audit.labels import agreement, labels_of
from crossward.privacy.audit.membership import Membership, membership
from crossward.site.adapt import welcomed
from crossward.site.handover import Handover
from crossward.site.study import Study
from crossward.site.trainer import predict

_MOST_AUC = 0.65
_GUESSED = 64  # images of the attacker's own, to see what a model answers to anything


@dataclass(frozen=True)
class Recovered:
    """Labels that follow from how a model's last bias has moved.

    Attributes:
        share: of all training labels, each as often as it is there.
        blind: the share that is right without looking at the model.
    """

    share: float
    blind: float


def kept_models(folder: Path, handover: Handover, cohort: Cohort) -> Iterator[tuple[int, Tensors]]:
    """The best round's model and the last one's, with their rounds; only the former without the server's files."""
    yield handover.round_number, handover.tensors
    coordinator = handover.study.coordinator(folder / "server", sorted(cohort.sites))
    if coordinator.resume() and coordinator.state.round_number != handover.round_number:
        yield coordinator.state.round_number, coordinator.state.common()


def attack_kept_models(
    folder: Path, handover: Handover, cohort: Cohort, *, setting: Setting, ruled: bool
) -> Iterator[Finding]:
    """Membership by loss, and recovery of labels, on every model that the run has kept.

    Args:
        folder: of the run.
        handover: what it left.
        cohort: the images that it was trained on.
        setting: what protected the run.
        ruled: whether the run promised so much that membership must not show.
    """
    for number, tensors in kept_models(folder, handover, cohort):
        made = partial(Finding, subject="the run", setting=setting)
        began = time.perf_counter()
        if (found := _members(handover.study, cohort, tensors)) is not None:
            rule, passed = below(found.auc, _MOST_AUC) if ruled else ("", None)
            yield made(
                attack="membership",
                figure=found.auc,
                unit="AUC",
                rule=rule,
                passed=passed,
                words=f"{found.members} training and {found.others} test images, model of round {number}; "
                f"{100 * found.tpr:.1f} % of members found at 1 % false alarms",
                seconds=time.perf_counter() - began,
            )
        began = time.perf_counter()
        if (labels := recovered_labels(handover.study, cohort, tensors, number)) is not None:
            yield made(
                attack="labels of a sum",
                figure=100 * labels.share,
                unit="%",
                words=f"of all training images, from what the model of round {number} has moved since the start; "
                f"{100 * labels.blind:.0f} % without the model. Whose they are, it does not tell",
                seconds=time.perf_counter() - began,
            )


def _members(study: Study, cohort: Cohort, tensors: Tensors) -> Membership | None:
    """Training images against test images; None where the shared part alone gives no answer."""
    try:
        model, device = welcomed(study, tensors, site="the audit")
    except BadInput:
        # Where classifiers stay at their sites, what everybody was given may not answer at all.
        return None
    scores, members = [], []
    for site in cohort.sites.values():
        for split, inside in ((site.train, True), (site.test, False)):
            answer = predict(model, study.method, split, device=device)
            scores.append(answer.probabilities[torch.arange(len(split)), split.labels].double().log().numpy())
            members.append(np.full(len(split), inside))
    return membership(np.concatenate(scores), np.concatenate(members))


def recovered_labels(study: Study, cohort: Cohort, tensors: Tensors, rounds: int) -> Recovered | None:
    """Guess how often each label is there, from what a shared last bias has moved in so many rounds.

    In every step the bias goes down the probabilities less the labels (iDLG), times the learning rate. Rates and steps
    are public; the probabilities are taken from models at both ends, on images of the attacker's own.

    Returns:
        None where no bias with a value for each class leaves the sites.
    """
    start = study.model()
    classes, leaving = len(study.task.classes), names_in(layout_of(start), Scope.SHARED)
    biases = [name for name in leaving if name.startswith("head.") and tensors[name].shape == (classes,)]
    if not biases:
        return None
    last, truth = biases[-1], Counter[int]()
    for site in cohort.sites.values():
        truth.update(site.train.labels.tolist())
    images, training = truth.total(), study.training
    steps = training.steps or round(training.epochs * images / len(cohort.sites) / training.batch_size)
    rates = sum(training.rate(number, study.task.rounds) for number in range(1, rounds + 1))
    # Of a gradient that stays the same, momentum has made so many by each step of a round, in which it starts anew.
    taken = float(np.cumsum(training.momentum ** np.arange(max(1, steps))).sum())
    gradient = -(tensors[last].double() - start.state_dict()[last].double()) / (rates * taken)
    even = torch.full((classes,), 1 / classes, dtype=torch.float64)
    predicted = (_usual(start, study) + _usual(_with(study.model(), tensors), study)) / 2
    found, blind = labels_of(gradient, predicted, images), labels_of(torch.zeros(classes), even, images)
    return Recovered(agreement(found, truth), agreement(blind, truth))


def _with(model: Model, tensors: Tensors) -> Model:
    model.load_state_dict({name: value for name, value in tensors.items() if name in model.state_dict()}, strict=False)
    return model


@torch.inference_mode()
def _usual(model: Model, study: Study) -> torch.Tensor:
    """The probabilities that a model gives on average to images of nothing."""
    task = study.task
    shape = (_GUESSED, task.channels, task.size, task.size)
    images = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return study.method.predict(model.eval(), images).probabilities.double().mean(dim=0)
