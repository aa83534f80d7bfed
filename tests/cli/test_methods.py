"""What ``crossward methods`` says that others learn, held against what really leaves and what the rules are."""

from __future__ import annotations

from typing import Any

import pytest

from crossward.cli.methods import describe
from crossward.methods import Task, available, create
from tests.cli.conftest import Command

TASK = Task(classes=("a", "b", "c", "d"), channels=1, size=32, rounds=1, width=1.0)
FEDERATED = sorted(set(available()) - {"local"})


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, Any]]:
    return {name: describe(create(name)) for name in available()}


def said(lines: list[str], *words: str) -> bool:
    """Whether one line has all the words."""
    return any(all(word in line for word in words) for line in lines)


def test_every_method_says_who_learns_what(rows: dict[str, dict[str, Any]]) -> None:
    for name, row in rows.items():
        for mode in ("open", "masked"):
            assert {"server", "sites"} <= row[mode].keys()
            for who in ("server", "sites"):
                lines = row[mode][who]
                assert lines, (name, mode, who)
                assert len(lines) == len(set(lines)), (name, mode, who)


@pytest.mark.parametrize("name", sorted(available()))
def test_under_masks_the_server_learns_nothing_that_is_one_sites(name: str, rows: dict[str, dict[str, Any]]) -> None:
    assert said(rows[name]["open"]["server"], "every site's", "numbers of training images")
    masked = rows[name]["masked"]["server"]
    assert said(masked, "summed over the sites", "numbers of training images")
    assert said(masked, "summed over the sites", "validation images")
    assert not said(masked, "every site's")
    # Of what a server has in the open, all that a site reports is among what is summed, compared or under pads.
    updates = [line for line in rows[name]["open"]["server"] if "(" in line]
    for line in updates:
        for place in line.rpartition("(")[2].rstrip(")").split(", "):
            assert said(masked, place), place
    assert bool(updates) == (name != "local")


@pytest.mark.parametrize("name", FEDERATED)
def test_ranges_of_the_fixed_point_are_public(name: str, rows: dict[str, dict[str, Any]]) -> None:
    masked = rows[name]["masked"]
    assert said(masked["server"], "cut off")
    assert said(masked["server"], "first round", "power of two")
    assert said(masked["sites"], "range")
    assert not said(rows[name]["open"]["server"], "cut off")
    assert not said(rows["local"]["masked"]["server"], "cut off")


@pytest.mark.parametrize("name", ["fedavg", "fedbn", "fedprox", "rfeddis"])
def test_of_plain_averages_the_server_learns_sums_and_counts_only(name: str, rows: dict[str, dict[str, Any]]) -> None:
    masked = rows[name]["masked"]
    assert said(masked["server"], "summed over the sites: update times the number of training images")
    assert not said(masked["server"], "cosine")
    assert masked["options"] == {}
    assert masked["fewest_sites"] == 3
    assert [line for line in masked["sites"] if "range" not in line] == rows[name]["open"]["sites"]


def test_f2dc_shows_the_sum_of_its_weights_too(rows: dict[str, dict[str, Any]]) -> None:
    row = rows["f2dc"]
    assert said(row["masked"]["server"], "summed over the sites", "e_k", "shared tensors, shared statistics")
    assert "the sum of the weights e_k" in row["masked"]["server"]
    assert said(row["masked"]["sites"], "how many training images all sites have together")


def test_fedcode_shows_groups_and_prototypes_of_three_or_more(rows: dict[str, dict[str, Any]]) -> None:
    row = rows["fedcode"]
    masked = row["masked"]
    assert said(masked["server"], "how many sites hold each class")
    assert said(masked["server"], "cosine", "style", "rotated")
    assert said(masked["server"], "which sites are in one style group")
    assert said(masked["server"], "summed over the sites", "every class held by 3 or more sites", "prototypes")
    assert said(masked["sites"], "mean feature of every class held by 3 or more sites")
    assert said(masked["sites"], "mean style of every group", "3 or more sites")
    assert said(row["open"]["server"], "every site's mean feature of every class that it holds")
    assert said(row["open"]["sites"], "every class held by any site")
    assert masked["options"] == {"holders": 3, "members": 3}


def test_fdse_shows_cosines_of_merged_blocks_and_nobodys_mixture(rows: dict[str, dict[str, Any]]) -> None:
    row = rows["fdse"]
    masked = row["masked"]
    model = create("fdse").build(TASK)
    blocks = create("fdse", layers="merged").algebra(TASK, model).blocks()
    for scope, place in (("shared", "shared tensors"), ("personal", "personal tensors")):
        count = sum(key.startswith(f"{scope}/") for key in blocks)
        # One over the root of 512 is 0.0442.
        assert said(masked["server"], "cosine", place, f"in {count} blocks", "0.044")
    assert said(masked["server"], "personal tensors", "no site's own", "under pads")
    assert said(masked["server"], "weight of every site", "mean length")
    assert said(masked["sites"], "its own mixture", "at least 2 others")
    assert said(row["open"]["sites"], "its own mixture")
    assert masked["options"] == {"layers": "merged", "heard": 3}
    assert masked["fewest_sites"] == 4


def test_the_names_of_a_report_are_still_listed(rows: dict[str, dict[str, Any]]) -> None:
    assert rows["local"]["server_learns"] == ["n", "train/correct", "train/loss", "train/seen"]
    assert rows["fedcode"]["server_learns"][:4] == [
        "its update of every shared tensor",
        "its update of the shared statistics",
        "prototypes",
        "style",
    ]
    assert {"shared/norms", "its personal tensors"} <= set(rows["fdse"]["server_learns"])


def test_the_text_says_it_method_by_method_and_what_is_common_once(crossward: Command) -> None:
    done = crossward("methods")
    assert done.code == 0, done.err
    blocks = done.out.split(", normalisation: ")
    assert len(blocks) == 1 + len(available())
    last, common = blocks.pop().split("with every method")
    blocks.append(last)
    for name, text in zip(sorted(available()), blocks[1:], strict=True):
        assert ("the server learns, under secure aggregation:" in text) == (name != "local")
        assert "validation images" not in text
    assert common.count("validation images") == 2
    assert 'at least 4 sites, layers="merged", heard=3' in done.out
    assert "not part of this version" not in done.out


def test_what_differential_privacy_changes_is_said_once_where_it_is_common(
    rows: dict[str, dict[str, Any]], crossward: Command
) -> None:
    assert {name: row["private"]["options"] for name, row in rows.items() if row["private"]["options"]} == {
        "fdse": {"consistency": 0.0}
    }
    common = rows["local"]["private"]["changes"]
    assert said(common, "GroupNorm")
    own = {name: [line for line in row["private"]["changes"] if line not in common] for name, row in rows.items()}
    assert {name for name, lines in own.items() if lines} == {"fdse", "fedcode", "rfeddis"}
    assert all(set(common) <= set(row["private"]["changes"]) for row in rows.values())
    out = crossward("methods").out
    assert "under differential privacy (consistency=0.0):\n    - consistency is 0" in out
    for line in [*common, *(line for lines in own.values() for line in lines)]:
        assert out.count(f"    - {line}\n") == 1, line
