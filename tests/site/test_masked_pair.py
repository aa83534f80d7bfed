"""Two hospitals: each knows the other's part from any sum, so both have to allow it, and the server learns no part."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.site.made_up_sites import cohort_of, made_up_site, made_up_study
from tests.site.masked_runs import quick

from crossward.cli.study_options import masked
from crossward.federation.errors import BadInput, CrosswardError
from crossward.federation.storage import read_tensors
from crossward.privacy.secagg.settings import Settings
from crossward.site.inprocess import simulate
from crossward.site.policy import Policy
from crossward.site.troubles import Code, Refusal

TWO = cohort_of({name: made_up_site(name, number=number) for number, name in enumerate(("alder", "birch"))})


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "fedbn", "f2dc", "rfeddis"])
def test_a_pair_that_is_allowed_gets_the_open_runs_model(tmp_path: Path, method: str) -> None:
    study = masked(made_up_study(method, rounds=1), min_sum=2)
    with quick():
        for name, each in (("masked", study), ("open", replace(study, masking=None))):
            simulate(TWO, each, tmp_path / name, jobs=1)
    found, expected = (
        read_tensors(tmp_path / name / "server" / "checkpoint.safetensors")[0] for name in ("masked", "open")
    )
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name] - tensor).abs().max() <= 1e-6 * tensor.abs().max(), name


def test_a_pair_that_nobody_asked_for_has_no_sum(tmp_path: Path) -> None:
    with quick(), pytest.raises(CrosswardError, match="3"):
        simulate(TWO, masked(made_up_study("fedavg", rounds=1)), tmp_path / "run", jobs=1)
    assert not list((tmp_path / "run").rglob("outbox/*.safetensors")), "nothing is trained for a sum that cannot be"


def test_a_site_that_does_not_allow_it_refuses_the_job(tmp_path: Path) -> None:
    masking = masked(made_up_study("fedavg"), min_sum=2).masking
    Policy(data_root=None, state_root=tmp_path, minimum_sites=2).check_masking(masking)
    with pytest.raises(Refusal) as caught:
        Policy(data_root=None, state_root=tmp_path).check_masking(masking)
    assert (caught.value.code, caught.value.numbers) == (Code.SMALL_SUMS, {"sites": 2, "needed": 3})


@pytest.mark.parametrize(("method", "fewest"), [("fedcode", 3), ("fdse", 4)])
def test_methods_that_show_more_than_sums_take_more_sites(method: str, fewest: int) -> None:
    study = made_up_study(method)
    stricter = masked(study, min_sum=2).masking
    assert stricter is not None
    assert stricter.fewest == fewest
    pair = Settings(min_sites=2, allow_pair=True)
    with pytest.raises(BadInput, match=f"at least {fewest}"):
        replace(study, method=study.method.under_masks(2), masking=pair)
