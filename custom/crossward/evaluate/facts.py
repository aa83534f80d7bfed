"""The facts of a run: `result.json`, written whole or not at all, with finite numbers or null only."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

import crossward
from crossward.federation.errors import BadInput
from crossward.federation.storage import write_json

_NEEDED: dict[str, type | tuple[type, ...]] = {
    "method": str,
    "data": dict,
    "options": dict,
    "rounds": list,
    "sites": dict,
    "summary": dict,
    "privacy": dict,
    "versions": dict,
    "seconds": (int, float),
}
_NEEDED_OF_SITE = ("n_train", "n_test", "accuracy")
_NEEDED_OF_ROUND = ("round", "sites")
_NEEDED_OF_SUMMARY = ("avg", "std", "all", "worst_site")
_NEEDED_OF_PRIVACY = ("secagg", "dp", "epsilon")
_NEEDED_BESIDE_DOMAINS = ("LTA", "ATA", "GATA", "GASA", "CPRR")
_REMEDY = "give the folder of a finished run, or its result.json"
_PACKAGES = ("torch", "monai", "numpy", "nvflare")


def finite(obj: Any) -> Any:
    """Turns an object into plain JSON values: numpy and torch scalars and arrays, paths, tuples, nested mappings.

    NaN and infinity are refused, except where the mapping that holds them gives the reason under its own
    `undefined` key, as `score` does: there they become None.

    Raises:
        BadInput: for a number that is not finite and has no reason, or a type that JSON does not have.
    """
    return _finite(obj, "result")


def write_result(path: str | os.PathLike[str], result: Mapping[str, Any]) -> None:
    """Checks a result and writes it atomically; what `read_result` would refuse is not written."""
    write_json(Path(path), checked(result))


def read_result(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads a result file.

    Raises:
        BadInput: when there is no such file, or it is not a result.
    """
    path = Path(path)
    try:
        facts = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}; {_REMEDY}") from None
    except ValueError:
        raise BadInput(f"{path} is not valid JSON with finite numbers; {_REMEDY}") from None
    return checked(facts, what=str(path))


def checked(result: Any, *, what: str = "the result") -> dict[str, Any]:
    """A result in plain JSON values; `best_round`, `cross_site` and `warnings` are filled in where they are missing.

    Raises:
        BadInput: naming the first thing that keeps it from being a result; `what` says where it came from.
    """
    facts = finite(result)
    _check(facts, what)
    return {"best_round": None, "cross_site": None, "warnings": [], **facts}


def versions() -> dict[str, str]:
    """The versions that a reader needs to repeat the run; a package that is not installed is left out."""
    found = {"crossward": crossward.__version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _finite(obj: Any, where: str) -> Any:
    if obj is None or isinstance(obj, bool | int | str):
        return obj
    if isinstance(obj, float):
        if not math.isfinite(obj):
            raise BadInput(f"{where} is {obj}: give a finite number, or None with the reason under 'undefined'")
        return float(obj)
    if isinstance(obj, Mapping):
        reasons = obj.get("undefined")
        excused = reasons if isinstance(reasons, Mapping) else {}
        return {
            str(key): None if key in excused and _is_not_finite(value) else _finite(value, f"{where}.{key}")
            for key, value in obj.items()
        }
    if isinstance(obj, list | tuple):
        return [_finite(value, f"{where}[{index}]") for index, value in enumerate(obj)]
    if isinstance(obj, os.PathLike):
        return os.fspath(obj)
    if hasattr(obj, "tolist"):  # numpy and torch, without importing either
        return _finite(obj.tolist(), where)
    raise BadInput(f"{where} is of type {type(obj).__name__}, which JSON does not have: give plain values")


def _is_not_finite(value: Any) -> bool:
    plain = value.tolist() if hasattr(value, "tolist") else value
    return isinstance(plain, float) and not math.isfinite(plain)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)


def _check(facts: Any, what: str) -> None:
    """Raises BadInput, naming the first thing that keeps `facts` from being a result."""
    if not isinstance(facts, dict):
        raise BadInput(f"{what} is not a result: it has to be one JSON object; {_REMEDY}")
    for key, kind in _NEEDED.items():
        _need(facts, (key,), what)
        if not isinstance(facts[key], kind) or isinstance(facts[key], bool):
            raise BadInput(f"{what} is not a result: {key!r} is of the wrong type; {_REMEDY}")
    _need(facts["summary"], _NEEDED_OF_SUMMARY, f"{what}, summary")
    _need(facts["privacy"], _NEEDED_OF_PRIVACY, f"{what}, privacy")
    if not facts["sites"]:
        raise BadInput(f"{what} is not a result: it has no sites; {_REMEDY}")
    for name, site in facts["sites"].items():
        _need(site, _NEEDED_OF_SITE, f"{what}, site {name!r}")
    for index, entry in enumerate(facts["rounds"], start=1):
        _need(entry, _NEEDED_OF_ROUND, f"{what}, entry {index} of rounds")
    if facts.get("cross_site") is not None:
        _check_matrix(facts["cross_site"], what)


def _check_matrix(matrix: Any, what: str) -> None:
    _need(matrix, ("sites", "accuracy"), f"{what}, cross_site")
    width, rows = len(matrix["sites"]), matrix["accuracy"]
    if (
        not isinstance(rows, list)
        or len(rows) != width
        or any(not isinstance(r, list) or len(r) != width for r in rows)
    ):
        raise BadInput(f"{what} is not a result: the cross_site matrix is not {width} by {width}, one row per site")
    if "domains" in matrix:  # results of earlier versions have the matrix alone
        _need(matrix, _NEEDED_BESIDE_DOMAINS, f"{what}, cross_site")
        if not isinstance(matrix["domains"], list) or len(matrix["domains"]) != width:
            raise BadInput(f"{what} is not a result: cross_site does not give one domain for each of {width} sites")


def _need(part: Any, keys: tuple[str, ...], what: str) -> None:
    if not isinstance(part, dict):
        raise BadInput(f"{what} is not a result: an object was expected; {_REMEDY}")
    for key in keys:
        if key not in part:
            raise BadInput(f"{what} is not a result: {key!r} is missing; {_REMEDY}")
