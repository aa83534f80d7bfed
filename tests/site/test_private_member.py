"""A member of a run under differential privacy: what it refuses before it looks at images, and what a crash costs."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.imaging.prepared_sites import SITE, Hospital
from tests.site.made_up_sites import CLASSES, SITES, made_up_study
from tests.site.masked import RUN, authority, identity
from tests.site.packs import write_packs
from torch import Tensor

from crossward.federation.contract import Payload
from crossward.federation.errors import PrivacyRefusal
from crossward.methods.base import Method
from crossward.privacy.dp import accounting
from crossward.privacy.dp.accounting import epsilon
from crossward.privacy.dp.ledger import Ledger, key_of
from crossward.privacy.dp.lines import Entry
from crossward.privacy.dp.settings import UNITS, Privacy, Unit
from crossward.privacy.dp.signing import verifier
from crossward.privacy.secagg.throwaway import Authority
from crossward.site import messages, participant
from crossward.site.declaration import Declaration
from crossward.site.journal import read_journal
from crossward.site.member import Member
from crossward.site.messages import EVALUATE, FINISH, JOIN, OK, SCORES, TRAIN, Message
from crossward.site.participant import Participant
from crossward.site.policy import Policy
from crossward.site.protection import certified_ledger
from crossward.site.release import Credentials
from crossward.site.study import Study
from crossward.site.troubles import Code, words

ME = SITES[0]
OPEN = made_up_study("fedavg", rounds=2)
PRIVATE = OPEN.private(Privacy(epsilon=4.0))


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_packs(tmp_path_factory.mktemp("packs") / "data")


@pytest.fixture
def without_validation(tmp_path: Path, packs: Path) -> Path:
    """The same images, with those to validate on among those to train on."""
    arrays = dict(np.load(packs / f"{ME}.npz"))
    arrays["split"][arrays["split"] == 1] = 0
    folder = tmp_path / "without-validation"
    folder.mkdir()
    np.savez(folder / f"{ME}.npz", **arrays)
    return folder


@pytest.fixture
def made(tmp_path: Path, packs: Path) -> Iterator[Callable[..., Member]]:
    made: list[Member] = []

    def make(study: Study = PRIVATE, *, certified: Any = lambda: credentials(), **policy: Any) -> Member:
        usual = {"data_root": packs, "secure_aggregation": False, "minimum_cell": 1}
        rules = Policy(state_root=tmp_path / "state", **{**usual, **policy})
        made.append(Member(ME, study.options(), rules, patience=0.0, job="job-1", credentials=certified))
        return made[-1]

    yield make
    for member in made:
        member.close()


def credentials() -> Credentials:
    return Credentials(identity(ME), authority().roots)


def addressed(study: Study, number: int = 0, **parts: Any) -> Message:
    return messages.address(run=RUN, study=study.digest(), round_number=number) | parts


def start(study: Study) -> dict[str, Tensor]:
    return dict(study.method.start(study.task, study.model()).tensors)


def to_train(study: Study, number: int = 1) -> Message:
    model = {name: tensor + 0.01 * (number - 1) for name, tensor in start(study).items()}
    return addressed(study, number, **messages.pack_payload(Payload(number - 1, model)))


def entries(state: Path) -> tuple[Entry, ...]:
    return certified_ledger(state, site=ME, identity=identity(ME)).entries()


def trained(member: Member, study: Study, number: int = 1) -> Message:
    """One round in a process of its own, as far as the site's files can tell."""
    try:
        return member.answer(TRAIN, to_train(study, number))
    finally:
        member.close()


def refused(answer: Message) -> tuple[Code, dict[str, float]]:
    assert answer.keys() == {"code", "numbers"}
    return Code(answer["code"]), dict(answer["numbers"])


# before any image is read


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize("task", [JOIN, TRAIN, FINISH])
def test_a_job_without_noise_is_refused_by_a_site_that_demands_it(made: Any, tmp_path: Path, task: str) -> None:
    answer = made(OPEN, max_epsilon=4.0).answer(task, to_train(OPEN))
    assert refused(answer) == (Code.NO_PRIVACY, {"allowed": 4.0})
    assert "max_epsilon in the site's local/privacy.json" in words(answer["code"], answer["numbers"])
    assert not (tmp_path / "state").exists()


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize(
    ("asked", "rule", "expected"),
    [
        (Privacy(epsilon=4.5), {"max_epsilon": 4.0}, (Code.WEAK_PRIVACY, {"epsilon": 4.5, "allowed": 4.0})),
        (
            Privacy(epsilon=1.0, delta=1e-3),
            {"max_epsilon": 4.0, "max_delta": 1e-5},
            (Code.LARGE_DELTA, {"delta": 1e-3, "allowed": 1e-5}),
        ),
        (
            Privacy(epsilon=8.0, delta=0.05),
            {"min_noise": 1.0, "max_delta": 1e-6},
            (Code.LARGE_DELTA, {"delta": 0.05, "allowed": 1e-6}),
        ),
        (Privacy(noise=0.5), {"min_noise": 1.0}, (Code.LITTLE_NOISE, {"noise": 0.5, "allowed": 1.0})),
    ],
)
def test_a_job_that_asks_for_less_protection_is_refused_with_the_sites_rule(
    made: Any, asked: Privacy, rule: dict[str, float], expected: tuple[Code, dict[str, float]]
) -> None:
    study = OPEN.private(asked)
    answer = made(study, **rule).answer(JOIN, addressed(study))
    assert refused(answer) == expected
    assert Declaration(study).rebuild(JOIN, answer) == answer


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize(
    ("method", "privacy", "payloads", "joins"),
    [
        ("fedavg", None, ["update", "counts"], True),
        ("fedavg", None, ["personal", "prototypes", "counts"], False),
        ("fedavg", None, ["update", "personal", "prototypes"], False),
        ("fedavg", Privacy(epsilon=4.0), ["update"], False),
        ("fedavg", Privacy(epsilon=4.0, unit="site"), ["update"], True),
        ("fdse", None, ["update", "counts"], False),
        ("fdse", None, ["update", "personal", "counts"], True),
        ("fedcode", Privacy(epsilon=4.0), ["update", "counts"], False),
        ("fedcode", Privacy(epsilon=4.0), ["update", "prototypes", "counts"], True),
        ("local", None, ["counts"], True),
        ("local", None, [], False),
    ],
)
def test_a_job_whose_method_needs_what_the_site_keeps_is_refused(
    made: Any, method: str, privacy: Privacy | None, payloads: list[str], joins: bool
) -> None:
    study = made_up_study(method, rounds=2)
    study = study.private(privacy) if privacy else study
    unit = privacy.unit if privacy else "patient"
    answer = made(study, payloads=tuple(payloads), privacy_unit=unit).answer(JOIN, addressed(study))
    # What passes goes on to the images, which cannot be read here.
    assert refused(answer) == (Code.INTERNAL if joins else Code.KEPT_PAYLOAD, {})
    assert "payloads in the site's local/privacy.json" in words(Code.KEPT_PAYLOAD, {})


def test_a_job_within_the_rules_joins(made: Any) -> None:
    assert made(PRIVATE, max_epsilon=4.0, max_delta=1e-5, min_noise=1.0).answer(JOIN, addressed(PRIVATE)) == {
        "code": OK
    }


def test_noise_that_is_worked_out_from_epsilon_is_held_against_the_rule_too(made: Any, tmp_path: Path) -> None:
    answer = made(PRIVATE, max_epsilon=4.0, min_noise=3.0).answer(TRAIN, to_train(PRIVATE))
    # Not how much it would be: it says how many patients there are.
    assert refused(answer) == (Code.LARGE_EPSILON, {"allowed": 3.0})
    assert not (tmp_path / "state" / "ledger").exists()


@pytest.mark.usefixtures("unread")
def test_a_rule_about_noise_is_not_kept_by_a_job_without_any(made: Any) -> None:
    answer = made(OPEN, min_noise=3.0).answer(JOIN, addressed(OPEN))
    assert refused(answer) == (Code.LITTLE_NOISE, {"noise": 0.0, "allowed": 3.0})


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize("wanted", UNITS)
@pytest.mark.parametrize("unit", UNITS)
def test_a_job_that_hides_another_unit_than_the_sites_is_refused(made: Any, unit: Unit, wanted: str) -> None:
    study = OPEN.private(Privacy(epsilon=4.0, unit=unit))
    code = Code(made(study, privacy_unit=wanted).answer(JOIN, addressed(study))["code"])
    # What passes goes on to the images, which cannot be read here.
    assert code is (Code.INTERNAL if unit == wanted else Code.OTHER_UNIT)


def test_the_unit_is_a_patient_unless_the_site_says_otherwise(made: Any) -> None:
    study = OPEN.private(Privacy(epsilon=4.0, unit="image"))
    assert refused(made(study).answer(JOIN, addressed(study))) == (Code.OTHER_UNIT, {})
    assert "privacy_unit in the site's local/privacy.json" in words(Code.OTHER_UNIT, {})


def test_a_ledger_that_counts_another_unit_is_not_gone_on_with(made: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert trained(made(), PRIVATE)["code"] == OK
    study = OPEN.private(Privacy(epsilon=4.0, unit="site"))
    answer = made(study, privacy_unit="site").answer(JOIN, addressed(study, run="run-2"))
    assert refused(answer) == (Code.OTHER_UNIT, {})
    # Another ledger of the same patients would begin at nothing spent.
    assert "another state" not in caplog.text
    assert "privacy officer" in caplog.text
    assert "privacy officer" in words(Code.OTHER_UNIT, {})


def test_a_job_with_other_classes_hears_no_number_of_images(made: Any, tmp_path: Path) -> None:
    """Nobody pays for the answer: with other classes each time the site's labels could be counted."""
    study = replace(PRIVATE, task=replace(PRIVATE.task, classes=("clear", "nodule", "other")))
    answer = made(study).answer(JOIN, addressed(study))
    assert refused(answer) == (Code.LABELS, {})
    assert not (tmp_path / "state" / "ledger").exists()


@pytest.mark.parametrize("unit", UNITS)
def test_nor_does_one_leave_whoever_would_tell_it(unit: Unit) -> None:
    answer = {"code": int(Code.LABELS), "numbers": {"unknown": 3.0, "images": 40.0}}
    for study in (OPEN, OPEN.private(Privacy(epsilon=4.0, unit=unit))):
        with pytest.raises(PrivacyRefusal, match="unknown"):
            Declaration(study).rebuild(JOIN, answer)


@pytest.mark.usefixtures("unread")
def test_without_a_certificate_nobody_would_vouch_for_the_ledger(made: Any) -> None:
    answer = made(certified=None).answer(JOIN, addressed(PRIVATE))
    assert refused(answer) == (Code.NO_CERTIFICATE, {})


# pictures that one patient more would change all of

NYUL = "transforms:\n  default:\n    - nyul: {landmarks: [1, 50, 99]}\n"
HISTOGRAM = "transforms:\n  default:\n    - histogram\n"
AUGMENT = "augment:\n  default:\n    - noise: {most: 0.1}\n    - gamma\n"
GIVEN = (
    "transforms:\n  default:\n    - nyul: {landmarks: [1, 50, 99], scale: [0, 0.4, 1]}\n"
    "augment:\n  default:\n    - noise: {most: 0.1}\n"
)
BY_PICTURE = "transforms:\n  default:\n    - percentile\n    - zscore\n    - denoise\n    - square\n"


@pytest.fixture
def prepared(tmp_path: Path) -> Callable[[str], Path]:
    def make(rules: str) -> Path:
        hospital = Hospital(tmp_path / "hospital").films(40, labels=CLASSES)
        hospital.rules(SITE + rules)
        hospital.prepare()
        return hospital.folder

    return make


@pytest.mark.parametrize("unit", ["patient", "image"])
@pytest.mark.parametrize(("rules", "named"), [(NYUL, "nyul"), (HISTOGRAM, "histogram"), (AUGMENT, "gamma")])
def test_pictures_made_by_what_was_learned_from_all_are_refused_before_anything_is_spent(
    made: Any, prepared: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, rules: str, named: str, unit: Unit
) -> None:
    study = OPEN.private(Privacy(noise=1.0, unit=unit))
    answer = made(study, data_root=prepared(rules), privacy_unit=unit).answer(TRAIN, to_train(study))
    assert refused(answer) == (Code.LEARNED_PICTURES, {})
    assert not (tmp_path / "state" / "ledger").exists()
    assert f"'{named}'" in caplog.text
    assert "site.yaml" in words(Code.LEARNED_PICTURES, {})


@pytest.mark.parametrize("rules", [GIVEN, BY_PICTURE])
def test_pictures_made_one_by_one_or_by_given_numbers_are_trained_on(made: Any, prepared: Any, rules: str) -> None:
    study = OPEN.private(Privacy(noise=1.0))
    assert made(study, data_root=prepared(rules)).answer(TRAIN, to_train(study))["code"] == OK


def test_where_the_site_is_hidden_as_a_whole_it_may_learn_from_all_its_images(made: Any, prepared: Any) -> None:
    study = OPEN.private(Privacy(noise=1.0, unit="site"))
    answer = made(study, data_root=prepared(NYUL), privacy_unit="site").answer(TRAIN, to_train(study))
    assert answer["code"] == OK


# the ledger of all jobs


def test_jobs_share_the_ledger_and_what_is_left_of_it_is_told_at_the_site_alone(
    made: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With --dp-noise epsilon follows from the number of patients: 200 and 201 are told apart by two decimals."""
    first = made(max_epsilon=4.2)
    assert first.answer(TRAIN, to_train(PRIVATE))["code"] == OK
    first.close()
    other = replace(PRIVATE, training=replace(PRIVATE.training, seed=1))
    # It began when the site allowed more.
    begun = made(other, max_epsilon=9.0)
    assert begun.answer(TRAIN, {**to_train(other), "run": "run-2"})["code"] == OK
    begun.close()
    spent = epsilon([entry.spending for entry in entries(tmp_path / "state")], delta=1e-5)
    second = made(other, max_epsilon=4.2)
    message = {**to_train(other, 2), "run": "run-2"}
    assert refused(second.answer(TRAIN, message)) == (Code.BUDGET, {"limit": 4.2})
    assert f"{4.2 - spent:.3g} is left" in caplog.text


def test_a_run_that_would_pass_the_budget_later_is_refused_before_it_spends_anything(made: Any, tmp_path: Path) -> None:
    study = made_up_study("fedavg", rounds=30).private(Privacy(noise=0.3))
    answer = made(study, max_epsilon=2.0).answer(JOIN, addressed(study))
    assert refused(answer) == (Code.LONG_RUN, {"allowed": 2.0})
    assert "max_epsilon in the site's local/privacy.json" in words(answer["code"], answer["numbers"])
    assert Declaration(study).rebuild(JOIN, answer) == answer
    assert not (tmp_path / "state" / "ledger").exists()


def test_what_earlier_jobs_spent_is_reckoned_with_when_a_job_joins_and_not_told(made: Any, tmp_path: Path) -> None:
    assert trained(made(max_epsilon=4.2), PRIVATE)["code"] == OK
    before = entries(tmp_path / "state")
    other = replace(PRIVATE, training=replace(PRIVATE.training, seed=1))
    answer = made(other, max_epsilon=4.2).answer(JOIN, addressed(other, run="run-2"))
    assert refused(answer) == (Code.LONG_RUN, {"allowed": 4.2})
    assert entries(tmp_path / "state") == before


def test_a_run_that_has_begun_goes_on_though_a_crash_has_wasted_a_part_of_it(made: Any, tmp_path: Path) -> None:
    assert trained(made(max_epsilon=4.0), PRIVATE)["code"] == OK
    (tmp_path / "state" / "runs" / RUN / "outbox").rename(tmp_path / "lost")
    assert trained(made(max_epsilon=4.0), PRIVATE)["code"] == OK
    assert [entry.round for entry in entries(tmp_path / "state")] == [1, 1]
    assert made(max_epsilon=4.0).answer(JOIN, addressed(PRIVATE)) == {"code": OK}


# what goes wrong by itself has a code of its own


def test_what_no_noise_can_protect_is_said_to_have_no_price(made: Any, tmp_path: Path) -> None:
    """Of so small an epsilon nothing is left for the steps beside the releases."""
    study = made_up_study("fedavg", rounds=2).private(Privacy(epsilon=1e-7, delta=1e-10))
    assert refused(made(study).answer(JOIN, addressed(study))) == (Code.NO_PRICE, {})
    assert not (tmp_path / "state" / "ledger").exists()


def test_a_price_that_cannot_be_worked_out_is_not_the_ledgers_fault(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: Any, **options: Any) -> float:
        raise RuntimeError("no figure")

    study = OPEN.private(Privacy(noise=1.001))
    monkeypatch.setattr(accounting, "_answer", fail)
    monkeypatch.setattr(accounting, "_rdp", lambda kinds, delta: 1.0)
    assert refused(made(study, max_epsilon=0.9).answer(TRAIN, to_train(study))) == (Code.NO_PRICE, {})


def overflowing(monkeypatch: pytest.MonkeyPatch, *, after: int) -> None:
    """Losses are not finite from so many steps on."""
    calls, terms = iter(range(1000)), Method.terms

    def too_large(self: Any, model: Any, trace: Any, batch: Any, context: Any) -> Any:
        found = terms(self, model, trace, batch, context)
        return found if next(calls) < after else {name: term * torch.inf for name, term in found.items()}

    monkeypatch.setattr(Method, "terms", too_large)


@pytest.mark.parametrize("after", [0, 20])
def test_where_a_site_is_hidden_losses_that_are_not_finite_are_said_to_be_training_that_diverged(
    made: Any, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    study = made_up_study("fedavg", rounds=2, steps=30).private(Privacy(noise=1.0, unit="site"))
    overflowing(monkeypatch, after=after)
    assert refused(made(study, privacy_unit="site").answer(TRAIN, to_train(study))) == (Code.DIVERGED, {})


def test_a_model_that_diverged_is_said_to_have_and_not_to_mix_images(
    made: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No made-up image has a loss with an end, so that the check before the round has nothing to compare."""
    overflowing(monkeypatch, after=0)
    assert refused(made().answer(TRAIN, to_train(PRIVATE))) == (Code.DIVERGED, {})
    assert not (tmp_path / "state" / "ledger").exists(), "nothing is spent on it"


@pytest.mark.parametrize("unit", ["patient", "image"])
def test_where_a_patient_is_hidden_they_count_as_nothing_and_nobody_hears_of_them(
    made: Any, monkeypatch: pytest.MonkeyPatch, unit: Unit, tmp_path: Path
) -> None:
    """That a round ends would tell of one image, whatever the noise."""
    study = made_up_study("fedavg", rounds=2, steps=30).private(Privacy(noise=1.0, unit=unit))
    overflowing(monkeypatch, after=20)
    assert made(study, privacy_unit=unit).answer(TRAIN, to_train(study))["code"] == OK
    (noted,) = read_journal(tmp_path / "state" / "runs" / RUN / "left-out.jsonl")
    assert 0 < noted["left_out"] < noted["drawn"]


def test_an_update_too_long_to_be_clipped_is_said_to_be_training_that_diverged(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = OPEN.private(Privacy(noise=1.0, unit="site"))
    monkeypatch.setattr(
        Participant, "_update", lambda self, payload: {n: t * torch.inf for n, t in payload.tensors.items()}
    )
    answer = made(study, privacy_unit="site").answer(TRAIN, to_train(study))
    assert refused(answer) == (Code.DIVERGED, {})


@pytest.mark.parametrize("task", [JOIN, FINISH])
def test_a_ledger_that_does_not_hold_is_said_to_be_one_whenever_it_is_read(
    made: Any, tmp_path: Path, task: str
) -> None:
    assert trained(made(), PRIVATE)["code"] == OK
    (path,) = (tmp_path / "state" / "ledger").glob("*.jsonl")
    path.write_bytes(b"")
    assert refused(made().answer(task, addressed(PRIVATE, 1))) == (Code.LEDGER, {})


@pytest.mark.parametrize("spoil", ["cut", "gone", "changed"])
def test_a_ledger_that_does_not_hold_stops_training(made: Any, tmp_path: Path, spoil: str) -> None:
    assert trained(made(), PRIVATE)["code"] == OK
    (path,) = (tmp_path / "state" / "ledger").glob("*.jsonl")
    content = path.read_bytes()
    if spoil == "gone":
        path.unlink()
    else:
        path.write_bytes(b"" if spoil == "cut" else content.replace(b'"steps":', b'"stEps":', 1))
    assert refused(trained(made(), PRIVATE, 2)) == (Code.LEDGER, {})


def test_with_a_new_kit_a_site_goes_on_with_its_ledger_and_anybody_can_check_it(made: Any, tmp_path: Path) -> None:
    study = replace(PRIVATE, task=replace(PRIVATE.task, rounds=3))
    assert trained(made(study), study)["code"] == OK
    renewed = Credentials(Authority().identity(ME), authority().roots)
    assert trained(made(study, certified=lambda: renewed), study, 2)["code"] == OK
    folder = tmp_path / "state" / "ledger"
    verify = verifier(key_of(folder))
    kept = Ledger(folder, sign=lambda message: b"", verify=verify, signer="", name=ME).entries()
    assert [(entry.round, entry.what) for entry in kept] == [(1, "steps"), (1, "val counts"), (2, "steps")]
    key_of(folder).unlink()
    # Without what vouched for the first line nobody can say what was spent.
    assert refused(trained(made(study, certified=lambda: renewed), study, 3)) == (Code.LEDGER, {})


@pytest.mark.parametrize("when", ["before the steps", "before the report"])
def test_a_round_that_is_killed_counts_as_spent_and_is_paid_for_again(made: Any, tmp_path: Path, when: str) -> None:
    study = OPEN.private(Privacy(noise=1.0))
    child = os.fork()
    if child == 0:
        try:
            if when == "before the report":
                participant.Outbox.put = lambda self, report: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
            else:
                from crossward.site import record_protection

                record_protection.train_privately = lambda *given, **options: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
            made(study).answer(TRAIN, to_train(study))
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    once = entries(tmp_path / "state")
    assert [entry.round for entry in once] == [1]
    assert trained(made(study), study)["code"] == OK
    twice = entries(tmp_path / "state")
    assert [entry.round for entry in twice] == [1, 1]
    costs = [epsilon([entry.spending for entry in each], delta=1e-5) for each in (once, twice)]
    assert costs[0] < costs[1]
    # What was trained is given again, and costs nothing more.
    assert trained(made(study), study)["code"] == OK
    assert len(entries(tmp_path / "state")) == 2


# what leaves


def test_scores_are_patients_and_right_answers_with_noise_and_nothing_else(made: Any, tmp_path: Path) -> None:
    member = made()
    member.answer(TRAIN, to_train(PRIVATE))
    answer = member.answer(FINISH, {**to_train(PRIVATE, 2), "round": 1})
    assert answer["code"] == OK
    scores = answer["scores"]
    assert {name for name in SCORES if scores[name] is not None} == {"n_test", "accuracy"}
    assert 0 <= scores["accuracy"] <= 1
    assert Declaration(PRIVATE).rebuild(FINISH, answer) == answer
    assert "test counts" in {entry.what for entry in entries(tmp_path / "state")}
    again = member.answer(FINISH, {**to_train(PRIVATE, 2), "round": 1})
    assert again["scores"] == scores
    assert sum(entry.what == "test counts" for entry in entries(tmp_path / "state")) == 1


def test_the_epsilon_that_a_site_writes_down_has_the_test_counts_in_it(
    made: Any, tmp_path: Path, without_validation: Path
) -> None:
    study = OPEN.private(Privacy(noise=1.0))
    member = made(study, data_root=without_validation)
    assert member.answer(FINISH, {**to_train(study, 2), "round": 1})["code"] == OK
    (counted,) = entries(tmp_path / "state")
    assert counted.what == "test counts"
    assert result_in(tmp_path)["epsilon"] == pytest.approx(epsilon([counted.spending], delta=1e-5))


def test_a_site_that_may_not_pay_for_what_it_would_tell_has_its_own_result_all_the_same(
    made: Any, tmp_path: Path
) -> None:
    study = OPEN.private(Privacy(noise=1.0))
    first = made(study)
    assert first.answer(EVALUATE, to_train(study, 2))["code"] == OK
    first.close()
    spent = epsilon([entry.spending for entry in entries(tmp_path / "state")], delta=1e-5)
    finish = addressed(study, 1)
    assert refused(made(study, max_epsilon=0.5).answer(FINISH, finish))[0] is Code.BUDGET
    assert result_in(tmp_path)["epsilon"] == pytest.approx(spent)


def result_in(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "state" / "runs" / RUN / "result.json").read_text()))
