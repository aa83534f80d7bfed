"""Faults of the wiring that were found late."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from crossward.federation.contract import Vector
from crossward.federation.errors import BadInput, PrivacyRefusal
from crossward.methods import create
from crossward.methods.fdse import FDSE, SimilarityAware
from crossward.privacy.secagg.settings import Settings
from crossward.privacy.sums import MaskedAlgebra
from crossward.site import member as member_module
from crossward.site import messages
from crossward.site.declaration import Declaration
from crossward.site.member import Member
from crossward.site.messages import JOIN
from crossward.site.policy import Policy
from crossward.site.release import Credentials
from crossward.site.troubles import Code, Refusal
from tests.privacy.federation import authority, identity
from tests.privacy.observer import PRIME, _rank
from tests.site.made_up_sites import CPU, made_up_cohort, made_up_study

ME = "alder"


def test_a_server_cannot_begin_the_same_study_anew_under_another_name(tmp_path: Path) -> None:
    """Same start, same images, same chances: the sums of two runs with other sites differ by one site's update."""
    study = made_up_study().masked(Settings())
    policy = Policy(data_root=tmp_path, state_root=tmp_path / "state")
    site = Member(
        ME,
        study.options(),
        policy,
        job="job-1",
        credentials=lambda: Credentials(identity(ME), authority().roots),
    )
    remembered = []
    try:
        with (
            patch.object(Member, "_load", lambda self, study: made_up_cohort([ME])),
            patch.object(member_module.Device, "best", staticmethod(lambda: CPU)),
        ):
            for run in ("run-1", "run-2"):
                asked = {**messages.address(run=run, study=study.digest(), round_number=0), "agreement": 1}
                if site.answer(JOIN, asked)["code"] == messages.OK and site._release is not None:
                    remembered.append(site._release._study)
    finally:
        site.close()
    assert len(remembered) == 2
    assert len(set(remembered)) == 1


def test_another_seed_is_another_study_and_another_quorum_is_not() -> None:
    """What decides the update decides under which name its masks are remembered."""
    study = made_up_study().masked(Settings())
    fewer = replace(study, quorum=3, participation=0.5, masking=Settings(min_sites=4))
    other = replace(study, training=replace(study.training, seed=study.training.seed + 1))
    assert fewer.trained_digest() == study.trained_digest() != other.trained_digest()


def test_a_job_that_trusts_every_site_is_refused() -> None:
    """Without a colluding site in its reckoning, two of three sites open a secret: the server and one of them."""
    with pytest.raises(Refusal):
        Policy(data_root=None, state_root=Path("state")).check_masking(Settings(colluders=0))


def test_under_masks_no_refusal_tells_how_many_images_a_site_has() -> None:
    """With jobs that name other classes each time, the counts were a site's whole histogram."""
    declared = Declaration(made_up_study().masked(Settings()))
    with pytest.raises(PrivacyRefusal):
        declared.rebuild(JOIN, {"code": int(Code.LABELS), "numbers": {"unknown": 3.0, "images": 120.0}})


def test_a_server_and_a_site_together_learn_nobody_s_personal_tensors() -> None:
    """A mixture of two others for the colluding site, and a mean in which these two weigh the same: the fourth is left.

    The plan is one that sites accept, so the server gets the mean only where a study says so.
    """
    mixed = np.array(
        [
            [1 / 3, 1 / 3, 1 / 3, 0.0],
            [0.25, 0.25, 0.25, 0.25],
            [0.25, 0.25, 0.25, 0.25],
            [0.25, 0.25, 0.25, 0.25],
        ]
    )
    rule = SimilarityAware({"own": ["own"]}, tau=0.5, others=2)
    rule.check_plan({"attention": mixed[None], "capped": np.zeros(1)}, 4)
    assert not _isolated([mixed[0]], honest=(1, 2, 3))
    assert _isolated([mixed[0], mixed.mean(axis=0)], honest=(1, 2, 3)) == [3]
    for newcomers in (False, True):
        study = made_up_study(FDSE(newcomers=newcomers)).masked(Settings())
        masked = MaskedAlgebra(Declaration(study).algebra, bits=32)
        assert masked.personal
        assert masked.averaged == (masked.personal if newcomers else [])


def test_two_sites_that_work_together_learn_a_third_s_personal_tensors_so_fdse_reckons_with_one() -> None:
    """A mixture of three others for one of them, and of two of these for the other: the difference is the third."""
    mixed = np.full((5, 5), 1 / 5)
    mixed[0] = [0.4, 0.0, 0.2, 0.2, 0.2]
    mixed[1] = [0.2, 0.4, 0.2, 0.2, 0.0]
    for others in (2, 3):
        rule = SimilarityAware({"own": ["own"]}, tau=0.5, others=others)
        rule.check_plan({"attention": mixed[None], "capped": np.zeros(1)}, 5)
    assert not _isolated([mixed[0]], honest=(2, 3, 4))
    assert _isolated([mixed[0], mixed[1]], honest=(2, 3, 4)) == [4]
    with pytest.raises(BadInput, match=r"fdse .*with 1 hospital.* not 2"):
        made_up_study("fdse").masked(Settings(colluders=2))


def test_prototypes_of_three_honest_sites_and_two_others_take_five() -> None:
    """FedCode's bounds follow from those who may work together: beside them a mean is of two sites at least."""
    study = made_up_study("fedcode").masked(Settings(colluders=3))
    assert (study.masking, study.method) == (
        replace(Settings(colluders=3), min_sites=5, rounds=study.task.rounds + 1),
        create("fedcode", holders=5, members=5),
    )


def _isolated(rows: Sequence[Vector], *, honest: Sequence[int]) -> list[int]:
    """The honest sites of which some combination of what is known shows something alone."""
    known = [{site: _field(row[site]) for site in honest if row[site]} for row in rows]
    return [
        site
        for site in honest
        if _rank([{each: value for each, value in row.items() if each != site} for row in known]) < _rank(known)
    ]


def _field(value: float) -> int:
    exact = Fraction(value).limit_denominator(1000)
    return exact.numerator * pow(exact.denominator, -1, PRIME) % PRIME
