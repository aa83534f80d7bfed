"""What a round under masks says about itself: what bounds kept back, and by how much sketches are off."""

from __future__ import annotations

from hashlib import sha256

import numpy as np
import pytest
from tests.standins import mean_algebra

from crossward.evaluate.masked_differences import over_rounds
from crossward.federation.algebra import Algebra, Extra
from crossward.federation.combine import normalise
from crossward.federation.contract import Plan, Vector
from crossward.federation.scopes import Scope, TensorSpec
from crossward.methods.fdse import ConsensusMaximisation, SimilarityAware
from crossward.methods.fedcode import HeldPrototypes, StyleGroups
from crossward.privacy.secagg.sketch import gram, sketch
from crossward.privacy.sums import MaskedAlgebra
from crossward.site.masked_differences import of_round

SITES = tuple(f"site-{number}" for number in range(6))
SIZE = 600
KEYS = 100


def comparing(heard: int) -> MaskedAlgebra:
    layout = {"w": TensorSpec(Scope.SHARED, (SIZE,)), "own": TensorSpec(Scope.PERSONAL, (SIZE,))}
    rules = {
        Scope.SHARED: ConsensusMaximisation({"w": ["w"]}, cap=1 / heard),
        Scope.PERSONAL: SimilarityAware({"own": ["own"]}, tau=0.5, others=heard - 1),
    }
    return MaskedAlgebra(Algebra(layout, rules), bits=32)


def vectors(seed: int, *, still: int = 0) -> Vector:
    """Updates with something in common; the last ones did not move."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(len(SITES), SIZE)) + rng.normal(size=SIZE) * rng.uniform(0, 1.5, size=(len(SITES), 1))
    rows[len(SITES) - still :] = 0
    return rows


def root_mean_square(values: Vector) -> float:
    return float(np.sqrt(np.mean(np.square(values))))


@pytest.mark.parametrize("still", [0, 2])
def test_sketches_measure_by_how_much_they_are_off(still: int) -> None:
    """Over some keys: what halves of sketches say is what cosines, weights and mixtures are really off by."""
    masked, rows = comparing(3), {"shared/w": vectors(1, still=still), "personal/own": vectors(2)}
    moved = np.array([float(len(SITES) - still)])
    totals = {"shared/norms": moved, "shared/moved": moved}
    exact = masked.algebra.plan(1, SITES, totals, {block: normalise(each @ each.T) for block, each in rows.items()})
    pairs = np.triu_indices(len(SITES) - still, 1)
    said: dict[str, list[float]] = {}
    true: dict[str, list[float]] = {}
    for number in range(KEYS):
        key = sha256(bytes([number])).digest()
        cosines = {
            site: {block: sketch([each[row].astype(np.float32)], key) for block, each in rows.items()}
            for row, site in enumerate(SITES)
        }
        seen = {block: gram([cosines[site][block] for site in SITES]) for block in rows}
        plan = masked.algebra.plan(1, SITES, totals, seen)
        off = {
            "shared/cosines": (seen["shared/w"] - normalise(rows["shared/w"] @ rows["shared/w"].T))[pairs],
            "shared/weights": plan.values["shared"]["weights"] - exact.values["shared"]["weights"],
            "personal/attention": plan.values["personal"]["attention"] - exact.values["personal"]["attention"],
        }
        found = of_round(masked, plan, totals, cosines)
        assert found["bounds"] == {}
        for name, values in off.items():
            said.setdefault(name, []).append(found["sketch_error"][name])
            true.setdefault(name, []).append(root_mean_square(values))
    for name in true:
        ratio = root_mean_square(np.array(said[name])) / root_mean_square(np.array(true[name]))
        assert ratio == pytest.approx(1, abs=0.15), name


def test_bounds_count_the_groups_that_joined_and_the_prototypes_that_were_withheld() -> None:
    """Two pairs of like styles; classes that nobody, two, and four of six hold; a fourth that all hold."""
    extras = {
        "prototypes": Extra((4, 2), HeldPrototypes(classes=4, holders=3)),
        "style": Extra((1, 3), StyleGroups(clusters="finch", members=3)),
    }
    mean = mean_algebra({"w": (2,)})
    algebra = Algebra(mean.layout, {Scope.SHARED: mean.rules()["shared"]}, extras)
    masked = MaskedAlgebra(algebra, bits=32)
    cohort = SITES[:4]
    styles = np.array([[1, 0.1, 0], [1, 0, 0.1], [0, 1, 0], [0, 1, 0.1]])
    cosines = {site: {"style/style": row / np.linalg.norm(row)} for site, row in zip(cohort, styles, strict=True)}
    totals = {"prototypes/present": np.array([0.0, 2.0, 4.0, 4.0]), "n": np.ones(1)}
    plan = algebra.plan(1, cohort, totals, {"style/style": gram([cosines[site]["style/style"] for site in cohort])})
    assert plan.values["prototypes"]["held"].tolist() == [0, 0, 1, 1]
    assert of_round(masked, plan, totals, cosines) == {
        "bounds": {"prototypes/withheld": 1.0, "style/groups": 1.0, "style/plain_groups": 2.0},
        "sketch_error": {},
    }


def test_a_method_that_plans_nothing_differs_in_nothing() -> None:
    masked = MaskedAlgebra(mean_algebra({"w": (2,)}), bits=32)
    assert of_round(masked, Plan(1, SITES), {}, {}) == {"bounds": {}, "sketch_error": {}}


def test_rounds_are_summed_up() -> None:
    first = {"cut_off": 2.0, "capped": 0.1, "bounds": {"style/groups": 1.0}, "sketch_error": {"shared/cosines": 0.03}}
    second = {"cut_off": 1.0, "capped": 0.4, "bounds": {"style/groups": 2.0}, "sketch_error": {"shared/cosines": 0.05}}
    earlier = {"cut_off": 4.0, "capped": None}
    rounds = [{"secagg": first}, {"secagg": second}, {"secagg": earlier}, {"round": 4}]
    assert over_rounds(rounds) == {
        "cut_off": 7.0,
        "capped": 0.4,
        "bounds": {"style/groups": 3.0},
        "sketch_error": {"shared/cosines": pytest.approx(np.sqrt((0.03**2 + 0.05**2) / 2))},
    }
    assert over_rounds([]) == {"cut_off": 0.0, "capped": None, "bounds": {}, "sketch_error": {}}
