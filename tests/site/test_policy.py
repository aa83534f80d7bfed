from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossward.site.payloads import PAYLOADS
from crossward.site.policy import Policy
from crossward.site.troubles import Code, Refusal

KIT = Path("/kits/alder")
WHOLE = {"data_root": "/data/films", "state_root": "/var/state", "publish_scores": False, "minimum_cell": 25}
KINDS = {
    "data_root": str,
    "state_root": str,
    "publish_scores": bool,
    "minimum_cell": int,
    "secure_aggregation": bool,
    "minimum_sites": int,
    "max_epsilon": float,
    "max_delta": float,
    "min_noise": float,
    "privacy_unit": str,
    "payloads": list,
}
LEAST = {"minimum_cell": 0, "minimum_sites": 2, "max_epsilon": 0, "max_delta": 0, "min_noise": 0}


def test_what_the_administrator_set_is_what_counts() -> None:
    policy = Policy.from_properties(WHOLE, kit=KIT)
    assert policy == Policy(
        data_root=Path("/data/films"), state_root=Path("/var/state"), publish_scores=False, minimum_cell=25
    )
    assert policy.run_folder("run-7") == Path("/var/state/runs/run-7")


def test_without_settings_there_are_no_data_and_the_state_is_in_the_kit() -> None:
    for properties in ({}, {"data_root": "", "state_root": ""}):
        policy = Policy.from_properties(properties, kit=KIT)
        assert policy == Policy(data_root=None, state_root=KIT / "state", publish_scores=True, minimum_cell=10)
        assert policy.payloads == PAYLOADS


def test_a_relative_path_counts_from_the_kit() -> None:
    policy = Policy.from_properties({"data_root": "films", "state_root": "../kept"}, kit=KIT)
    assert (policy.data_root, policy.state_root) == (KIT / "films", KIT / "../kept")


def test_the_environment_goes_before_the_kit_where_it_says_something() -> None:
    policy = Policy.from_properties(WHOLE, kit=KIT, data="/other/films", state="/other/state")
    assert (policy.data_root, policy.state_root) == (Path("/other/films"), Path("/other/state"))
    assert (policy.publish_scores, policy.minimum_cell) == (False, 25)
    empty = Policy.from_properties(WHOLE, kit=KIT, data="", state="")
    assert (empty.data_root, empty.state_root) == (Path("/data/films"), Path("/var/state"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("publish_score", True),
        ("Publish_scores", False),
        ("", ""),
        ("epsilon", 3.0),
        ("publish_scores", "false"),
        ("publish_scores", 0),
        ("publish_scores", None),
        ("minimum_cell", "10"),
        ("minimum_cell", 10.0),
        ("minimum_cell", True),
        ("minimum_cell", None),
        ("minimum_cell", -1),
        ("secure_aggregation", "no"),
        ("secure_aggregation", 0),
        ("secure_aggregation", None),
        ("minimum_sites", 1),
        ("minimum_sites", 3.0),
        ("minimum_sites", True),
        ("max_epsilon", -1.0),
        ("max_epsilon", math.inf),
        ("max_epsilon", math.nan),
        ("max_epsilon", True),
        ("max_epsilon", None),
        ("max_delta", "1e-5"),
        ("min_noise", -0.1),
        ("privacy_unit", "person"),
        ("privacy_unit", ["image"]),
        ("payloads", "update"),
        ("payloads", None),
        ("payloads", ["update", "scores"]),
        ("payloads", ["Update"]),
        ("payloads", ["update", 1]),
        ("payloads", [["update"]]),
        ("data_root", None),
        ("data_root", ["/data"]),
        ("data_root", 7),
        ("state_root", None),
        ("state_root", False),
    ],
)
def test_a_setting_that_is_not_understood_allows_nothing(name: str, value: Any) -> None:
    with pytest.raises(Refusal) as caught:
        Policy.from_properties({**WHOLE, name: value}, kit=KIT)
    assert caught.value.code is Code.POLICY


VALUES = (
    st.sampled_from(["image", "patient", "site"])
    | st.none()
    | st.booleans()
    | st.integers(-3, 30)
    | st.floats()
    | st.text(max_size=3)
    | st.lists(st.text() | st.sampled_from(PAYLOADS))
)


@given(st.dictionaries(st.sampled_from([*KINDS, "other"]) | st.text(max_size=5), VALUES))
def test_any_settings_are_understood_whole_or_refused(properties: dict[str, Any]) -> None:
    def of_kind(name: str, value: Any) -> bool:
        if KINDS[name] is float:
            return type(value) in (int, float) and 0 <= value < math.inf
        if name == "privacy_unit" and value not in ("image", "patient", "site"):
            return False
        if name == "payloads" and (type(value) is not list or set(value) - set(PAYLOADS)):
            return False
        return type(value) is KINDS[name] and (name not in LEAST or value >= LEAST[name])

    understood = all(name in KINDS and of_kind(name, value) for name, value in properties.items())
    if not understood:
        with pytest.raises(Refusal):
            Policy.from_properties(properties, kit=KIT)
        return
    policy = Policy.from_properties(properties, kit=KIT)
    assert policy.publish_scores is properties.get("publish_scores", True)
    assert policy.minimum_cell == properties.get("minimum_cell", 10)
    assert policy.secure_aggregation is properties.get("secure_aggregation", True)
    assert policy.minimum_sites == properties.get("minimum_sites", 3)
    assert policy.max_epsilon == properties.get("max_epsilon", 0.0)
    assert policy.payloads == tuple(properties.get("payloads", PAYLOADS))
    assert (policy.budget is None) == (not policy.max_epsilon)
