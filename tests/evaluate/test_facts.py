from __future__ import annotations

import copy
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import crossward
from crossward.evaluate import facts
from crossward.evaluate.facts import finite, read_result, versions, write_result
from crossward.evaluate.transfer import measured
from crossward.federation.errors import BadInput, StorageFailure

MINIMAL = {
    "method": "fedavg",
    "data": {"path": "data", "kind": "pack", "classes": ["a", "b"], "phantom": True, "size": 32},
    "options": {},
    "rounds": [{"round": 1, "sites": {"north": {"status": "absent"}}}],
    "sites": {"north": {"n_train": 3, "n_test": 2, "accuracy": 0.5}},
    "summary": {"avg": 0.5, "std": None, "all": 0.5, "worst_site": "north"},
    "privacy": {"secagg": False, "dp": False, "epsilon": {"north": None}},
    "versions": {},
    "seconds": 1.5,
}


def without(*path):
    broken = copy.deepcopy(MINIMAL)
    part = broken
    for key in path[:-1]:
        part = part[key]
    del part[path[-1]]
    return broken


def test_finite_makes_plain_values():
    given_values = {
        "numpy": np.float32(0.5),
        "count": np.int64(3),
        "flag": np.bool_(True),
        "torch": torch.tensor(2.0, requires_grad=True),
        "array": np.eye(2, dtype=int),
        "pair": (1, None),
        "path": Path("a") / "b",
        7: "a number as key",
    }
    plain = finite(given_values)
    assert plain == {
        "numpy": 0.5,
        "count": 3,
        "flag": True,
        "torch": 2.0,
        "array": [[1, 0], [0, 1]],
        "pair": [1, None],
        "path": os.path.join("a", "b"),
        "7": "a number as key",
    }
    assert type(plain["flag"]) is bool
    assert type(plain["count"]) is int
    assert json.loads(json.dumps(plain)) == plain


@pytest.mark.parametrize(
    "bad", [math.nan, -math.inf, np.float32("nan"), torch.tensor(math.inf), np.array([1.0, math.nan])]
)
def test_finite_refuses_nan_and_names_the_place(bad):
    with pytest.raises(BadInput, match=r"result\.sites\.north\.loss"):
        finite({"sites": {"north": {"loss": bad}}})


@pytest.mark.parametrize("bad", [math.nan, np.float64("inf"), torch.tensor(math.nan)])
def test_finite_maps_nan_to_null_where_a_reason_stands_beside_it(bad):
    assert finite({"auc": bad, "n": 3, "undefined": {"auc": "one class only, n=3"}})["auc"] is None
    with pytest.raises(BadInput, match=r"result\.accuracy"):
        finite({"accuracy": bad, "undefined": {"auc": "one class only, n=3"}})


def test_finite_refuses_what_json_does_not_have():
    with pytest.raises(BadInput, match=r"result\.options is of type object"):
        finite({"options": object()})


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_finite_gives_valid_json_or_refuses(value):
    try:
        plain = finite(value)
    except BadInput:
        with pytest.raises(ValueError, match="not JSON compliant"):
            json.dumps(value, allow_nan=False)
    else:
        assert json.loads(json.dumps(plain, allow_nan=False)) == plain


def test_a_written_result_reads_back(tmp_path):
    path = tmp_path / "new folder" / "result.json"
    write_result(path, MINIMAL | {"seconds": np.float32(1.5), "method": "fédavg"})
    assert read_result(path) == MINIMAL | {"method": "fédavg", "best_round": None, "cross_site": None, "warnings": []}
    assert [entry.name for entry in path.parent.iterdir()] == ["result.json"]


@pytest.mark.parametrize("fault", ["fsync", "replace"])
def test_a_failed_write_keeps_the_old_file_and_leaves_nothing_behind(tmp_path, monkeypatch, fault):
    path = tmp_path / "result.json"
    write_result(path, MINIMAL)
    before = path.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(*((facts.os, "fsync", full) if fault == "fsync" else (Path, "replace", full)))
    with pytest.raises(StorageFailure, match="disk full"):
        write_result(path, MINIMAL | {"method": "fedbn"})
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_result_that_could_not_be_read_is_not_written(tmp_path):
    with pytest.raises(BadInput, match="'summary' is missing"):
        write_result(tmp_path / "result.json", without("summary"))
    with pytest.raises(BadInput, match=r"result\.seconds is nan"):
        write_result(tmp_path / "result.json", MINIMAL | {"seconds": math.nan})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("not json", "not valid JSON"),
        ("[1, 2]", "one JSON object"),
        ('{"seconds": NaN}', "not valid JSON with finite numbers"),
        (json.dumps(without("rounds")), "'rounds' is missing"),
        (json.dumps(without("sites", "north", "accuracy")), "site 'north' is not a result: 'accuracy' is missing"),
        (json.dumps(without("sites", "north")), "no sites"),
        (json.dumps(without("summary", "worst_site")), "'worst_site' is missing"),
        (json.dumps(without("privacy", "dp")), "'dp' is missing"),
        (json.dumps(MINIMAL | {"rounds": {}}), "'rounds' is of the wrong type"),
        (json.dumps(MINIMAL | {"rounds": [3]}), "entry 1 of rounds"),
        (json.dumps(MINIMAL | {"seconds": True}), "'seconds' is of the wrong type"),
        (json.dumps(MINIMAL | {"cross_site": {"sites": ["a", "b"], "accuracy": [[1, 0]]}}), "not 2 by 2"),
        (
            json.dumps(MINIMAL | {"cross_site": {"sites": ["a"], "accuracy": [[1]], "domains": ["a"]}}),
            "'LTA' is missing",
        ),
        (json.dumps(MINIMAL | {"cross_site": {**measured(["a"], [[1]], [""]), "domains": []}}), "one domain for each"),
    ],
)
def test_a_file_that_is_not_a_result_is_refused_in_plain_words(tmp_path, content, words):
    path = tmp_path / "result.json"
    path.write_text(content)
    with pytest.raises(BadInput, match=words):
        read_result(path)


def test_a_missing_or_binary_file_is_refused(tmp_path):
    with pytest.raises(BadInput, match="No such file"):
        read_result(tmp_path / "result.json")
    (tmp_path / "scan.dcm").write_bytes(b"\x00\xff\xfe")
    with pytest.raises(BadInput, match="not valid JSON"):
        read_result(tmp_path / "scan.dcm")


def test_versions_name_what_is_installed(monkeypatch):
    found = versions()
    assert found["crossward"] == crossward.__version__
    assert found["numpy"] == np.__version__
    assert found["torch"] == torch.__version__
    assert set(found) >= {"python", "monai"}

    def missing(package):
        raise facts.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(facts.metadata, "version", missing)
    assert set(versions()) == {"crossward", "python"}
