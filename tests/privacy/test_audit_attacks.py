from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from crossward.federation.errors import BadInput
from crossward.privacy.audit import harness, setup, small
from crossward.privacy.audit.findings import Findings, Setting
from crossward.privacy.audit.harness import Private, canaries, small_net
from crossward.privacy.audit.inversion import Attack, best_psnr, invert, psnr
from crossward.privacy.audit.labels import agreement, label_of, labels_of
from crossward.privacy.audit.masked import sum_up, telling
from crossward.privacy.audit.membership import Seen, by_updates, membership

SIZE = setup.QUICK


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def private() -> Private:
    return SIZE.private()


def figures(found: Findings, attack: str) -> dict[Setting, float]:
    return {row.setting: row.figure for row in found.rows if row.attack == attack and row.figure is not None}


def test_inversion_works_on_an_open_update_and_fails_on_protected_ones(private: Private) -> None:
    found = small.invert_updates(SIZE, private)
    likeness = figures(found, "gradient inversion")
    assert likeness[Setting.NONE] > 25
    assert max(likeness[Setting.DP], likeness[Setting.SECAGG], likeness[Setting.BOTH]) < 12
    # Known to whoever reads the page: a sum of eight single images hides none of them from who looks for all.
    assert figures(found, "inversion of all, 1 each")[Setting.SECAGG] > 25
    assert not found.failed
    (pictured,) = found.pictures
    assert set(pictured.rebuilt) == set(Setting)
    off = {
        setting: np.abs(picture.astype(int) - pictured.original.astype(int)).mean()
        for setting, (picture, _) in pictured.rebuilt.items()
    }
    assert off[Setting.NONE] < 5
    assert min(off[setting] for setting in Setting if setting is not Setting.NONE) > 40


def test_inversion_sees_through_a_clip_but_not_through_noise(private: Private) -> None:
    model, image, label = setup.attacked_net(), setup.drawn_images(1, seed=3), torch.tensor([2])
    attack = Attack(restarts=1, sweeps=8)
    clipped = setup.private_gradient(model, image, label, private=replace(private, noise=1e-9))
    assert psnr(invert(model, setup.mean_loss, clipped, label, shape=image.shape[1:], attack=attack).images, image) > 25
    with pytest.raises(BadInput, match="finite gradient"):
        invert(model, setup.mean_loss, clipped[1:], label, shape=image.shape[1:], attack=attack)


def test_psnr_by_hand() -> None:
    truth = torch.zeros(1, 2, 2)
    assert psnr(truth + 0.1, truth) == pytest.approx(20.0, abs=1e-5)
    assert psnr(truth, truth) == 99.0
    assert best_psnr(torch.stack([truth + 1, truth + 0.1]), torch.stack([truth - 5, truth])) == pytest.approx(
        20.0, abs=1e-5
    )


def test_labels_are_recovered_exactly_unless_there_is_noise(private: Private) -> None:
    found = small.recover_labels(SIZE, private)
    share = figures(found, "label of an image")
    assert share[Setting.NONE] == 100
    assert share[Setting.DP] <= 34
    assert figures(found, "labels of a sum")[Setting.SECAGG] > 80
    assert not found.failed


def test_labels_by_hand() -> None:
    # Softmax less one-hot of class 1: only its row is below 0; weights are rows times positive features.
    bias = torch.tensor([0.2, -0.7, 0.5])
    assert label_of(bias) == 1
    assert label_of(bias[:, None] * torch.tensor([0.3, 2.0])) == 1
    # Four images with predicted (.5, .25, .25), labels 0, 2, 2, 2: shares less labels.
    predicted = torch.tensor([0.5, 0.25, 0.25])
    found = labels_of(predicted - torch.tensor([0.25, 0.0, 0.75]), predicted, 4)
    assert found[0] == 1
    assert found[2] == 3
    assert agreement(found, Counter([0, 2, 2, 1])) == 0.75
    with pytest.raises(BadInput):
        label_of(torch.tensor([0.1, float("nan")]))


def test_membership_works_on_open_updates_and_the_bound_stays_below_the_claim(private: Private) -> None:
    found = small.infer_membership(SIZE, private)
    auc, bound = figures(found, "membership"), figures(found, "epsilon at least")
    assert auc[Setting.NONE] > 0.9
    # Sums hide whose it was, not what was learnt by heart.
    assert auc[Setting.SECAGG] > 0.8
    assert max(auc[Setting.DP], auc[Setting.BOTH]) < 0.65
    assert bound[Setting.NONE] > SIZE.claim
    assert max(bound[Setting.DP], bound[Setting.BOTH]) <= SIZE.claim
    assert not found.failed


def test_membership_by_hand() -> None:
    scores = np.array([0.9, 0.8, 0.4, 0.7, 0.3, 0.2])
    members = np.array([True, True, True, False, False, False])
    # Of nine pairs the member is ahead in eight; two members are above every other.
    found = membership(scores, members)
    assert found.auc == pytest.approx(8 / 9)
    assert found.tpr == pytest.approx(2 / 3)
    assert membership(np.zeros(6), members).auc == 0.5
    assert membership(np.zeros(6), members).tpr == 0.0
    with pytest.raises(BadInput):
        membership(scores, np.ones(6, dtype=bool))


def test_scores_from_updates_are_inner_products_with_clipped_gradients() -> None:
    """The slope along the update, against gradients by automatic differentiation."""
    model, made, clip = small_net(1), canaries(6, seed=2), 1.0
    start = {name: value.detach().clone() for name, value in model.named_parameters()}
    generator = torch.Generator().manual_seed(0)
    update = {name: 0.01 * torch.randn(value.shape, generator=generator) for name, value in start.items()}
    scores = by_updates(model, harness.losses_of, made.images, made.labels, [Seen(start, update)], clip=clip)
    for row, score in enumerate(scores):
        loss = harness.losses_of(model, made.images[row : row + 1], made.labels[row : row + 1]).sum()
        gradient = dict(zip(start, torch.autograd.grad(loss, list(model.parameters())), strict=True))
        norm = float(torch.stack([part.square().sum() for part in gradient.values()]).sum().sqrt())
        inner = sum(float((gradient[name] * update[name]).sum()) for name in start)
        assert score == pytest.approx(-inner * min(1, clip / norm), rel=1e-3, abs=1e-6)


def test_a_masked_vector_tells_nothing_and_the_sum_is_right() -> None:
    random = np.random.default_rng(0)
    updates = [random.standard_normal(5000).astype(np.float32) for _ in range(4)]
    opened = sum_up(updates)
    assert np.abs(opened.total - np.sum(updates, axis=0, dtype=np.float64)).max() < 1e-6
    for words, update in zip(opened.masked, updates, strict=True):
        assert telling(words, update).nothing


def test_a_vector_without_its_mask_is_told_apart() -> None:
    update = np.random.default_rng(0).standard_normal(5000).astype(np.float32)
    bare = (update * 2**24).astype(np.int32).view(np.uint32)
    found = telling(bare, update)
    assert found.correlation > 0.99
    assert not found.nothing
