from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.site.made_up_sites import made_up_study

from crossward.federation.errors import BadInput, CrosswardError
from crossward.methods.registry import available, create, options_of
from crossward.privacy.secagg.settings import Settings
from crossward.site.participant import Plugs
from crossward.site.study import Study

OPTIONS = made_up_study("fedprox").options()
TASK = OPTIONS["task"]


def difference(change: dict[str, Any]) -> str:
    """The changed entries alone, to name a test by."""
    ((part, value),) = list(change.items())[:1]
    before = OPTIONS[part]
    if isinstance(value, dict) and isinstance(before, dict):
        value = {name: each for name, each in value.items() if before.get(name, ...) != each}
    return f"{part}-{value}"


def unlike_default(default: Any) -> Any:
    """Another value of an option, where one can be made from the default alone."""
    return default / 2 + 0.125 if isinstance(default, float) else default


@pytest.mark.parametrize("method", sorted(available()))
def test_a_study_of_every_method_survives_the_way_through_a_job(method: str) -> None:
    changed = {name: unlike_default(default) for name, (_, default) in options_of(available()[method]).items()}
    study = replace(
        made_up_study(create(method, **changed), rounds=7, participation=0.5, quorum=2, seed=11, clip=1.5, steps=3),
        plugs=Plugs(block="none", head="softmax"),
    )
    back = Study.from_options(json.loads(json.dumps(study.options())))
    assert back == study
    assert back.digest() == study.digest()
    assert type(back.task.classes) is tuple
    assert {name: getattr(back.method, name) for name in changed} == changed


@pytest.mark.parametrize("method", sorted(available()))
def test_the_usual_study_of_every_method_survives_too(method: str) -> None:
    study = made_up_study(method)
    assert Study.from_options(study.options()) == study


def test_options_are_plain_values_and_are_left_as_they_were() -> None:
    options = copy.deepcopy(OPTIONS)
    assert json.loads(json.dumps(options)) == options
    Study.from_options(options)
    assert options == OPTIONS


@pytest.mark.parametrize("part", ["method", "options", "task", "training", "plugs"])
def test_a_missing_part_is_refused(part: str) -> None:
    with pytest.raises(BadInput, match="crossward job export"):
        Study.from_options({name: value for name, value in OPTIONS.items() if name != part})


@pytest.mark.parametrize("name", ["classes", "channels", "size", "rounds"])
def test_a_task_that_lacks_something_is_refused(name: str) -> None:
    task = {key: value for key, value in OPTIONS["task"].items() if key != name}
    with pytest.raises(BadInput, match=name):
        Study.from_options({**OPTIONS, "task": task})


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("task", {"epsilon": 3}),
        ("training", {"lr": 0.1}),
        ("plugs", {"neck": "none"}),
        ("options", {"nu": 0.1}),
    ],
)
def test_an_unknown_setting_is_refused(part: str, change: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match=next(iter(change))):
        Study.from_options({**OPTIONS, part: {**OPTIONS[part], **change}})


def test_an_unknown_part_is_refused_by_name() -> None:
    with pytest.raises(BadInput, match="does not know: custom, secagg"):
        Study.from_options({**OPTIONS, "secagg": True, "custom": {}})


def test_fdse_reckons_with_one_hospital_that_works_together_with_the_server() -> None:
    """When the job is made, and when a site reads it."""
    study = made_up_study("fdse").masked(Settings())
    assert Study.from_options(study.options()) == study
    options = study.options()
    options["masking"] |= {"colluders": 2}
    for make in (lambda: made_up_study("fdse").masked(Settings(colluders=2)), lambda: Study.from_options(options)):
        with pytest.raises(BadInput, match=r"fdse .*with 1 hospital.* not 2"):
            make()


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(BadInput, match="no method 'fedprix'"):
        Study.from_options({**OPTIONS, "method": "fedprix"})


@pytest.mark.parametrize(
    "change",
    [
        {"method": 5},
        {"method": None},
        {"method": ["fedavg"]},
        {"options": None},
        {"options": []},
        {"options": {"mu": "0.1"}},
        {"options": {"mu": True}},
        {"task": None},
        {"task": "task"},
        {"task": TASK | {"rounds": "3"}},
        {"task": TASK | {"rounds": 0}},
        {"task": TASK | {"rounds": 2.5}},
        {"task": TASK | {"size": "32"}},
        {"task": TASK | {"channels": "1"}},
        {"task": TASK | {"classes": 3}},
        {"task": TASK | {"classes": "abc"}},
        {"task": TASK | {"classes": [1, 2]}},
        {"training": None},
        {"training": {"learning_rate": "0.1"}},
        {"training": {"epochs": 0}},
        {"training": {"batch_size": 2.5}},
        {"plugs": None},
        {"plugs": {"block": 7}},
        {"participation": "half"},
        {"participation": None},
        {"participation": [1]},
        {"quorum": "2"},
        {"quorum": 1.5},
        {"quorum": True},
        {"quorum": [2]},
    ],
    ids=difference,
)
def test_a_part_of_the_wrong_kind_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(BadInput):
        Study.from_options({**OPTIONS, **change})


@pytest.mark.parametrize("options", [{}, {"study": OPTIONS}])
def test_what_is_no_study_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(BadInput):
        Study.from_options(options)


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.sampled_from(list(OPTIONS)), JUNK)
def test_junk_in_any_part_is_a_study_or_a_plain_refusal(part: str, junk: Any) -> None:
    try:
        study = Study.from_options({**OPTIONS, part: junk})
    except CrosswardError:
        return
    assert Study.from_options(study.options()).digest() == study.digest()


@pytest.mark.parametrize(
    "change",
    [
        {"participation": 0.5},
        {"quorum": 1},
        {"method": "fedavg", "options": {}},
        {"training": {**OPTIONS["training"], "seed": 1}},
        {"task": {**OPTIONS["task"], "classes": OPTIONS["task"]["classes"][::-1]}},
    ],
    ids=difference,
)
def test_whatever_changes_the_result_changes_the_digest(change: dict[str, Any]) -> None:
    assert Study.from_options({**OPTIONS, **change}).digest() != Study.from_options(OPTIONS).digest()
