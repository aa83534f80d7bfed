"""Whole runs under secure aggregation, with real training: the open run's model, and no number of a single site."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.site.liars import lying, rubbish
from tests.site.made_up_sites import made_up_study, same_bits
from tests.site.masked_runs import NAMES, Ended, Runs, cohort, masked_study, quick
from torch import Tensor

from crossward.federation.contract import Report
from crossward.federation.errors import SiteFailure
from crossward.federation.scopes import Scope, names_in, tensors_digest
from crossward.federation.storage import read_json, read_tensors
from crossward.methods.fdse import FDSE
from crossward.methods.finch import first_neighbour_groups
from crossward.privacy.secagg.ring import Ring
from crossward.privacy.secagg.settings import Settings
from crossward.site.declaration import Declaration
from crossward.site.evidence import KEPT
from crossward.site.inprocess import simulate
from crossward.site.messages import (
    BEGIN,
    CONTRIBUTE,
    EVALUATE,
    JOIN,
    KEYS,
    OK,
    ROSTER,
    SURVIVORS,
    TRAIN,
)
from crossward.site.participant import Participant
from crossward.site.release import Release
from crossward.site.troubles import Code, words

PLAIN = ("fedavg", "fedprox", "fedbn", "f2dc", "rfeddis")
STYLE, SEMANTIC = "style", "prototypes"


@pytest.fixture(autouse=True, scope="module")
def _quick() -> Iterator[None]:
    with quick():
        yield


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


def assert_close(
    found: Mapping[str, Any], expected: Mapping[str, Any], *, within: float = 1e-6, cut_off: float = 0.0
) -> None:
    """Every tensor off by no more than this part of its largest value, but for so many values that were cut off."""
    assert found.keys() == expected.keys()
    apart = {}
    for name in expected:
        one, other = (np.asarray(each[name], dtype=np.float64) for each in (found, expected))
        apart[name] = int((np.abs(one - other) > within * np.abs(other).max(initial=0.0)).sum())
    assert sum(apart.values()) <= cut_off, {name: count for name, count in apart.items() if count}


# the same model


@pytest.mark.parametrize("method", PLAIN)
def test_one_round_gives_the_open_runs_model(ran: Runs, method: str) -> None:
    study = masked_study(method)
    masked, plain = ran(study), ran(replace(study, masking=None))
    assert_close(masked.checkpoint, plain.checkpoint)
    start = study.coordinator(masked.folder / "unused", NAMES).state.tensors
    moved = [name for name in start if not torch.equal(plain.checkpoint[f"*/{name}"], start[name])]
    assert moved, "training changed nothing, so that any sum would do"
    # The same reports: what differs is only how they were added up.
    for key, report in plain.seen.reports.items():
        assert same_bits(dict(masked.seen.reports[key].update), dict(report.update))


@pytest.mark.parametrize("method", ["fedavg", "rfeddis"])
def test_the_record_says_of_all_sites_together_what_the_open_one_says_of_each(ran: Runs, method: str) -> None:
    study = masked_study(method)
    masked, plain = ran(study).result, ran(replace(study, masking=None)).result
    (entry,), (each,) = masked["rounds"], plain["rounds"]
    assert {name: {"status", "received"} >= set(facts) for name, facts in entry["sites"].items()} == dict.fromkeys(
        NAMES, True
    )
    # Every site saw as many images, and has as many to validate and to test on.
    for figure in ("loss", "train_accuracy", "val_accuracy", "val_accuracy_as_received"):
        mean = np.mean([each["sites"][name][figure] for name in NAMES])
        assert entry["sums"][figure] == pytest.approx(mean, rel=1e-6), figure
    assert (entry["secagg"]["sites"], entry["secagg"]["cut_off"]) == (list(NAMES), 0.0)
    tested = masked["privacy"]["test"]
    assert masked["privacy"]["secagg"] is True
    assert tested["n"] == sum(plain["sites"][name]["n_test"] for name in NAMES)
    right = sum(plain["sites"][name]["accuracy"] * plain["sites"][name]["n_test"] for name in NAMES)
    assert tested["accuracy"] == pytest.approx(right / tested["n"])
    assert masked["best_round"] == plain["best_round"] == 1


def with_a_liar(patch: pytest.MonkeyPatch, liar: str) -> None:
    """One site seals rubbish to all the others."""
    make = Release.__init__

    def begin_lying(self: Release, participant: Participant, **options: Any) -> None:
        make(self, participant, **options)
        if participant.name == liar:
            lying(self, liar, rubbish(NAMES))

    patch.setattr(Release, "__init__", begin_lying)


def test_the_record_and_the_log_name_who_is_at_fault_with_code_and_evidence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    liar = NAMES[1]
    with_a_liar(monkeypatch, liar)
    (entry,) = simulate(cohort(), masked_study("fedavg"), tmp_path / "out", jobs=1)["rounds"]
    facts = entry["sites"][liar]
    assert (facts["status"], facts["code"]) == ("failed", int(Code.DISPUTED))
    assert facts["reason"] == words(Code.DISPUTED, {"sites": 3})
    assert {entry["sites"][name]["status"] for name in NAMES if name != liar} == {"summed"}
    shown = {message.partition(KEPT)[2] for message in caplog.messages if KEPT in message}
    assert len(shown) >= 3
    assert all(read_json(Path(place))["site"] == liar for place in shown)


def test_the_record_has_the_code_of_a_site_that_could_not_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = Participant.train

    def fail(self: Participant, *given: Any) -> Report:
        if self.name == NAMES[1]:
            raise SiteFailure(site=self.name, round_number=1, cause="the loss is not finite", remedy="Train less")
        return train(self, *given)

    monkeypatch.setattr(Participant, "train", fail)
    (entry,) = simulate(cohort(), masked_study("fedavg"), tmp_path / "out", jobs=1)["rounds"]
    facts = entry["sites"][NAMES[1]]
    assert (facts["status"], facts["code"], facts["reason"]) == ("failed", int(Code.DIVERGED), words(Code.DIVERGED))


def test_fedcode_gives_the_same_prototypes_and_a_style_that_only_sites_can_read(ran: Runs) -> None:
    study = masked_study("fedcode")
    masked, plain = ran(study), ran(replace(study, masking=None))
    ours, theirs = masked.checkpoint, plain.checkpoint
    style = f"*/{STYLE}"
    assert_close({name: ours[name] for name in ours if name != style}, {n: theirs[n] for n in theirs if n != style})
    assert float(ours[f"*/{SEMANTIC}"].abs().sum()) > 0
    # The server's is turned: as long, and elsewhere.
    assert ours[style].norm(dim=1).tolist() == pytest.approx(theirs[style].norm(dim=1).tolist(), rel=1e-6)
    assert not np.allclose(ours[style], theirs[style], atol=0.05 * float(theirs[style].abs().max()))
    for name in NAMES:
        read = masked.seen.payloads[name, 1]
        assert_close({STYLE: read.tensors[STYLE]}, {STYLE: theirs[style]})
        assert read.plan is not None
        group = plain.seen.payloads[name, 1].plan.values[STYLE]["group"]
        assert np.array_equal(read.plan.values[STYLE]["group"], group)


def test_the_record_says_which_groups_and_prototypes_fedcode_would_have_had(ran: Runs) -> None:
    ended = ran(masked_study("fedcode"))
    (entry,), reports = ended.result["rounds"], [ended.seen.reports[name, 1] for name in NAMES]
    groups = first_neighbour_groups(np.stack([report.update[STYLE].reshape(-1).numpy() for report in reports]))
    holders = np.sum([report.tally["prototypes/present"] for report in reports], axis=0)
    expected = {
        "style/groups": 1.0,
        "style/plain_groups": float(len(set(groups.tolist()))),
        "prototypes/withheld": float(((holders > 0) & (holders < 3)).sum()),
    }
    assert entry["secagg"]["bounds"] == expected
    assert entry["secagg"]["sketch_error"] == {}
    assert ended.result["privacy"]["differences"]["bounds"] == expected


# FDSE: its plan is made of sketches, so the open computation is given the same one


@pytest.fixture(scope="module")
def fdse(ran: Runs) -> Ended:
    return ran(masked_study("fdse", rounds=2))  # type: ignore[no-any-return]


def mixed(fdse: Ended, number: int) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """Shared tensors and everybody's erasers after a round, from reports and plan by plain arithmetic (Eq. 8-9)."""
    study = masked_study("fdse", rounds=2)
    algebra = study.method.algebra(study.task, study.model())
    plan = fdse.seen.payloads[NAMES[0], number].plan
    assert plan is not None
    assert plan.cohort == NAMES
    reports = [fdse.seen.reports[name, number] for name in NAMES]
    before = study.coordinator(fdse.folder / "unused", NAMES).state.tensors
    if number > 1:
        before = dict(fdse.seen.payloads[NAMES[0], number - 1].tensors)
    shared: dict[str, Tensor] = {}
    own: dict[str, dict[str, Tensor]] = {name: {} for name in NAMES}
    blocks = {scope: [] for scope in ("shared", "personal")}
    for block, names in algebra.blocks().items():
        blocks[block.partition("/")[0]].append(names)
    for row, names in enumerate(blocks["shared"]):
        weights, length = plan.values["shared"]["weights"][row], plan.values["shared"]["length"][row]
        assert length == pytest.approx(np.mean([norm_of(report, names) for report in reports]), rel=1e-6)
        for name in names:
            units = [report.update[name].double() / norm_of(report, names) for report in reports]
            shared[name] = before[name] + length * sum(w * unit for w, unit in zip(weights, units, strict=True))
    for name in names_in(algebra.layout, Scope.BUFFER):
        shared[name] = before[name] + torch.stack([report.update[name].double() for report in reports]).mean(dim=0)
    for row, names in enumerate(blocks["personal"]):
        attention = plan.values["personal"]["attention"][row]
        for name in names:
            parts = torch.stack([report.update[name].double() for report in reports])
            for place, site in enumerate(NAMES):
                own[site][name] = torch.tensordot(torch.from_numpy(attention[place]), parts, dims=1)
    return shared, own


def norm_of(report: Report, names: tuple[str, ...]) -> float:
    return float(np.sqrt(sum(float(report.update[name].double().square().sum()) for name in names)))


@pytest.mark.parametrize("number", [1, 2])
def test_fdse_gives_what_an_open_computation_gives_with_the_same_plan(fdse: Ended, number: int) -> None:
    shared, own = mixed(fdse, number)
    # A range is public before the values are: one product in some hundred thousands may be outside, and is counted.
    cut_off = fdse.result["rounds"][number - 1]["secagg"]["cut_off"]
    assert cut_off <= 20
    for site in NAMES:
        read = fdse.seen.payloads[site, number].tensors
        assert_close({name: read[name] for name in shared}, shared, cut_off=cut_off)
        assert_close({name: read[name] for name in own[site]}, own[site], cut_off=cut_off)


def test_the_record_measures_what_fdse_s_sketches_are_off_by(fdse: Ended) -> None:
    """Half of how far the cosines of either half are apart; that it is the true error: test_masked_differences.py."""
    trained = [answer["cosines"] for task, _, answer in fdse.seen.answers if task == TRAIN]
    for entry, sketches in zip(fdse.result["rounds"], (trained[:4], trained[4:]), strict=True):
        measured = entry["secagg"]["sketch_error"]
        assert measured.keys() == {"shared/cosines", "shared/weights", "personal/cosines", "personal/attention"}
        for scope in ("shared", "personal"):
            apart = [
                np.dot(one[:256], other[:256]) / np.linalg.norm(one[:256]) / np.linalg.norm(other[:256])
                - np.dot(one[256:], other[256:]) / np.linalg.norm(one[256:]) / np.linalg.norm(other[256:])
                for block in sketches[0]
                if block.startswith(f"{scope}/")
                for one, other in combinations([each[block] for each in sketches], 2)
            ]
            assert measured[f"{scope}/cosines"] == pytest.approx(np.sqrt(np.mean(np.square(apart))) / 2)
        assert entry["secagg"]["bounds"] == {}
    found = fdse.result["privacy"]["differences"]
    assert found["capped"] == max(entry["secagg"]["capped"] for entry in fdse.result["rounds"])
    assert found["sketch_error"].keys() == measured.keys()


def test_every_site_has_erasers_of_its_own_and_the_server_can_read_none_of_them(fdse: Ended) -> None:
    _, own = mixed(fdse, 2)
    tensors, metadata = read_tensors(fdse.folder / "server" / "checkpoint.safetensors")
    assert len({tensors_digest({name: value.float() for name, value in own[site].items()}) for site in NAMES}) == 4
    slots = {key.partition("/")[0] for key in tensors}
    assert slots == {"*", "*sealed"}
    for site in NAMES:
        limits, _, parties, bits = json.loads(json.loads(metadata["sealed"])[site])
        words = tensors[f"*sealed/{site}"].numpy().view(np.uint32)
        flat = np.concatenate([own[site][name].numpy().reshape(-1) for name in own[site]])
        scale = np.concatenate([np.full(own[site][name].numel(), limits[name] * parties) for name in own[site]])
        size = len(flat)
        # As if there were no pads: what is found has nothing to do with the erasers of this or of any site.
        read = Ring(bits, parties).decode(words[:size], limit=1.0) * scale
        for other in NAMES:
            hers = np.concatenate([own[other][name].numpy().reshape(-1) for name in own[other]])
            assert abs(np.corrcoef(read / scale, hers / scale)[0, 1]) < 5 / np.sqrt(size)
        near = np.abs(read - flat) < 0.01 * scale
        assert near.mean() < 0.05


def test_the_server_gets_the_mean_of_erasers_where_a_study_asks_for_it(ran: Runs) -> None:
    ended = ran(made_up_study(FDSE(newcomers=True), rounds=1).masked(Settings()))
    tensors = ended.checkpoint
    names = [key.partition("/")[2] for key in tensors if key.startswith("*mean/")]
    assert names
    own = [ended.seen.payloads[site, 1].tensors for site in NAMES]
    mean = {name: torch.stack([each[name].double() for each in own]).mean(dim=0) for name in names}
    assert_close({name: tensors[f"*mean/{name}"] for name in names}, mean)


def test_what_the_server_says_it_sent_is_not_what_a_site_has(fdse: Ended) -> None:
    result = fdse.result
    assert set(result["personal"]) == set(NAMES)
    assert all(result["personal"][name] != result["sites"][name]["personal"] for name in NAMES)
    assert len({result["sites"][name]["personal"] for name in NAMES}) == 4


def test_a_method_that_sends_nothing_has_its_counts_summed(ran: Runs) -> None:
    ended = ran(masked_study("local"))
    assert ended.result["rounds"][0]["sums"]["loss"] > 0
    assert ended.result["privacy"]["test"]["n"] == 4 * 9


# what left


@pytest.mark.parametrize(("method", "rounds"), [*((method, 1) for method in (*PLAIN, "fedcode")), ("fdse", 2)])
def test_every_answer_of_a_whole_run_may_leave(ran: Runs, method: str, rounds: int) -> None:
    study = masked_study(method, rounds=rounds)
    declaration, answers = Declaration(study), ran(study).seen.answers
    for task, message, answer in answers:
        rebuilt = declaration.rebuild(task, {"code": OK, **answer}, message)
        np.testing.assert_equal(rebuilt, {"code": OK, **answer})
    answered = {task for task, _, _ in answers}
    assert answered == {JOIN, ROSTER, KEYS, TRAIN, EVALUATE, BEGIN, CONTRIBUTE, SURVIVORS}
    # Floats leave as sketches and turned vectors only.
    floats = {task for task, _, answer in answers for value in leaves(answer) if value.dtype.kind == "f"}
    assert floats == ({TRAIN} if method in ("fdse", "fedcode") else set())


def leaves(answer: Any) -> list[np.ndarray[Any, Any]]:
    if isinstance(answer, Mapping):
        return [leaf for part in answer.values() for leaf in leaves(part)]
    return [np.asarray(answer)]
