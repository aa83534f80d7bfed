from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from tests.standins import Shapes

from crossward.federation.algebra import Algebra
from crossward.federation.contract import ALL, Plan, Tally, Vector
from crossward.federation.errors import PrivacyRefusal
from crossward.federation.rules import EqualMean, Rule, SampleMean, Shown, check_planned
from crossward.federation.scopes import Scope, TensorSpec


class Halves(Rule):
    """Two sites or more, of which each has one half of the weight at most."""

    def coefficients(
        self, name: str, tally: Tally, plan: Mapping[str, Vector], cohort: Sequence[str], me: int
    ) -> Mapping[str, float | Vector]:
        return {ALL: float(plan["weights"][me])}

    def check_plan(self, plan: Mapping[str, Vector], cohort: int) -> None:
        check_planned(plan, {"weights": (cohort,)})
        if plan["weights"].max() > 0.5:
            raise PrivacyRefusal("one has more than half")


def algebra() -> Algebra:
    layout = {"w": TensorSpec(Scope.SHARED, (2,)), "m": TensorSpec(Scope.BUFFER, (1,))}
    return Algebra(layout, {Scope.SHARED: Halves(), Scope.BUFFER: EqualMean()})


def plan(cohort: str = "abc", **values: object) -> Plan:
    weights = {"weights": np.full(len(cohort), 1 / len(cohort))}
    return Plan(4, tuple(cohort), {"shared": weights, **values})  # type: ignore[dict-item]


def refused(given: Plan) -> str:
    with pytest.raises(PrivacyRefusal) as caught:
        algebra().check_plan(given)
    return str(caught.value)


@pytest.mark.parametrize("rule", [SampleMean(), EqualMean()])
def test_a_rule_that_plans_nothing_takes_no_plan(rule: Rule) -> None:
    rule.check_plan({}, 5)
    with pytest.raises(PrivacyRefusal, match="weights"):
        rule.check_plan({"weights": np.ones(5)}, 5)


def test_a_site_asks_every_rule_about_its_part_of_a_plan() -> None:
    algebra().check_plan(plan())
    algebra().check_plan(plan(buffer={}))
    assert "round 4 for 'shared': one has more than half" in refused(plan(shared={"weights": np.array([0, 0.6, 0.4])}))
    assert "round 4 for 'shared': it says []" in refused(plan(shared={}))
    assert "for 'buffer'" in refused(plan(buffer={"weights": np.ones(3)}))


def test_a_plan_about_what_is_not_combined_is_refused() -> None:
    assert "round 4 is about 'personal', which is unknown here" in refused(plan(personal={}))
    assert "'w'" in refused(plan(w={"weights": np.ones(3)}))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.full(4, 0.25), "shape (4,), and not (3,)"),
        (np.full((3, 1), 0.25), "shape (3, 1)"),
        (np.array(0.3), "shape ()"),
        (np.array([0.5, np.nan, 0.5]), "finite"),
        (np.array([0.5, -np.inf, 0.5]), "finite"),
        (np.array([0, 1, 0]), "finite"),
        (np.array([0.5, None, 0.5], dtype=object), "finite"),
        (np.array([0.5, 0.5, 0.0], dtype=np.complex128), "finite"),
    ],
    ids=["one more", "two dimensions", "none", "NaN", "infinite", "whole numbers", "objects", "complex"],
)
def test_numbers_of_another_shape_or_kind_are_refused(value: Vector, words: str) -> None:
    assert re.search(re.escape(words), refused(plan(shared={"weights": value})))


def test_more_or_fewer_keys_are_refused() -> None:
    good = {"weights": np.full(3, 1 / 3)}
    assert "'seed'" in refused(plan(shared={**good, "seed": np.ones(1)}))
    assert "'weight'" in refused(plan(shared={"weight": good["weights"]}))


def test_a_rule_of_somebody_elses_must_say_itself_what_plan_it_takes() -> None:
    # The stand-ins plan, and do not check: nothing of theirs would be masked.
    with pytest.raises(PrivacyRefusal):
        Shapes(2, 1, 1, 2, 2).algebra().check_plan(Plan(1, ("a",), {"shared": {"weight:conv": np.ones(1)}}))


def test_every_rule_can_be_looked_up_by_its_group() -> None:
    rules = Shapes(2, 1, 1, 2, 2).algebra().rules()
    assert list(rules) == ["shared", "buffer", "personal", "prototypes", "style"]
    rules.clear()
    assert algebra().rules().keys() == {"shared", "buffer"}


def test_a_rule_says_what_it_shows() -> None:
    assert Halves().shown() == Shown()
    assert SampleMean().shown().summed == "update times the number of training images"
    assert EqualMean().shown().summed == "update"
