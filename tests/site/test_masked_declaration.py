"""What the declaration lets out of a site under secure aggregation: messages of the protocol, and nothing readable."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.site.made_up_sites import made_up_study
from tests.site.masked import Answered, Federation

from crossward.federation.contract import VALIDATION
from crossward.federation.errors import PrivacyRefusal
from crossward.methods.registry import available
from crossward.privacy.secagg.canonical import decode, encode
from crossward.privacy.secagg.settings import Settings
from crossward.privacy.secagg.sketch import WIDTH
from crossward.site.declaration import Declaration
from crossward.site.messages import (
    BEGIN,
    CONTRIBUTE,
    EVALUATE,
    FINISH,
    JOIN,
    KEYS,
    REVEAL,
    ROSTER,
    SCORES,
    SURVIVORS,
    TASKS,
    TRAIN,
    Message,
)
from crossward.site.troubles import Code

STUDY = made_up_study("fdse").masked(Settings())
DECLARATION = Declaration(STUDY)
SENT = {name: spec.shape for name, spec in DECLARATION.algebra.sent.items()}
BLOCK = "shared/"
SIGNED = {ROSTER: "joined", CONTRIBUTE: "upload", SURVIVORS: "opening", REVEAL: "opening"}
PROTOCOL = {JOIN: "hello", BEGIN: "shares", **SIGNED}


class Subarray(np.ndarray):
    pass


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answered]:
    """One real answer to each task, of a round in which a site dropped out of a sum that it may drop out of."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda descriptor: None)
        patch.setattr("crossward.privacy.secagg.sketch._BUCKETS", 128)
        federation = Federation(tmp_path_factory.mktemp("run"), DECLARATION.algebra, 6)
        federation.deaf = dropping(federation)
        federation.round()
        federation.deaf = lambda task, site: False
        for name in federation.names:
            federation.ask(name, EVALUATE, federation.run.with_model(name, 1))
        federation.run.validation(federation.names)
    found = {each.task: each for each in federation.said}
    vectors = [each for each in federation.said if each.task == CONTRIBUTE]
    found[CONTRIBUTE] = next(each for each in vectors if each.message["sum"]["kind"] == "updates")
    return found


def dropping(federation: Federation) -> Callable[[str, str], bool]:
    """The last site's vector is missing from the sum of tallies."""

    def deaf(task: str, site: str) -> bool:
        request = federation.releases[site]._request
        return task == CONTRIBUTE and site == federation.names[-1] and request is not None and not request.whole

    return deaf


def rebuilt(each: Answered, **changes: Any) -> Message:
    return DECLARATION.rebuild(each.task, {"code": 0, **each.answer, **changes}, each.message)


@pytest.mark.parametrize("task", sorted(set(TASKS) - {FINISH}))
def test_a_real_answer_is_built_anew_equal(answers: dict[str, Answered], task: str) -> None:
    each = answers[task]
    answer = {"code": 0, **each.answer}
    found = rebuilt(each)
    assert found is not answer
    np.testing.assert_equal(found, answer)


def test_an_end_says_only_which_round() -> None:
    assert DECLARATION.rebuild(FINISH, {"code": 0, "round": 3}) == {"code": 0, "round": 3}


# what leaves in the open, and never under masks


def open_parts(task: str) -> dict[str, Any]:
    validation = {name: np.ones(1) for name in VALIDATION}
    parts: dict[str, dict[str, Any]] = {
        TRAIN: {
            "model": "0f" * 32,
            "update": {name: np.ones(shape, np.float32) for name, shape in SENT.items()},
            "tally": {name: np.ones(shape) for name, shape in DECLARATION.algebra.tallies.items()},
            "validation": validation,
        },
        EVALUATE: {"validation": validation},
        FINISH: {"scores": {**dict.fromkeys(SCORES, 0.5), "auc": None}},
    }
    return parts[task]


@pytest.mark.parametrize(
    ("task", "part"), [(task, part) for task in (TRAIN, EVALUATE, FINISH) for part in open_parts(task)]
)
@pytest.mark.parametrize("method", sorted(available()))
def test_a_report_counts_and_scores_stay(method: str, task: str, part: str) -> None:
    declaration = Declaration(made_up_study(method).masked(Settings()))
    cosines = {"cosines": {}} if task == TRAIN else {}
    with pytest.raises(PrivacyRefusal, match=f"{task}: the answer holds '{part}', which may not leave the site"):
        declaration.rebuild(task, {"code": 0, "round": 1, **cosines, part: open_parts(task)[part]})


def test_a_whole_answer_of_an_open_job_is_refused() -> None:
    for task in (TRAIN, EVALUATE):
        with pytest.raises(PrivacyRefusal, match="may not leave the site"):
            DECLARATION.rebuild(task, {"code": 0, "round": 1, **open_parts(task)})
    with pytest.raises(PrivacyRefusal, match="join: the answer lacks 'hello'"):
        DECLARATION.rebuild(JOIN, {"code": 0})


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("name", ["update", "tally", "validation", "scores", "note", "vector2", ""])
def test_anything_beside_the_declared_parts_stops_the_answer(
    answers: dict[str, Answered], task: str, name: str
) -> None:
    each = answers.get(task, Answered(task, "", {}, {"round": 1}))
    with pytest.raises(PrivacyRefusal, match=f"the answer holds '{name}'"):
        rebuilt(each, **{name: np.zeros(1)})


@pytest.mark.parametrize("task", [task for task in TASKS if task not in (KEYS, FINISH)])
def test_nothing_that_belongs_to_an_answer_is_missing(answers: dict[str, Answered], task: str) -> None:
    each = answers[task]
    for part in each.answer:
        rest = {name: value for name, value in each.answer.items() if name != part}
        with pytest.raises(PrivacyRefusal, match=f"the answer lacks '{part}'"):
            DECLARATION.rebuild(task, {"code": 0, **rest}, each.message)


# vectors


@pytest.mark.parametrize(
    "change",
    [
        lambda vector: vector[:-1],
        lambda vector: np.append(vector, np.uint8(0)),
        lambda vector: vector[:0],
        lambda vector: vector.astype(np.float32),
        lambda vector: vector.view("<f4"),
        lambda vector: vector.view("<u4"),
        lambda vector: vector.view(np.int8),
        lambda vector: vector.reshape(1, -1),
        lambda vector: vector.astype(object),
        lambda vector: vector.view(Subarray),
        lambda vector: vector.tobytes(),
        lambda vector: vector.tolist(),
        lambda vector: {"a": vector},
        lambda vector: None,
    ],
    ids=["shorter", "longer", "none", "floats", "as-floats", "words", "signed", "rows", "objects", "subclass", "bytes",
         "list", "mapping", "nothing"],
)  # fmt: skip
def test_a_vector_is_of_exactly_as_many_bytes_as_were_asked_for(answers: dict[str, Answered], change: Any) -> None:
    each = answers[CONTRIBUTE]
    with pytest.raises(PrivacyRefusal, match="contribute: vector is not an array"):
        rebuilt(each, vector=change(each.answer["vector"]))


def test_a_vectors_length_is_that_of_the_request_and_not_of_another(answers: dict[str, Answered]) -> None:
    each = answers[CONTRIBUTE]
    answer = {"code": 0, **each.answer}
    with pytest.raises(PrivacyRefusal):
        DECLARATION.rebuild(CONTRIBUTE, answer)
    with pytest.raises(PrivacyRefusal):
        DECLARATION.rebuild(CONTRIBUTE, answer, {})
    totals = {**each.message, "sum": {**each.message["sum"], "kind": "totals", "plan": "", "limits": "{}"}}
    with pytest.raises(PrivacyRefusal, match="vector is not an array"):
        DECLARATION.rebuild(CONTRIBUTE, answer, totals)
    fewer = {**each.message["sum"], "cohort": each.message["sum"]["cohort"][:-1]}
    with pytest.raises(PrivacyRefusal, match="for other sites"):
        DECLARATION.rebuild(CONTRIBUTE, answer, {**each.message, "sum": fewer})


@pytest.mark.parametrize("bits", [16, 24, 32])
def test_a_number_takes_as_many_bytes_as_the_ring_has(tmp_path: Path, bits: Any) -> None:
    study = made_up_study("fedavg").masked(Settings(bits=bits))
    declaration = Declaration(study)
    federation = Federation(tmp_path / "run", declaration.algebra, 3, masking=study.masking)
    federation.train()
    request = federation.request()
    answer = federation.ask("site-00", CONTRIBUTE, federation.begun(request)["site-00"])
    assert answer is not None
    asked = federation.asking(request)
    declaration.rebuild(CONTRIBUTE, {"code": 0, **answer}, asked)
    values = sum(spec.numel for spec in declaration.algebra.sent.values())
    # Beside them a few exact numbers, of 60 bits each.
    assert values * bits // 8 < len(answer["vector"]) < values * bits // 8 + 16 * 500
    for other in {16, 24, 32} - {bits}:
        wrong = Declaration(made_up_study("fedavg").masked(Settings(bits=other)))  # type: ignore[arg-type]
        with pytest.raises(PrivacyRefusal, match="vector is not an array"):
            wrong.rebuild(CONTRIBUTE, {"code": 0, **answer}, asked)


# messages of the protocol


@pytest.mark.parametrize("task", PROTOCOL)
@pytest.mark.parametrize(
    "value",
    [b"", b"patient 4711 has a nodule", bytes(1000), "text", None, 7, np.zeros(4, np.uint8), bytearray(b"x"), [b"x"]],
    ids=repr,
)
def test_what_is_no_message_of_the_protocol_stays(answers: dict[str, Answered], task: str, value: Any) -> None:
    with pytest.raises(PrivacyRefusal):
        rebuilt(answers[task], **{PROTOCOL[task]: value})


@pytest.mark.parametrize("task", PROTOCOL)
def test_a_message_of_another_kind_stays(answers: dict[str, Answered], task: str) -> None:
    part = PROTOCOL[task]
    both = {SURVIVORS: {REVEAL}, REVEAL: {SURVIVORS}}
    for other in set(PROTOCOL) - {task} - both.get(task, set()):
        with pytest.raises(PrivacyRefusal, match="is not the message that belongs there"):
            rebuilt(answers[task], **{part: answers[other].answer[PROTOCOL[other]]})


@pytest.mark.parametrize("task", PROTOCOL)
def test_a_field_more_or_less_is_another_message(answers: dict[str, Answered], task: str) -> None:
    part = PROTOCOL[task]
    content = decode(answers[task].answer[part])
    lost = next(iter(content))
    others: list[dict[str, Any]] = [
        {**content, "note": b"patient 4711"},
        {name: value for name, value in content.items() if name != lost},
        {},
    ]
    for other in others:
        with pytest.raises(PrivacyRefusal, match="is not the message that belongs there"):
            rebuilt(answers[task], **{part: encode(other)})


def test_a_message_of_any_length_is_not_taken(answers: dict[str, Answered]) -> None:
    content = decode(answers[JOIN].answer["hello"])
    long = encode({**content, "body": bytes(1 << 20)})
    with pytest.raises(PrivacyRefusal, match="hello is not a message of the protocol"):
        rebuilt(answers[JOIN], hello=long)


@given(st.sampled_from(sorted(set(PROTOCOL) - {CONTRIBUTE})), st.binary(max_size=200))
def test_random_bytes_are_no_message(task: str, value: bytes) -> None:
    answer: Message = {"code": 0, PROTOCOL[task]: value}
    if task not in (JOIN, ROSTER):
        answer["round"] = 1
    with pytest.raises(PrivacyRefusal):
        DECLARATION.rebuild(task, answer)


# sketches


@pytest.mark.parametrize(
    "value",
    [
        np.zeros(WIDTH + 1),
        np.zeros(WIDTH - 1),
        np.zeros(WIDTH, np.float32),
        np.zeros((1, WIDTH)),
        np.append(np.zeros(WIDTH - 1), np.nan),
        np.append(np.zeros(WIDTH - 1), np.inf),
        np.zeros(WIDTH, object),
        [0.0] * WIDTH,
        None,
    ],
    ids=["wider", "narrower", "float32", "rows", "nan", "inf", "objects", "list", "nothing"],
)
def test_a_sketch_is_of_its_width_and_finite(answers: dict[str, Answered], value: Any) -> None:
    cosines = answers[TRAIN].answer["cosines"]
    block = next(block for block in cosines if block.startswith(BLOCK))
    with pytest.raises(PrivacyRefusal, match=f"train: cosines/{block}"):
        rebuilt(answers[TRAIN], cosines={**cosines, block: value})


def test_sketches_are_of_the_blocks_that_a_plan_needs_and_of_no_others(answers: dict[str, Answered]) -> None:
    cosines = answers[TRAIN].answer["cosines"]
    assert cosines.keys() == DECLARATION.algebra.blocks().keys()
    with pytest.raises(PrivacyRefusal, match="cosines holds 'shared/more'"):
        rebuilt(answers[TRAIN], cosines={**cosines, "shared/more": np.zeros(WIDTH)})
    lost = next(iter(cosines))
    with pytest.raises(PrivacyRefusal, match=f"cosines lacks '{lost}'"):
        rebuilt(answers[TRAIN], cosines={block: value for block, value in cosines.items() if block != lost})
    plain = Declaration(made_up_study("fedavg").masked(Settings()))
    with pytest.raises(PrivacyRefusal, match="may not leave the site"):
        plain.rebuild(TRAIN, {"code": 0, "round": 1, "cosines": {"shared/x": np.zeros(WIDTH)}})
    assert plain.rebuild(TRAIN, {"code": 0, "round": 1, "cosines": {}})["cosines"] == {}


def test_fedcode_compares_one_vector_as_long_as_a_feature() -> None:
    study = made_up_study("fedcode").masked(Settings())
    declaration = Declaration(study)
    (shape,) = [spec.shape for name, spec in declaration.algebra.sent.items() if name == "style"]
    answer: Message = {"code": 0, "round": 1, "cosines": {"style/style": np.zeros(shape[1])}}
    assert declaration.rebuild(TRAIN, answer)["cosines"]["style/style"].shape == (shape[1],)
    with pytest.raises(PrivacyRefusal, match="style/style"):
        declaration.rebuild(TRAIN, answer | {"cosines": {"style/style": np.zeros(WIDTH)}})


# troubles and people


@pytest.mark.parametrize("task", TASKS)
def test_a_trouble_is_a_code_with_its_numbers_under_masks_too(task: str) -> None:
    said = {"code": int(Code.SMALL_SUMS), "numbers": {"sites": 3.0, "needed": 5.0}}
    assert DECLARATION.rebuild(task, said) == said
    with pytest.raises(PrivacyRefusal, match="holds more than its numbers"):
        DECLARATION.rebuild(task, {**said, "vector": np.zeros(4, np.uint8)})
    with pytest.raises(PrivacyRefusal, match="is not a code that may leave the site"):
        DECLARATION.rebuild(task, {"code": int(Code.NO_SUM), "numbers": {}})


def test_the_table_for_people_has_a_row_for_every_part(answers: dict[str, Answered]) -> None:
    found = {(row["task"], row["part"]) for row in DECLARATION.rows()}
    expected = {(task, part) for task, each in answers.items() for part in each.answer}
    assert found == expected | {(FINISH, "round"), (CONTRIBUTE, "blame")}
    contents = {row["part"]: row["content"] for row in DECLARATION.rows()}
    assert f"{len(DECLARATION.algebra.blocks())} sketches of {WIDTH} numbers" in contents["cosines"]
