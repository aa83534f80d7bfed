from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made_up_sites import CLASSES, CPU, SITES, made_up_cohort, made_up_split, made_up_study

from crossward.evaluate.facts import finite
from crossward.imaging.data import Cohort, Split
from crossward.imaging.held_out import NO_CLASS, OWN_TEST, NamedScans
from crossward.methods.base import Prediction
from crossward.site.deployed import Deployed, deployed_models
from crossward.site.flags import find_flags
from crossward.site.inprocess import simulate
from crossward.uncertainty.evidence import Opinion, conflict, opinion

STUDY = made_up_study("fedavg")


class Written(Deployed):
    """A model whose answers are written on the images: class, uncertainty, evidence of the two heads."""

    def answer(self, split: Split) -> Prediction:
        said, uncertainty = split.images[:, 0, 0, 0].long(), split.images[:, 0, 0, 1]
        probabilities = torch.nn.functional.one_hot(said, len(CLASSES)).float()
        probabilities[uncertainty.isnan()] = torch.nan
        return Prediction(probabilities, uncertainty, probabilities)


class TwoHeads(Written):
    """The same, with evidence (3, 0, 0) of the global head and (0, 1, 0) of the local one for every scan."""

    def answer(self, split: Split) -> Prediction:
        ours = torch.tensor([[3.0, 0.0, 0.0]]).repeat(len(split), 1)
        own = torch.tensor([[0.0, 1.0, 0.0]]).repeat(len(split), 1)
        heads = {"global": Opinion(*opinion(ours)), "local": Opinion(*opinion(own))}
        return replace(super().answer(split), opinions=heads, conflict=conflict(ours, own))


def written(*scans: tuple[int, int, float]) -> Split:
    """Scans as (label, what the model says, its uncertainty)."""
    images = torch.zeros(len(scans), 1, 8, 8)
    for row, (_, said, uncertainty) in enumerate(scans):
        images[row, 0, 0, 0], images[row, 0, 0, 1] = said, uncertainty
    names = tuple(f"images/A{row + 1:04d}-1.dcm" for row in range(len(scans)))
    return Split(images, torch.tensor([label for label, _, _ in scans], dtype=torch.int64), names, names)


def model(kind: type[Deployed] = Written, site: str = "alder") -> dict[str, Deployed]:
    return {site: kind(site, STUDY.model(), STUDY.method, CPU)}


def cohort_with(*, val: Split, test: Split, phantom: bool = True) -> Cohort:
    cohort = made_up_cohort(["alder"])
    sites = {"alder": replace(cohort.sites["alder"], val=val, test=test)}
    return replace(cohort, sites=sites, phantom=phantom)


# The 95th percentile of 20 values 0.01, ..., 0.20 is the 19th.
VALIDATION = written(*((0, 0, value / 100) for value in range(1, 21)))
THRESHOLD = float(np.float32(0.19))
TEST = written((0, 0, 0.1), (1, 1, 0.15), (2, 0, 0.3), (1, 1, 0.25), (0, 2, 0.05))
SPOILED = NamedScans(
    written((NO_CLASS, 0, 0.5), (NO_CLASS, 1, 0.2), (NO_CLASS, 2, 0.01), (NO_CLASS, 0, 0.02)),
    ("blurred", "blurred", "empty", "empty"),
)


def flags(kind: type[Deployed] = Written, **changes: Any) -> dict[str, Any]:
    cohort = cohort_with(**{"val": VALIDATION, "test": TEST} | changes)
    found, pictures = find_flags(cohort, model(kind), {"spoiled": SPOILED})
    assert set(pictures) == {scan["picture"] for scan in found["scans"] if scan["picture"]}
    json.dumps(found, allow_nan=False)
    assert finite(found) == found
    return found


def test_counts_accuracy_and_auroc_are_those_worked_out_by_hand() -> None:
    found = flags()
    assert found["percentile"] == 95
    (site,) = found["sites"].values()
    assert site["threshold"] == THRESHOLD
    assert site["n_validation"] == 20
    own, spoiled = site["sets"][OWN_TEST], site["sets"]["spoiled"]
    # Flagged: 0.3 (wrong) and 0.25 (right); of the other three two are right.
    assert (own["n"], own["flagged"]) == (5, 2)
    assert own["accuracy_flagged"] == 1 / 2
    assert own["accuracy_rest"] == 2 / 3
    assert (spoiled["n"], spoiled["flagged"]) == (4, 2)
    assert spoiled["accuracy_flagged"] is None
    assert spoiled["accuracy_rest"] is None
    # 0.5 is above all 5 own ones, 0.2 above 3, and 0.01 and 0.02 above none: 8 of 20 pairs.
    assert site["auroc"] == {"spoiled": 8 / 20}
    assert spoiled["kinds"] == {
        "blurred": {"n": 2, "flagged": 2, "auroc": 8 / 10},
        "empty": {"n": 2, "flagged": 0, "auroc": 0.0},
    }
    assert own["kinds"]["clear"] == {"n": 2, "flagged": 0, "auroc": None}


def test_every_flagged_scan_is_listed_the_most_uncertain_first() -> None:
    scans = flags()["scans"]
    assert [(scan["set"], scan["number"]) for scan in scans] == [
        (OWN_TEST, 3),
        (OWN_TEST, 4),
        ("spoiled", 1),
        ("spoiled", 2),
    ]
    first = scans[0]
    assert first["what"] == "mass"
    assert first["predicted"] == "clear"
    assert first["uncertainty"] == pytest.approx(0.3)
    assert first["threshold"] == THRESHOLD
    assert first["reason"] == "more uncertain than the threshold"
    assert scans[2]["what"] == "blurred"


def test_without_evidence_there_are_no_opinions_and_with_it_both_heads_are_given() -> None:
    for scan in flags()["scans"]:
        assert scan["global"] is scan["local"] is scan["conflict"] is None
    for scan in flags(TwoHeads)["scans"]:
        # Evidence 3 and 1 with K = 3: S = 6 and 4.
        assert scan["global"] == {"class": "clear", "belief": 0.5, "uncertainty": 0.5}
        assert scan["local"] == {"class": "nodule", "belief": 0.25, "uncertainty": 0.75}
        assert scan["conflict"] == 0.125


def test_an_answer_that_is_not_a_number_is_flagged_first_and_ranks_as_most_suspicious() -> None:
    spoiled = NamedScans(written((NO_CLASS, 0, math.nan), (NO_CLASS, 0, 0.9)), ("blurred", "empty"))
    cohort = cohort_with(val=VALIDATION, test=TEST)
    found, _ = find_flags(cohort, model(), {"spoiled": spoiled})
    json.dumps(found, allow_nan=False)
    broken, other = (scan for scan in found["scans"] if scan["set"] == "spoiled")
    assert broken["uncertainty"] is None
    assert broken["predicted"] is None
    assert broken["reason"] == "its uncertainty is not a number"
    assert other["uncertainty"] == pytest.approx(0.9)
    assert found["sites"]["alder"]["auroc"]["spoiled"] == 1.0


@pytest.mark.parametrize(
    ("validation", "why"),
    [
        (written(), "no validation scans"),
        (written((0, 0, 0.1), (0, 0, math.nan)), "not a number"),
        (written((0, 0, 0.1), (0, 0, 0.1)), "same uncertainty"),
    ],
)
def test_a_site_without_a_threshold_flags_everything_and_says_why(validation: Split, why: str) -> None:
    found = flags(val=validation)
    site = found["sites"]["alder"]
    assert site["threshold"] is None
    assert why in site["note"]
    assert all(counts["flagged"] == counts["n"] for counts in site["sets"].values())
    assert len(found["scans"]) == len(TEST) + len(SPOILED.split)
    assert all(why in scan["reason"] for scan in found["scans"])


def test_scans_of_patients_are_only_numbered() -> None:
    found = flags(phantom=False)
    assert found["scans"]
    assert all(scan["id"] is None for scan in found["scans"])
    assert "A0003" not in json.dumps(found)
    assert flags(phantom=True)["scans"][0]["id"] == "A0003-1"


def test_a_scan_among_phantoms_that_has_a_patients_name_is_only_numbered() -> None:
    names = tuple(f"images/DOE_JANE-MRN4711-{row}.dcm" for row in range(len(TEST)))
    found = flags(phantom=True, test=replace(TEST, ids=names, patients=names))
    assert [scan["id"] for scan in found["scans"]] == [None, None, "A0001-1", "A0002-1"]
    assert "DOE" not in json.dumps(found)


def test_pictures_are_capped_with_every_kind_in_turn_and_the_list_is_not() -> None:
    many = [(NO_CLASS, 0, 0.905 - row / 100) for row in range(20)]
    spoiled = NamedScans(written(*many), ("wrong-anatomy",) * 10 + ("empty",) * 10)
    found, pictures = find_flags(cohort_with(val=VALIDATION, test=TEST), model(), {"spoiled": spoiled})
    scans = [scan for scan in found["scans"] if scan["set"] == "spoiled"]
    assert len(scans) == 20
    shown = [scan for scan in scans if scan["picture"]]
    assert [scan["number"] for scan in shown] == [1, 2, 3, 11, 12, 13]
    for scan in shown:
        picture = pictures[scan["picture"]]
        assert picture.dtype == np.uint8
        assert picture.shape == (8, 8)
        # The uncertainty u is written in the second pixel, which is shown as (u / 4 + 1 / 2) * 255.
        assert picture[0, 1] == round((scan["uncertainty"] * 0.25 + 0.5) * 255)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A method with two evidential heads and one with softmax, each trained for real."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("rfeddis", "fedavg")}
    for name, folder in folders.items():
        simulate(made_up_cohort(val=24), made_up_study(name, rounds=2), folder, jobs=1)
    return folders


@pytest.mark.parametrize("method", ["rfeddis", "fedavg"])
def test_flags_of_trained_models_agree_with_what_the_models_say(runs: dict[str, Path], method: str) -> None:
    cohort, study = made_up_cohort(val=24), made_up_study(method, rounds=2)
    models = deployed_models(study, {name: runs[method] / "sites" / name for name in SITES})
    noise = replace(made_up_split(12, seed=7), images=5 * made_up_split(12, seed=8).images)
    held_out = {"noise": NamedScans(noise, ("noise",) * 12)}
    found, pictures = find_flags(cohort, models, held_out)
    assert list(found["sites"]) == list(SITES)
    for name, site in found["sites"].items():
        validation = np.sort(models[name].answer(cohort.sites[name].val).uncertainty.numpy())
        assert site["threshold"] == validation[22]  # 95 % of 24 are 22.8: the 23rd
        for what, split in ((OWN_TEST, cohort.sites[name].test), ("noise", noise)):
            answer = models[name].answer(split)
            above = set(np.flatnonzero(answer.uncertainty.numpy() > site["threshold"]) + 1)
            listed = [scan for scan in found["scans"] if (scan["site"], scan["set"]) == (name, what)]
            assert {scan["number"] for scan in listed} == above
            assert site["sets"][what]["flagged"] == len(above)
            for scan in listed:
                row = scan["number"] - 1
                assert scan["predicted"] == CLASSES[int(answer.probabilities[row].argmax())]
                assert (scan["global"] is not None) is (method == "rfeddis")
                if scan["local"]:
                    belief = answer.opinions["local"].belief[row]
                    assert scan["local"]["belief"] == float(belief.max())
    assert found["scans"], "nothing was flagged, so nothing was checked"
    again, same = find_flags(cohort, models, held_out)
    assert again == found
    assert all(np.array_equal(same[name], picture) for name, picture in pictures.items())


def test_a_site_that_deployed_nothing_is_left_out(runs: dict[str, Path]) -> None:
    study = made_up_study("fedavg", rounds=2)
    folders = {"alder": runs["fedavg"] / "sites" / "alder", "birch": runs["fedavg"] / "nowhere"}
    found, _ = find_flags(made_up_cohort(val=24), deployed_models(study, folders), {})
    assert list(found["sites"]) == ["alder"]
    assert found["sites"]["alder"]["auroc"] == {}
