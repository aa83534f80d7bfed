from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from crossward.cli import audit_run
from crossward.cli.audit_rounds import recovered_labels
from crossward.cli.audit_run import AuditedRun
from crossward.imaging.data import SiteData
from crossward.privacy.audit import small
from crossward.privacy.audit.findings import Findings
from crossward.privacy.audit.inversion import Attack
from crossward.privacy.dp.accounting import Budget
from crossward.privacy.dp.ledger import Ledger
from crossward.privacy.dp.lines import Entry
from crossward.privacy.dp.noise import NoiseSource
from crossward.privacy.dp.settings import Privacy
from crossward.site.handover import HANDOVER, Handover, read_handover, write_handover
from crossward.site.inprocess import simulate
from crossward.site.record_protection import prices_of
from tests.cli.conftest import SMALL, Command, Outcome
from tests.site.made_up_sites import cohort_of, made_up_site, made_up_study

PRIVATE = ("--method", "fedavg", "--dp", 8, "--no-diagnostics", *SMALL)


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what is tried on a run, and little of it; the built-in set-up has tests of its own."""
    monkeypatch.setattr(small, "audit_small", lambda size, progress: Findings())
    effort = audit_run.Effort(attack=Attack(restarts=1, sweeps=1), steps=4, canaries=24)
    monkeypatch.setattr(audit_run, "QUICK", effort)


def private_run(crossward: Command, phantoms: Path, out: Path) -> None:
    done = crossward("simulate", "--data", phantoms, "--out", out, *PRIVATE)
    assert done.code == 0, done.err


def audited(crossward: Command, *words: object) -> Outcome:
    return crossward("audit", *words, "--quick")


def test_the_built_in_audit_holds_and_says_so(crossward: Command, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    done = audited(crossward, "--out", tmp_path / "audit", "--json")
    assert done.code == 0, done.err
    assert torch.get_num_threads() == threads
    facts = json.loads(done.out)
    assert facts == json.loads((tmp_path / "audit" / "audit.json").read_text())
    assert facts["passed"] is True
    assert facts["phantom"] is True
    settings = {row["setting"] for row in facts["findings"] if row["attack"] == "gradient inversion"}
    assert settings == {"unprotected", "differential privacy", "secure aggregation", "both"}
    assert "every rule holds" in done.err
    page = (tmp_path / "audit" / "audit.html").read_text()
    assert page.count("<img") == 5
    assert "real patients" not in page
    assert {path.name for path in (tmp_path / "audit").glob("*.png")} == {
        f"1-{name}.png" for name in ("original", "none", "dp", "secagg", "both")
    }


def test_a_private_run_is_attacked_on_its_own_model_and_its_ledgers_are_read(
    crossward: Command, phantoms: Path, tmp_path: Path, little: None
) -> None:
    private_run(crossward, phantoms, tmp_path / "run")
    done = audited(crossward, tmp_path / "run", "--data", phantoms, "--out", tmp_path / "audit", "--json")
    assert done.code == 0, done.err
    rows = json.loads(done.out)["findings"]
    attacks = [row["attack"] for row in rows]
    assert attacks.count("check: ledger") == 2
    assert attacks.count("gradient inversion") == attacks.count("epsilon at least") == 4
    assert {"membership", "check: noise", "check: sampler", "check: clipping"} <= set(attacks)
    assert all(row["passed"] is not False for row in rows)


def test_every_model_that_a_run_has_kept_is_attacked(
    crossward: Command, phantoms: Path, tmp_path: Path, little: None
) -> None:
    """Reports are gone with the last round; the models of the best and of the last one are kept."""
    run = tmp_path / "run"
    words = ("simulate", "--method", "fedavg", "--data", phantoms, "--out", run, "--no-diagnostics", *SMALL)
    assert crossward(*words).code == 0
    assert list(run.glob("sites/*/outbox/*")) == []
    best = read_handover(run)
    # As if the first round had been the best one.
    first = replace(best.study.method.start(best.study.task, best.study.model()), round_number=1)
    write_handover(run / "server" / HANDOVER, best.study, first)
    done = audited(crossward, run, "--data", phantoms, "--out", tmp_path / "audit", "--json")
    assert done.code == 0, done.err
    rows = json.loads(done.out)["findings"]
    told = [row["words"] for row in rows if row["attack"] == "membership"]
    assert ["model of round 1" in each for each in told] == [True, False]
    assert "model of round 2" in told[1]
    labels = [row for row in rows if row["attack"] == "labels of a sum"]
    assert [row["unit"] for row in labels] == ["%", "%"]
    assert all("without the model" in row["words"] for row in labels)
    assert "labels of a sum" in (tmp_path / "audit" / "audit.html").read_text()


def test_labels_are_found_in_what_a_shared_model_learnt(tmp_path: Path) -> None:
    """Nine images of ten are of one class."""
    study = made_up_study("fedavg", rounds=2)
    cohort = cohort_of({name: uneven(made_up_site(name), of=1) for name in ("alder", "birch")})
    simulate(cohort, study, tmp_path / "run", jobs=1)
    found = recovered_labels(study, cohort, read_handover(tmp_path / "run").tensors, 2)
    assert found is not None
    assert found.blind < 0.5
    assert found.share > 0.8
    # Where classifiers stay at their sites, no bias of theirs is there to look at.
    local = made_up_study("fedcode", rounds=1)
    assert recovered_labels(local, cohort, local.method.start(local.task, local.model()).tensors, 1) is None


def uneven(site: SiteData, *, of: int) -> SiteData:
    labels = torch.full_like(site.train.labels, of)
    labels[: len(labels) // 10] = 0
    return replace(site, train=replace(site.train, labels=labels))


def test_a_reservation_that_was_skipped_fails_the_audit(
    crossward: Command, phantoms: Path, tmp_path: Path, little: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutant "ledger skipped": the second round is trained without a word in the ledger."""
    reserve = Ledger.reserve

    def skipping(self: Ledger, entries: Sequence[Entry], *, budget: Budget) -> None:
        if not any((entry.round, entry.what) == (2, "steps") for entry in entries):
            reserve(self, entries, budget=budget)

    with monkeypatch.context() as patched:
        patched.setattr(Ledger, "reserve", skipping)
        private_run(crossward, phantoms, tmp_path / "run")
    done = audited(crossward, tmp_path / "run", "--data", phantoms, "--out", tmp_path / "audit")
    assert done.code == 1
    assert "round 2 used steps" in done.out
    assert "FAIL" in (tmp_path / "audit" / "audit.html").read_text()


def test_a_ledger_with_other_noise_than_the_runs_fails_the_audit(
    crossward: Command, phantoms: Path, tmp_path: Path, little: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve = Ledger.reserve

    def boasting(self: Ledger, entries: Sequence[Entry], *, budget: Budget) -> None:
        told = [replace(each, spending=replace(each.spending, noise=10 * each.spending.noise)) for each in entries]
        reserve(self, told, budget=budget)

    with monkeypatch.context() as patched:
        patched.setattr(Ledger, "reserve", boasting)
        private_run(crossward, phantoms, tmp_path / "run")
    done = audited(crossward, tmp_path / "run", "--data", phantoms, "--out", tmp_path / "audit")
    assert done.code == 1
    assert "and the run's own is" in done.out


@pytest.mark.parametrize("unit", ["patient", "image"])
def test_noise_is_that_of_the_unit_that_was_hidden(unit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a site with two images of each patient there are twice as many images to draw from."""
    study = made_up_study("fedavg", rounds=2).private(Privacy(epsilon=2.0, unit=unit))
    site = made_up_site("alder")
    pairs = replace(site.train, patients=tuple(f"p{row // 2}" for row in range(len(site.train))))
    cohort = cohort_of({"alder": replace(site, train=pairs)})
    seen: list[float] = []
    noisy = AuditedRun._noisy

    def noted(self: AuditedRun, gradient: list[torch.Tensor], noise: float) -> list[torch.Tensor]:
        seen.append(noise)
        return noisy(self, gradient, noise)

    monkeypatch.setattr(AuditedRun, "_noisy", noted)
    effort = audit_run.Effort(attack=Attack(restarts=1, sweeps=1), steps=4, canaries=24)
    AuditedRun(tmp_path, Handover(study, 1, {}), cohort, effort)._inversion()
    units = len(site.train) // (2 if unit == "patient" else 1)
    assert study.privacy is not None
    prices = prices_of(study.privacy, study.training, units=units, rounds=2, releases=False)
    assert set(seen) == {prices.step}


def test_noise_that_is_off_fails_the_audit(crossward: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NoiseSource, "add_to", lambda self, tensors, *, scale: None)
    monkeypatch.setattr(small, "invert_updates", lambda size, private: Findings())
    done = audited(crossward, "--out", tmp_path / "audit")
    assert done.code == 1
    assert "there is no noise at all" in done.out
    assert "rules broken" in done.out


def test_a_run_without_protection_is_attacked_for_comparison(
    crossward: Command, phantoms: Path, tmp_path: Path, little: None
) -> None:
    run = tmp_path / "run"
    words = ("simulate", "--method", "rfeddis", "--data", phantoms, "--out", run, "--no-diagnostics", *SMALL)
    assert crossward(*words).code == 0
    done = audited(crossward, run, "--data", phantoms, "--out", tmp_path / "audit", "--json")
    assert done.code == 0, done.err
    rows = json.loads(done.out)["findings"]
    assert not any(row["attack"].startswith("check") for row in rows)
    told = [row["words"] for row in rows if row["setting"] == "both" and row["attack"] == "gradient inversion"]
    assert "as if it had been run with --dp 8" in told[0]


def test_bad_input_is_one_clear_line(
    crossward: Command, phantoms: Path, own_phantoms: Path, tmp_path: Path, little: None
) -> None:
    out = tmp_path / "audit"
    alone = audited(crossward, tmp_path, "--out", out)
    assert alone.code == 2
    assert "both RUN and --data" in alone.err
    nothing = audited(crossward, tmp_path, "--data", phantoms, "--out", out)
    assert nothing.code == 2
    assert "not there" in nothing.err
    private_run(crossward, phantoms, tmp_path / "run")
    (own_phantoms / "hospital-b").rename(own_phantoms / "hospital-x")
    other = audited(crossward, tmp_path / "run", "--data", own_phantoms, "--out", out)
    assert other.code == 2
    assert not out.exists()
    assert "crossward audit runs/private --data phantoms" in crossward("audit", "--help").out.replace("\n ", " ")
