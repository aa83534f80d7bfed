"""A server gets no more of a site than the rounds that the study plans."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.site.made_up_sites import SITES, made_up_study
from tests.site.masked import RUN, authority, identity
from tests.site.packs import carried, write_packs

from crossward.federation.contract import Payload
from crossward.privacy.secagg.settings import Settings
from crossward.site import messages
from crossward.site.member import Member
from crossward.site.messages import EVALUATE, FINISH, JOIN, OK, TRAIN, Message
from crossward.site.participant import Participant
from crossward.site.policy import Policy
from crossward.site.release import Credentials
from crossward.site.study import Study
from crossward.site.troubles import Code

pytestmark = pytest.mark.usefixtures("without_fsync")

ME = SITES[0]
ROUNDS = 2
OPEN = made_up_study("fedavg", rounds=ROUNDS)
STUDIES = {"open": OPEN, "masked": OPEN.masked(Settings())}


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_packs(tmp_path_factory.mktemp("packs") / "data")


@pytest.fixture(params=STUDIES)
def joined(request: pytest.FixtureRequest, tmp_path: Path, packs: Path) -> Iterator[Callable[..., Message]]:
    """Asks a site that has joined."""
    study = STUDIES[request.param]
    policy = Policy(data_root=packs, state_root=tmp_path / "state", secure_aggregation=request.param == "masked")
    certified = Credentials(identity(ME), authority().roots)
    member = Member(ME, study.options(), policy, patience=0.0, job="job-1", credentials=lambda: certified)

    def ask(task: str, number: Any, **parts: Any) -> Message:
        return member.answer(task, carried(asked(study, number) | parts))

    assert member.answer(JOIN, address(study) | {"agreement": 1})["code"] == OK
    yield ask
    member.close()


def address(study: Study) -> Message:
    return messages.address(run=RUN, study=study.digest(), round_number=0)


def asked(study: Study, number: Any) -> Message:
    state = study.method.start(study.task, study.model())
    return address(study) | messages.pack_payload(Payload(0, state.tensors)) | {"model_round": number}


def test_every_round_of_the_study_is_taken_part_in(joined: Any) -> None:
    for number in range(ROUNDS):
        assert joined(TRAIN, number)["code"] == OK
    assert joined(EVALUATE, ROUNDS)["code"] == OK
    assert joined(FINISH, ROUNDS, round=ROUNDS)["code"] == OK


@pytest.mark.parametrize(
    ("task", "number"),
    [(TRAIN, ROUNDS), (TRAIN, 10**6), (TRAIN, -1), (EVALUATE, ROUNDS + 1), (FINISH, ROUNDS + 1), (TRAIN, "0")],
)
def test_a_round_beyond_them_is_refused_before_anything_is_done(
    joined: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, task: str, number: Any
) -> None:
    """Nearly the same model again and again would give as many measurements of nearly the same update."""

    def done(*given: Any, **options: Any) -> Any:
        raise AssertionError("the site took it in")

    for step in ("receive", "train", "finish"):
        monkeypatch.setattr(Participant, step, done)
    with caplog.at_level(logging.ERROR):
        assert joined(task, number, round=1) == {"code": int(Code.BAD_TASK), "numbers": {}}
    assert "of a study of 2 rounds" in caplog.text
