from __future__ import annotations

import math
from collections import UserDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.site.made_up_sites import made_up_study

from crossward.federation.contract import CORRECT, LOSS, SAMPLES, SEEN, VALIDATION
from crossward.federation.errors import PrivacyRefusal
from crossward.federation.scopes import Scope, layout_of, names_in
from crossward.methods.registry import available
from crossward.privacy.secagg.settings import Settings
from crossward.site.declaration import Declaration, items_of
from crossward.site.messages import EVALUATE, FINISH, JOIN, OPEN_TASKS, SCORES, TASKS, TRAIN
from crossward.site.troubles import Code, Refusal, figures_of, settings_of

DECLARATION = Declaration(made_up_study("fedbn"))
SENT = {name: spec.shape for name, spec in DECLARATION.algebra.sent.items()}
FIRST = next(iter(SENT))
LOCAL = names_in(DECLARATION.algebra.layout, Scope.LOCAL)
ARRAY_NAMES = {"update": SENT, "tally": dict.fromkeys((SAMPLES, LOSS, SEEN, CORRECT), (1,))}
ARRAY_NAMES["validation"] = dict.fromkeys(VALIDATION, (1,))


SERVERS = {
    Code.NO_ANSWER,
    Code.NOT_EXECUTED,
    Code.QUORUM,
    Code.SERVER_DISK_FULL,
    Code.SERVER_STORAGE,
    Code.SERVER_INTERNAL,
    Code.NOT_RESUMABLE,
    Code.ABORTED,
    Code.NO_SUM,
    Code.CAUGHT,
    Code.GATE,
    Code.NOT_DECLARED,
    Code.DISPUTED,
    Code.QUARREL,
    Code.OUTLIER,
}
"""What only the server can find."""
SITES_OWN = sorted(set(Code) - SERVERS)


class Words(str):
    """Equal to a plain string, and able to carry more."""

    __slots__ = ("hidden",)


class Subarray(np.ndarray):
    pass


def short(value: Any) -> str:
    return repr(value)[:24]


def arrays_of(part: str, kind: type = np.float64) -> dict[str, Any]:
    return {name: np.ones(shape, kind) for name, shape in ARRAY_NAMES[part].items()}


def good(task: str) -> dict[str, Any]:
    """An answer with everything in it that the task may have."""
    parts: dict[str, dict[str, Any]] = {
        JOIN: {},
        TRAIN: {
            "round": 3,
            "model": "0f" * 32,
            "update": arrays_of("update", np.float32),
            "tally": arrays_of("tally"),
            "validation": arrays_of("validation"),
        },
        EVALUATE: {"round": 3, "validation": arrays_of("validation")},
        FINISH: {"round": 3, "scores": {**dict.fromkeys(SCORES, 0.5), "auc": None}},
    }
    return {"code": 0, **parts[task]}


def check_only_declared(task: str, rebuilt: dict[str, Any]) -> None:
    """Said anew, without the code under test: nothing but exactly what the task may carry."""
    assert type(rebuilt) is dict
    assert all(type(key) is str for key in rebuilt)
    if rebuilt["code"]:
        assert rebuilt.keys() == {"code", "numbers"}
        assert rebuilt["numbers"].keys() <= set(settings_of(Code(rebuilt["code"])))
        assert all(
            value is None or (type(value) is float and math.isfinite(value)) for value in rebuilt["numbers"].values()
        )
        return
    assert rebuilt.keys() <= good(task).keys()
    for part, names in ARRAY_NAMES.items():
        kind = np.float32 if part == "update" else np.float64
        if part in rebuilt:
            assert type(rebuilt[part]) is dict
            assert rebuilt[part].keys() == names.keys()
            for name, array in rebuilt[part].items():
                assert (type(name), type(array)) == (str, np.ndarray)
                assert (array.dtype, array.shape) == (kind, names[name])
                assert np.isfinite(array).all()
    assert type(rebuilt.get("round", 0)) is int
    assert len(rebuilt.get("model", "0" * 64)) == 64
    assert rebuilt.get("scores", {}).keys() <= set(SCORES)
    assert all(value is None or type(value) is float for value in rebuilt.get("scores", {}).values())


@pytest.mark.parametrize("task", OPEN_TASKS)
def test_a_good_answer_is_built_anew_equal(task: str) -> None:
    answer = good(task)
    rebuilt = DECLARATION.rebuild(task, answer)
    assert rebuilt is not answer
    check_only_declared(task, rebuilt)
    np.testing.assert_equal(rebuilt, answer)


def test_validation_and_scores_may_be_left_out() -> None:
    train, finish = good(TRAIN), good(FINISH)
    del train["validation"], finish["scores"]
    assert "validation" not in DECLARATION.rebuild(TRAIN, train)
    assert DECLARATION.rebuild(FINISH, finish) == {"code": 0, "round": 3}


@pytest.mark.parametrize("method", sorted(available()))
def test_no_method_declares_a_tensor_that_is_local(method: str) -> None:
    study = made_up_study(method)
    layout = layout_of(study.method.build(study.task))
    local = names_in(layout, Scope.LOCAL)
    declaration = Declaration(study)
    answer = good(TRAIN)
    update = {name: np.zeros(spec.shape, np.float32) for name, spec in declaration.algebra.sent.items()}
    answer["update"] = update
    answer["tally"] = {name: np.ones(shape) for name, shape in declaration.algebra.tallies.items()}
    assert declaration.rebuild(TRAIN, answer)["update"].keys() == update.keys()
    assert local
    assert update.keys().isdisjoint(local)
    for name in local:
        with pytest.raises(PrivacyRefusal, match="may not leave the site"):
            declaration.rebuild(TRAIN, answer | {"update": {**update, name: np.zeros(layout[name].shape, np.float32)}})


def test_a_local_tensor_in_the_place_of_a_shared_one_is_refused() -> None:
    """As many entries as declared, so that counting alone would not notice."""
    answer = good(TRAIN)
    answer["update"][LOCAL[0]] = answer["update"].pop(FIRST)
    with pytest.raises(PrivacyRefusal, match=LOCAL[0]):
        DECLARATION.rebuild(TRAIN, answer)


def changed_update(change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    answer = good(TRAIN)
    change(answer["update"])
    return answer


@pytest.mark.parametrize(
    "value",
    [
        np.ones(SENT[FIRST]),
        np.ones(SENT[FIRST], np.float16),
        np.ones(SENT[FIRST], np.int32),
        np.ones(SENT[FIRST], ">f4"),
        np.ones(SENT[FIRST], np.complex64),
        np.ones(SENT[FIRST], object),
        np.full(SENT[FIRST], "text"),
        np.ones((*SENT[FIRST], 1), np.float32),
        np.ones(SENT[FIRST][::-1], np.float32),
        np.ones(0, np.float32),
        np.full(SENT[FIRST], np.nan, np.float32),
        np.full(SENT[FIRST], np.inf, np.float32),
        np.full(SENT[FIRST], -np.inf, np.float32),
        np.ones(SENT[FIRST], np.float32).view(Subarray),
        np.ma.masked_array(np.ones(SENT[FIRST], np.float32)),
        np.rec.array(np.ones(SENT[FIRST], np.float32)),
        np.ones(SENT[FIRST], np.float32).tolist(),
        np.ones(SENT[FIRST], np.float32).tobytes(),
        {"inner": np.ones(SENT[FIRST], np.float32)},
        "text",
        1.0,
        None,
    ],
    ids=lambda value: f"{type(value).__name__}-{getattr(value, 'dtype', '')}-{getattr(value, 'shape', '')}",
)
def test_a_tensor_of_another_kind_is_refused(value: Any) -> None:
    assert len(SENT[FIRST]) > 1
    with pytest.raises(PrivacyRefusal, match=f"train: update/{FIRST}"):
        DECLARATION.rebuild(TRAIN, changed_update(lambda update: update.update({FIRST: value})))


def test_one_value_that_is_not_finite_among_many_is_found() -> None:
    update = np.ones(SENT[FIRST], np.float32)
    update.flat[-1] = np.nan
    with pytest.raises(PrivacyRefusal, match="not finite"):
        DECLARATION.rebuild(TRAIN, changed_update(lambda tensors: tensors.update({FIRST: update})))


@pytest.mark.parametrize("task", OPEN_TASKS)
@pytest.mark.parametrize(
    "name", ["patients", "numbers", "__headers__", "DXO", "", "Round", "update/x", 7, None, ("a",)]
)
def test_anything_beside_the_declared_parts_stops_the_whole_answer(task: str, name: Any) -> None:
    with pytest.raises(PrivacyRefusal, match="may not leave the site"):
        DECLARATION.rebuild(task, {**good(task), name: np.zeros(1)})


@pytest.mark.parametrize("part", ["update", "tally", "validation"])
def test_parts_are_whole_and_hold_nothing_else(part: str) -> None:
    answer = good(TRAIN)
    answer[part]["extra"] = np.zeros(1)
    with pytest.raises(PrivacyRefusal, match=f"train: {part} holds 'extra'"):
        DECLARATION.rebuild(TRAIN, answer)
    answer = good(TRAIN)
    lost = next(iter(answer[part]))
    del answer[part][lost]
    with pytest.raises(PrivacyRefusal, match=f"train: {part} lacks '{lost}'"):
        DECLARATION.rebuild(TRAIN, answer)
    for value in (None, [], "text", 5, np.zeros(1)):
        with pytest.raises(PrivacyRefusal, match=f"train: {part} is not what was declared"):
            DECLARATION.rebuild(TRAIN, {**good(TRAIN), part: value})


@pytest.mark.parametrize(
    ("task", "part"),
    [
        *((TRAIN, part) for part in ("round", "model", "update", "tally")),
        *((EVALUATE, part) for part in ("round", "validation")),
        (FINISH, "round"),
    ],
)
def test_a_needed_part_is_missed(task: str, part: str) -> None:
    answer = good(task)
    del answer[part]
    with pytest.raises(PrivacyRefusal, match=f"{task}: the answer lacks '{part}'"):
        DECLARATION.rebuild(task, answer)


@pytest.mark.parametrize(
    "value", ["3", 3.0, True, None, -1, 1_000_000, 10**400, np.int64(3), np.array(3), [3]], ids=short
)
def test_a_round_is_a_small_whole_number(value: Any) -> None:
    with pytest.raises(PrivacyRefusal, match="not the number of a round"):
        DECLARATION.rebuild(FINISH, {**good(FINISH), "round": value})


@pytest.mark.parametrize(
    "value",
    [
        "",
        "patient 4711 has a nodule",
        "0F" * 32,
        "0f" * 31,
        "0f" * 33,
        "0f" * 32 + "\n",
        " " + "0f" * 32,
        b"0f" * 32,
        5,
        None,
        Words("0f" * 32),
    ],
    ids=short,
)
def test_a_digest_is_never_free_text(value: Any) -> None:
    with pytest.raises(PrivacyRefusal, match="train: model is not a digest"):
        DECLARATION.rebuild(TRAIN, {**good(TRAIN), "model": value})


@pytest.mark.parametrize(
    "value",
    ["0.5", "patient 4711", math.nan, math.inf, True, np.float64(0.5), np.zeros(1), [0.5], {}, 10**400],
    ids=short,
)
def test_a_score_is_a_finite_number_or_nothing(value: Any) -> None:
    answer = good(FINISH)
    answer["scores"]["accuracy"] = value
    with pytest.raises(PrivacyRefusal, match="finish: scores/accuracy is not a finite number"):
        DECLARATION.rebuild(FINISH, answer)


def test_scores_per_image_are_refused() -> None:
    answer = good(FINISH)
    answer["scores"]["per_class"] = 0.5
    with pytest.raises(PrivacyRefusal, match="per_class"):
        DECLARATION.rebuild(FINISH, answer)


@pytest.mark.parametrize(
    "task", ["", "secagg", "Train", "train ", "__end_run__", "x" * 500, *sorted(set(TASKS) - set(OPEN_TASKS))]
)
def test_an_answer_to_an_unknown_task_is_refused(task: str) -> None:
    with pytest.raises(PrivacyRefusal, match="unknown task") as caught:
        DECLARATION.rebuild(task, {"code": 0})
    assert len(str(caught.value)) < 120


@pytest.mark.parametrize("code", [None, "0", 0.0, False, True, np.int64(0), [0], Code.BUSY])
def test_a_code_is_a_plain_whole_number(code: Any) -> None:
    with pytest.raises(PrivacyRefusal, match="without a code"):
        DECLARATION.rebuild(JOIN, {"code": code})
    with pytest.raises(PrivacyRefusal, match="without a code"):
        DECLARATION.rebuild(JOIN, {})


@pytest.mark.parametrize("code", [-1, 1, 9, 59, 99, 4711, 10**30])
def test_a_code_outside_the_closed_list_is_refused(code: int) -> None:
    with pytest.raises(PrivacyRefusal, match="is not a code that may leave the site"):
        DECLARATION.rebuild(TRAIN, {"code": code, "numbers": {}})


@pytest.mark.parametrize("code", sorted(SERVERS))
def test_a_site_does_not_speak_for_the_server(code: Code) -> None:
    with pytest.raises(PrivacyRefusal, match="is not a code that may leave the site"):
        DECLARATION.rebuild(TRAIN, {"code": int(code), "numbers": {}})


@pytest.mark.parametrize("code", SITES_OWN)
def test_a_code_takes_its_own_numbers_and_no_others(code: Code) -> None:
    own = dict.fromkeys(settings_of(code), 2.0)
    assert DECLARATION.rebuild(TRAIN, {"code": int(code), "numbers": own}) == {"code": int(code), "numbers": own}
    assert DECLARATION.rebuild(TRAIN, {"code": int(code)}) == {"code": int(code), "numbers": {}}
    for other in ({"patients": 4.0}, {"unknown ": 1.0}, {"text": "x"}):
        with pytest.raises(PrivacyRefusal, match="may not leave the site"):
            DECLARATION.rebuild(TRAIN, {"code": int(code), "numbers": {**own, **other}})
    for beside in ("update", "text", "reason", "round"):
        with pytest.raises(PrivacyRefusal, match="holds more than its numbers"):
            DECLARATION.rebuild(TRAIN, {"code": int(code), "numbers": own, beside: 1})


@pytest.mark.parametrize("masking", [None, Settings()], ids=["open", "masked"])
@pytest.mark.parametrize("code", [code for code in SITES_OWN if figures_of(code)])
def test_a_figure_of_a_sites_data_leaves_with_no_code(code: Code, masking: Settings | None) -> None:
    study = made_up_study()
    declaration = Declaration(study.masked(masking) if masking else study)
    for figure in figures_of(code):
        with pytest.raises(PrivacyRefusal, match=f"holds '{figure}', which may not leave the site"):
            declaration.rebuild(TRAIN, {"code": int(code), "numbers": {figure: 2.0}})


@pytest.mark.parametrize("value", ["three", "3", math.nan, -math.inf, True, [3], {"x": 1}, np.float64(3), np.ones(1)])
def test_a_number_beside_a_code_is_a_number(value: Any) -> None:
    with pytest.raises(PrivacyRefusal, match="not a finite number"):
        DECLARATION.rebuild(JOIN, {"code": int(Code.SMALL_SUMS), "numbers": {"sites": value, "needed": 9}})
    with pytest.raises(PrivacyRefusal, match="not what was declared"):
        DECLARATION.rebuild(JOIN, {"code": int(Code.LABELS), "numbers": "3 of 9"})


@given(st.sampled_from(SITES_OWN), st.data())
def test_whatever_number_is_let_out_can_be_put_into_words_at_the_server(code: Code, data: st.DataObject) -> None:
    values = st.none() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    numbers = {name: data.draw(values, label=name) for name in settings_of(code)}
    try:
        rebuilt = DECLARATION.rebuild(JOIN, {"code": int(code), "numbers": numbers})
    except PrivacyRefusal:
        return
    assert str(Refusal(code, **rebuilt["numbers"]))


def test_names_are_the_declared_ones_and_not_look_alikes_that_carry_more() -> None:
    name = Words(FIRST)
    name.hidden = "patient 4711"
    answer = changed_update(lambda update: update.update({name: update.pop(FIRST)}))
    assert type(next(key for key in answer["update"] if key == FIRST)) is Words
    part = Words("round")
    answer[part] = answer.pop("round")
    try:
        rebuilt = DECLARATION.rebuild(TRAIN, answer)
    except PrivacyRefusal:
        return
    check_only_declared(TRAIN, rebuilt)


def test_a_mapping_of_another_kind_becomes_a_plain_one() -> None:
    rebuilt = DECLARATION.rebuild(TRAIN, {**good(TRAIN), "update": UserDict(good(TRAIN)["update"])})
    check_only_declared(TRAIN, rebuilt)


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-5, 60)
    | st.floats()
    | st.text(max_size=10)
    | st.sampled_from(["0f" * 32, np.ones(1), np.ones(1, np.float32), np.ones(SENT[FIRST], np.float32), np.array("x")])
    | st.sampled_from([b"", (), np.float64(1), object()])
)
NAMES = st.sampled_from(
    ["code", "numbers", "round", "model", "update", "tally", "validation", "scores", "n", FIRST, LOCAL[0], "unknown"]
) | st.text(max_size=4)
JUNK = st.recursive(
    SCALARS, lambda inner: st.dictionaries(NAMES, inner, max_size=4) | st.lists(inner, max_size=2), max_leaves=8
)


@given(st.sampled_from(OPEN_TASKS), st.dictionaries(NAMES, JUNK, max_size=6))
def test_junk_is_refused_or_comes_out_as_what_was_declared(task: str, junk: dict[str, Any]) -> None:
    try:
        rebuilt = DECLARATION.rebuild(task, junk)
    except PrivacyRefusal:
        return
    check_only_declared(task, rebuilt)


@given(st.sampled_from(OPEN_TASKS), st.data())
def test_a_good_answer_with_something_changed_is_refused_or_still_only_what_was_declared(
    task: str, data: st.DataObject
) -> None:
    """Nearer to the mark than junk: mostly right, with one entry somewhere exchanged, added or taken away."""
    answer = good(task)
    inner = [value for value in answer.values() if isinstance(value, dict)]
    place = data.draw(st.sampled_from([answer, *inner]) if inner else st.just(answer))
    name = data.draw(st.sampled_from(list(place)) | NAMES) if place else data.draw(NAMES)
    if data.draw(st.booleans()):
        place.pop(name, None)
    else:
        place[name] = data.draw(JUNK)
    try:
        rebuilt = DECLARATION.rebuild(task, answer)
    except PrivacyRefusal:
        return
    check_only_declared(task, rebuilt)


def test_items_name_everything_with_shape_and_bytes() -> None:
    answer = {"code": 0, "model": "0f" * 32, "update": {"w": np.zeros((2, 3), np.float32)}, "scores": {"auc": None}}
    assert items_of(answer) == [
        ("code", [], 8),
        ("model", [], 64),
        ("update/w", [2, 3], 24),
        ("scores/auc", [], 8),
    ]
    found = {name: size for name, _, size in items_of(DECLARATION.rebuild(TRAIN, good(TRAIN)))}
    assert {f"update/{name}" for name in SENT} <= found.keys()
    assert sum(size for name, size in found.items() if name.startswith("update/")) == 4 * sum(
        math.prod(shape) for shape in SENT.values()
    )


def test_the_table_for_people_has_a_row_for_every_part_of_every_task() -> None:
    rows = DECLARATION.rows()
    assert {(row["task"], row["part"]) for row in rows} == {
        (task, part) for task in OPEN_TASKS for part in good(task) if part != "code"
    }
    values = sum(math.prod(shape) for shape in SENT.values())
    assert f"{len(SENT)} tensors, {values:,} float32 values" in {row["content"] for row in rows}
