"""The folder of a run: held by one process at a time, and resumed only with what it was started with."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from crossward.federation.errors import BadInput
from crossward.federation.storage import read_json, write_json
from crossward.imaging.data import Cohort
from crossward.site.study import Study

DESCRIPTION = "run.json"
_PAUSE = 0.5


class Busy(BadInput):
    """Another process holds the folder."""


def hold(lock: Path, *, patience: float = 0.0) -> int:
    """Take a lock for this process alone; closing the descriptor that it gives lets go of it.

    Args:
        lock: the file to lock, made if it is not there.
        patience: seconds to wait for another process that holds it, which may be about to end.

    Raises:
        BlockingIOError: another process holds it still.
    """
    descriptor = os.open(lock, os.O_CREAT | os.O_RDWR, 0o600)
    give_up = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= give_up:
                os.close(descriptor)
                raise
            time.sleep(_PAUSE)
        else:
            return descriptor


def clear_leftovers(folder: Path) -> None:
    """Remove the half-written files of a process that was killed; only for who holds the folder."""
    for leftover in folder.rglob(".*.part"):
        leftover.unlink(missing_ok=True)


@contextmanager
def owned(folder: Path, *, patience: float = 0.0) -> Iterator[None]:
    """Hold the run folder for this process alone."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = hold(folder / ".lock", patience=patience)
    except BlockingIOError:
        raise Busy(f"another process is running in {folder}; wait for it, or choose another --out") from None
    except OSError as error:
        raise BadInput(f"cannot write to {folder} ({error.strerror}); choose another --out") from error
    try:
        clear_leftovers(folder)
        yield
    finally:
        os.close(lock)


def check_free(folder: Path, *, resume: bool) -> None:
    """Refuse to start a run where there is one, and to resume one where there is none."""
    there = (folder / DESCRIPTION).exists()
    if resume and not there:
        raise BadInput(f"there is no run to resume in {folder}; leave --resume out to start one")
    if there and not resume:
        raise BadInput(f"{folder} holds a run already; add --resume to go on with it, or choose another --out")


def claim(folder: Path, study: Study, cohort: Cohort, *, resume: bool) -> None:
    """Write down what is run here, or check that it is what was run here before."""
    check_free(folder, resume=resume)
    if resume:
        check_same(folder, study, cohort)
    else:
        write_json(folder / DESCRIPTION, _description(study, cohort))


def check_same(folder: Path, study: Study, cohort: Cohort) -> None:
    """Refuse a run of another study, or on other images.

    Raises:
        BadInput: with the first option that differs.
    """
    before = read_json(folder / DESCRIPTION)
    # An earlier version had fewer options: what it did not name is as if left at its default.
    before["options"] = Study.from_options(before["options"]).options()
    for name, old, new in _differences(before, _description(study, cohort), ""):
        raise BadInput(
            f"{folder} was run with {name} = {old} and not {new}; use the same options and data, or another --out"
        )


def _description(study: Study, cohort: Cohort) -> dict[str, Any]:
    return {"options": study.options(), "sites": {name: _fingerprint(cohort, name) for name in cohort.sites}}


def _fingerprint(cohort: Cohort, site: str) -> dict[str, Any]:
    """Which images a site has in which split, so that a run is not resumed on others."""
    data = cohort.sites[site]
    listing = [[split.ids, split.patients, split.labels.tolist()] for split in (data.train, data.val, data.test)]
    return {
        "train": len(data.train),
        "images": hashlib.sha256(json.dumps(listing).encode()).hexdigest()[:16],
    }


def _differences(before: Any, now: Any, name: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(before, dict) and isinstance(now, dict):
        for key in {**now, **before}:
            yield from _differences(before.get(key), now.get(key), f"{name}.{key}" if name else key)
    elif before != now:
        yield name, before, now
