from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import Tensor

from crossward.uncertainty.evidence import conflict, expected_probabilities, fuse, opinion, strength

Array = np.ndarray[Any, np.dtype[np.float64]]
ROUNDING = 1e-12


def dempster(evidence_a: Array, evidence_b: Array) -> tuple[Array, float, float]:
    """Eq. 6-8 for one sample as they are printed, the division by 1 - C included: beliefs, uncertainty, C."""
    classes = len(evidence_a)
    strength_a, strength_b = (evidence_a + 1).sum(), (evidence_b + 1).sum()
    belief_a, belief_b = evidence_a / strength_a, evidence_b / strength_b
    uncertainty_a, uncertainty_b = classes / strength_a, classes / strength_b
    against = 0.0
    for i in range(classes):
        for j in range(classes):
            if i != j:
                against += belief_a[i] * belief_b[j]
    belief = (belief_a * belief_b + belief_a * uncertainty_b + belief_b * uncertainty_a) / (1 - against)
    return belief, uncertainty_a * uncertainty_b / (1 - against), against


@st.composite
def evidences(draw: st.DrawFn, count: int = 2, largest: float = 1e3) -> list[Tensor]:
    """Evidence of several heads for one batch, in float64; some of it exactly zero."""
    shape = (draw(st.integers(1, 4)), draw(st.integers(2, 20)))
    values = st.floats(0, largest, allow_subnormal=False)
    return [torch.from_numpy(draw(arrays.arrays(np.float64, shape, elements=values))) for _ in range(count)]


def test_an_opinion_by_hand() -> None:
    # K = 3, e = (4, 2, 1): S = 10, b = (.4, .2, .1), u = .3, alpha / S = (.5, .3, .2).
    evidence = torch.tensor([[4.0, 2.0, 1.0], [0.0, 0.0, 0.0]])
    belief, uncertainty = opinion(evidence)
    torch.testing.assert_close(belief, torch.tensor([[0.4, 0.2, 0.1], [0.0, 0.0, 0.0]]))
    torch.testing.assert_close(uncertainty, torch.tensor([0.3, 1.0]))
    torch.testing.assert_close(strength(evidence), torch.tensor([10.0, 3.0]))
    torch.testing.assert_close(expected_probabilities(evidence), torch.tensor([[0.5, 0.3, 0.2], [1 / 3, 1 / 3, 1 / 3]]))


def test_two_heads_that_contradict_each_other_by_hand() -> None:
    # S = 12 each, so u = 1/6 and C = (10/12)^2; the fused evidence is (10, 10) and u = 2/22.
    one, other = torch.tensor([[10.0, 0.0]]), torch.tensor([[0.0, 10.0]])
    assert opinion(one)[1].item() == pytest.approx(0.167, abs=5e-4)
    assert opinion(other)[1].item() == pytest.approx(0.167, abs=5e-4)
    torch.testing.assert_close(fuse(one, other), torch.tensor([[10.0, 10.0]]))
    assert opinion(fuse(one, other))[1].item() == pytest.approx(0.091, abs=5e-4)
    assert conflict(one, other).item() == pytest.approx(100 / 144)
    torch.testing.assert_close(expected_probabilities(fuse(one, other)), torch.tensor([[0.5, 0.5]]))


def test_two_heads_that_agree_by_hand() -> None:
    # e = 4 + 6 + 4 * 6 / 2 = 22 for the first class, nothing for the second.
    one, other = torch.tensor([[4.0, 0.0]]), torch.tensor([[6.0, 0.0]])
    torch.testing.assert_close(fuse(one, other), torch.tensor([[22.0, 0.0]]))
    assert opinion(fuse(one, other))[1].item() == pytest.approx(2 / 24)


@given(evidences())
def test_fusion_is_dempsters_rule_as_printed(pair: list[Tensor]) -> None:
    one, other = pair
    belief, uncertainty = opinion(fuse(one, other))
    against = conflict(one, other)
    for row in range(len(one)):
        expected_belief, expected_uncertainty, expected_conflict = dempster(one[row].numpy(), other[row].numpy())
        # The printed form divides by 1 - C, which is above u > 1e-3 here: it loses three of sixteen digits.
        np.testing.assert_allclose(belief[row], expected_belief, rtol=0, atol=ROUNDING)
        np.testing.assert_allclose(uncertainty[row], expected_uncertainty, rtol=ROUNDING)
        np.testing.assert_allclose(against[row], expected_conflict, rtol=0, atol=ROUNDING)


@given(evidences(count=1))
def test_beliefs_and_uncertainty_are_masses_that_sum_to_one(single: list[Tensor]) -> None:
    (evidence,) = single
    belief, uncertainty = opinion(evidence)
    assert belief.shape == evidence.shape
    assert uncertainty.shape == evidence.shape[:1]
    assert (belief >= 0).all()
    assert ((uncertainty > 0) & (uncertainty <= 1)).all()
    torch.testing.assert_close(belief.sum(dim=1) + uncertainty, torch.ones(len(evidence)).double())
    probabilities = expected_probabilities(evidence)
    torch.testing.assert_close(probabilities.sum(dim=1), torch.ones(len(evidence)).double())
    # The mean of the Dirichlet distribution spreads the uncertainty evenly over the classes.
    torch.testing.assert_close(probabilities, belief + uncertainty.unsqueeze(1) / evidence.shape[1])


@given(evidences(count=3))
def test_fusion_has_no_order(three: list[Tensor]) -> None:
    a, b, c = three
    assert torch.equal(fuse(a, b), fuse(b, a))
    torch.testing.assert_close(fuse(fuse(a, b), c), fuse(a, fuse(b, c)), rtol=ROUNDING, atol=0)


@given(evidences(count=1))
def test_a_head_that_knows_nothing_changes_nothing(single: list[Tensor]) -> None:
    (evidence,) = single
    vacuous = torch.zeros_like(evidence)
    assert torch.equal(fuse(evidence, vacuous), evidence)
    assert torch.equal(fuse(vacuous, evidence), evidence)
    assert not conflict(evidence, vacuous).any()
    assert not conflict(vacuous, vacuous).any()


@given(evidences())
def test_fusing_never_adds_uncertainty(pair: list[Tensor]) -> None:
    fused = opinion(fuse(*pair))[1]
    lower = torch.minimum(opinion(pair[0])[1], opinion(pair[1])[1])
    assert (fused <= lower * (1 + ROUNDING)).all()


@given(evidences(largest=1e6))
def test_conflict_is_a_symmetric_share_of_the_mass(pair: list[Tensor]) -> None:
    one, other = pair
    for dtype in (torch.float64, torch.float32):
        against = conflict(one.to(dtype), other.to(dtype))
        assert against.shape == one.shape[:1]
        assert ((against >= 0) & (against < 1)).all()
        # Products and sums of the same numbers, so equal to the last bit.
        assert torch.equal(against, conflict(other.to(dtype), one.to(dtype)))


@given(classes=st.integers(2, 20), label=st.integers(0, 19), amounts=st.tuples(st.floats(0, 1e4), st.floats(0, 1e4)))
def test_opinions_for_the_same_class_alone_do_not_conflict(
    classes: int, label: int, amounts: tuple[float, float]
) -> None:
    one, other = torch.zeros(2, 1, classes, dtype=torch.float64)
    one[0, label % classes], other[0, label % classes] = amounts
    assert conflict(one, other).item() == pytest.approx(0, abs=ROUNDING)
    assert conflict(one, one.roll(1, dims=1)).item() == pytest.approx((amounts[0] / (amounts[0] + classes)) ** 2)


def test_certain_heads_that_contradict_each_other_stay_finite() -> None:
    one = torch.tensor([[1e6, 0.0, 0.0]], requires_grad=True)
    other = torch.tensor([[0.0, 1e6, 0.0]], requires_grad=True)
    fused = fuse(one, other)
    belief, uncertainty = opinion(fused)
    against = conflict(one, other)
    # Worked out with fractions: S = 2e6 + 3 and C = (1e6 / (1e6 + 3))^2.
    torch.testing.assert_close(fused, torch.tensor([[1e6, 1e6, 0.0]]))
    assert uncertainty.item() == pytest.approx(3 / (2e6 + 3), rel=1e-6)
    assert belief[0].tolist() == pytest.approx([0.5, 0.5, 0.0], abs=1e-5)
    assert against.item() == pytest.approx((1e6 / (1e6 + 3)) ** 2, abs=1e-6)
    (belief.sum() + uncertainty.sum() + against.sum() + expected_probabilities(fused).log().sum()).backward()
    for evidence in (one, other):
        assert evidence.grad is not None
        assert torch.isfinite(evidence.grad).all()


@pytest.mark.parametrize("classes", [2, 3, 7])
def test_gradients_are_those_of_finite_differences(classes: int) -> None:
    generator = torch.Generator().manual_seed(classes)
    one, other = (
        (5 * torch.rand(3, classes, generator=generator, dtype=torch.float64) + 0.1).requires_grad_() for _ in range(2)
    )
    assert torch.autograd.gradcheck(lambda evidence: opinion(evidence), (one,))
    assert torch.autograd.gradcheck(expected_probabilities, (one,))
    assert torch.autograd.gradcheck(fuse, (one, other))
    assert torch.autograd.gradcheck(conflict, (one, other))


@pytest.mark.parametrize("function", [fuse, conflict])
def test_an_empty_batch_has_no_opinions(function: Any) -> None:
    nobody = torch.zeros(0, 4)
    assert len(function(nobody, nobody)) == 0
    assert [len(part) for part in opinion(nobody)] == [0, 0]
    assert expected_probabilities(nobody).shape == (0, 4)
