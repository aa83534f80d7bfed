"""A member of a run under secure aggregation: what it refuses before it looks at its images, and how it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.site.made_up_sites import SITES, made_up_study
from tests.site.masked import RUN, authority, identity
from tests.site.packs import IMAGES, carried, write_packs

from crossward.federation.contract import Payload
from crossward.federation.storage import read_json
from crossward.privacy.secagg.settings import Settings
from crossward.privacy.sums import Kind
from crossward.site import messages
from crossward.site.member import Member
from crossward.site.messages import (
    BEGIN,
    CONTRIBUTE,
    EVALUATE,
    FINISH,
    JOIN,
    KEYS,
    OPEN_TASKS,
    REVEAL,
    ROSTER,
    SURVIVORS,
    TASKS,
    TRAIN,
    Message,
)
from crossward.site.policy import Policy
from crossward.site.release import Credentials
from crossward.site.study import Study
from crossward.site.troubles import Code, Refusal

pytestmark = pytest.mark.usefixtures("without_fsync")

ME = SITES[0]
OPEN = made_up_study("fedavg", rounds=1)
MASKED = OPEN.masked(Settings())
N_TEST = IMAGES // 4


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_packs(tmp_path_factory.mktemp("packs") / "data")


@pytest.fixture
def made(tmp_path: Path, packs: Path) -> Iterator[Callable[..., Member]]:
    members: list[Member] = []

    def make(study: Study = MASKED, *, certified: Any = lambda: credentials(ME), **policy: Any) -> Member:
        rules = Policy(data_root=packs, state_root=tmp_path / "state", **policy)
        members.append(Member(ME, study.options(), rules, patience=0.0, job="job-1", credentials=certified))
        return members[-1]

    yield make
    for member in members:
        member.close()


def credentials(name: str) -> Credentials:
    return Credentials(identity(name), authority().roots)


def addressed(study: Study, number: int = 0, **parts: Any) -> Message:
    return messages.address(run=RUN, study=study.digest(), round_number=number) | parts


def start(study: Study) -> Message:
    state = study.method.start(study.task, study.model())
    return messages.pack_payload(Payload(0, state.tensors))


def asked(task: str, study: Study) -> Message:
    parts: dict[str, Message] = {JOIN: {"agreement": 1}, TRAIN: start(study), EVALUATE: start(study)}
    return addressed(study, 1, **parts.get(task, {}))


# before any image is read


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize("task", OPEN_TASKS)
def test_a_job_in_the_open_is_refused_by_a_site_that_demands_masks(made: Any, tmp_path: Path, task: str) -> None:
    member = made(OPEN)
    assert member.answer(task, asked(task, OPEN)) == {"code": int(Code.OPEN_JOB), "numbers": {}}
    assert not (tmp_path / "state").exists()


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize(("sums", "needed"), [(3, 4), (3, 10), (5, 6)])
def test_sums_that_are_too_small_for_a_site_are_refused_with_both_numbers(made: Any, sums: int, needed: int) -> None:
    study = OPEN.masked(Settings(min_sites=sums))
    answer = made(study, minimum_sites=needed).answer(JOIN, addressed(study, agreement=1))
    assert answer == {"code": int(Code.SMALL_SUMS), "numbers": {"sites": float(sums), "needed": float(needed)}}
    words = str(Refusal(Code(answer["code"]), **answer["numbers"]))
    assert f"sums over {sums} sites, and the site's policy wants at least {needed}" in words


@pytest.mark.usefixtures("unread")
def test_a_site_without_its_certificate_takes_no_part(made: Any) -> None:
    def missing() -> Credentials:
        raise FileNotFoundError(2, "no such file", "client.crt")

    for certified in (None, missing):
        answer = made(certified=certified).answer(JOIN, addressed(MASKED, agreement=1))
        assert answer == {"code": int(Code.NO_CERTIFICATE), "numbers": {}}


def test_a_policy_that_is_content_lets_the_site_join(made: Any) -> None:
    for number, (study, policy) in enumerate(
        [
            (MASKED, {}),
            (MASKED, {"minimum_sites": 2}),
            (MASKED, {"secure_aggregation": False}),
            (OPEN.masked(Settings(min_sites=6)), {"minimum_sites": 6}),
        ]
    ):
        member = made(study, **policy)
        answer = member.answer(JOIN, addressed(study, agreement=1, run=f"run-{number}"))
        assert answer.keys() == {"code", "hello"}
        assert answer["code"] == 0
        member.close()
    plain = made(OPEN, secure_aggregation=False, certified=None)
    assert plain.answer(JOIN, addressed(OPEN, run="run-open")) == {"code": 0}


def test_an_open_job_has_no_steps_of_the_protocol(made: Any) -> None:
    member = made(OPEN, secure_aggregation=False)
    for task in set(TASKS) - set(OPEN_TASKS):
        assert member.answer(task, addressed(OPEN))["code"] == int(Code.BAD_TASK)


def test_every_refusal_of_the_protocol_is_a_code(made: Any) -> None:
    """Nothing that a server sends makes a member raise, and no words leave."""
    member = made()
    steps = set(TASKS) - {FINISH}
    before = [(task, addressed(MASKED)) for task in steps]
    odd = [(task, addressed(MASKED, sum=5, inbox=5, hellos=[b"x"], joined={"a": b"x"}, uploads={})) for task in steps]
    member.answer(JOIN, addressed(MASKED, agreement=1))
    for task, message in before + odd:
        answer = member.answer(task, message)
        assert answer.keys() == {"code", "numbers"}, task
        assert answer["code"] in {int(Code.BAD_TASK), int(Code.NOT_MASKED), int(Code.NO_KEYS)}, task


@pytest.mark.parametrize(
    ("task", "code"),
    [(TRAIN, Code.NO_KEYS), (ROSTER, Code.NO_KEYS), (KEYS, Code.NO_KEYS), (REVEAL, Code.NO_KEYS),
     (BEGIN, Code.BAD_TASK), (CONTRIBUTE, Code.BAD_TASK), (SURVIVORS, Code.NOT_MASKED)],
)  # fmt: skip
def test_a_process_that_has_agreed_on_nothing_says_what_it_lacks(made: Any, task: str, code: Code) -> None:
    parts: dict[str, Any] = {"hellos": [], "joined": {}, "agreements": {}, "uploads": {}}
    message = addressed(MASKED, 1, **parts, **(start(MASKED) if task == TRAIN else {}))
    assert made().answer(task, message) == {"code": int(code), "numbers": {}}


# the end


def finished(member: Member) -> tuple[Message, Any]:
    """Let a member receive a model and finish with it; gives its answer and what it keeps for the sum of tests."""
    state = MASKED.method.start(MASKED.task, MASKED.model())
    payload = messages.pack_payload(Payload(1, state.tensors, best_round=1))
    assert member.answer(JOIN, addressed(MASKED, agreement=1))["code"] == 0
    assert member.answer(EVALUATE, carried(addressed(MASKED, 1, **payload))) == {"code": 0, "round": 1}
    answer = member.answer(FINISH, addressed(MASKED, 1))
    assert member._release is not None
    return answer, member._release._reports[Kind.TEST].tally


def test_scores_do_not_leave_and_are_kept_for_the_sum_and_at_the_site(made: Any, tmp_path: Path) -> None:
    answer, tally = finished(made())
    assert answer == {"code": 0, "round": 1}
    kept = read_json(tmp_path / "state" / "runs" / RUN / "result.json")
    assert kept["n_test"] == N_TEST
    assert {name: float(value.item()) for name, value in tally.items()} == {
        "test/n": N_TEST,
        "test/correct": round(kept["accuracy"] * N_TEST),
    }


@pytest.mark.parametrize("policy", [{"publish_scores": False}, {"minimum_cell": N_TEST + 1}], ids=str)
def test_a_site_that_publishes_nothing_adds_nothing_to_the_sum(made: Any, policy: dict[str, Any]) -> None:
    answer, tally = finished(made(**policy))
    assert answer == {"code": 0, "round": 1}
    assert [float(value.item()) for value in tally.values()] == [0.0, 0.0]
