"""FLARE job folders: configuration only, never code and never a path of a site."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from crossward.federation.errors import BadInput, StorageFailure
from crossward.federation.storage import read_json, write_json
from crossward.flare import names
from crossward.methods.base import Task
from crossward.methods.registry import available, create
from crossward.privacy.secagg.settings import Settings
from crossward.site.messages import OPEN_TASKS, TASKS
from crossward.site.participant import Plugs
from crossward.site.study import Study
from crossward.site.trainer import Training

META: Final = "meta.json"
SERVER: Final = "app/config/config_fed_server.json"
CLIENT: Final = "app/config/config_fed_client.json"

NOTES: Final = "crossward"
"""Our own entry in a job's metadata, which FLARE keeps and lists as it is.

A job whose server was killed stays RUNNING in FLARE's store and cannot be downloaded any more: the study is noted
here so that such a job can be written anew.
"""

PHANTOM_CLASSES: Final = ("effusion", "nodule", "normal", "pneumothorax")
SMALLEST_FEDERATION: Final = 2

_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*$")


@dataclass(frozen=True, kw_only=True)
class Timing:
    """How long the server waits, in seconds.

    Attributes:
        join: for sites to read their images and answer the first task.
        round: for a round, at the longest.
        grace: for the rest of the sites once enough have reported.
        step: likewise, for a small message of secure aggregation.
    """

    join: int = 600
    round: int = 7200
    grace: int = 300
    step: int = 30

    def __post_init__(self) -> None:
        for name, seconds in asdict(self).items():
            # FLARE's tasks take whole seconds, and 0 would mean for ever.
            if isinstance(seconds, bool) or not isinstance(seconds, int) or seconds < 1:
                raise BadInput(f"the time for '{name}' is {seconds}, and must be at least 1 second")


def usual_study(method: str, *, secagg: bool = True) -> Study:
    """The study of the job folders that come with Crossward: the phantom hospitals with default settings."""
    task = Task(classes=PHANTOM_CLASSES, channels=1, size=32, rounds=10)
    study = Study(method=create(method), task=task, training=Training(), plugs=Plugs(), quorum=SMALLEST_FEDERATION)
    return study.masked(Settings()) if secagg else study


def federated_methods() -> list[str]:
    """The methods that have a job: all but training alone, for which nobody needs a server."""
    return [name for name in available() if name != "local"]


def export(
    study: Study,
    out: Path,
    *,
    timing: Timing,
    min_sites: int,
    gpus: int = 0,
    name: str | None = None,
    resume: str = "",
) -> Path:
    """Write the job folder of a study.

    Args:
        study: what to run.
        out: folder to make; must not exist, or be empty.
        timing: how long the server waits.
        min_sites: sites that must be connected before FLARE starts the job.
        gpus: GPUs that every site reserves for the job.
        name: of the job in FLARE's lists; crossward-METHOD if not given.
        resume: the run to go on with; empty for a new one.

    Raises:
        BadInput: the folder is occupied, or the numbers do not fit together.
    """
    _check(study, min_sites=min_sites, gpus=gpus)
    meta = {
        "name": name or f"crossward-{study.method.name}",
        # FLARE applies @default to every site, which a job for all sites could not name one by one.
        "resource_spec": {"@default": {"num_of_gpus": gpus}} if gpus else {},
        "min_clients": min_sites,
        "deploy_map": {"app": ["@ALL"]},
        "scope": names.SCOPE,
        NOTES: {
            "digest": study.digest(),
            "resume": resume,
            "timing": asdict(timing),
            "study": study.options(),
        },
    }
    return _write(meta, out)


def _check(study: Study, *, min_sites: int, gpus: int) -> None:
    if min_sites < 1:
        raise BadInput(f"a job for {min_sites} sites cannot run; --min-sites is at least 1")
    if study.quorum is not None and not 1 <= study.quorum <= min_sites:
        raise BadInput(
            f"a round that needs {study.quorum} reports cannot close with {min_sites} sites; "
            "choose a quorum from 1 to the number of sites the job starts with (--min-sites)"
        )
    if gpus < 0:
        raise BadInput(f"{gpus} GPUs cannot be reserved; use 0 for none")


def _write(meta: Mapping[str, Any], out: Path) -> Path:
    """Write the three files of a job; both halves get the study from the notes in its metadata."""
    notes = meta[NOTES]
    _check_free(out)
    arguments = {"study": notes["study"], "timing": notes["timing"], "resume": notes["resume"]}
    server = {
        "format_version": 2,
        # FLARE's default of 2 seconds would be added to every phase of a round.
        "server": {"task_request_interval": 0.1},
        "workflows": [{"id": "federation", "path": names.CONTROLLER, "args": arguments}],
        "components": [],
    }
    executor = {"path": names.EXECUTOR, "args": {"study": notes["study"]}}
    client = {
        "format_version": 2,
        "executors": [{"tasks": list(TASKS if notes["study"].get("masking") else OPEN_TASKS), "executor": executor}],
        "components": [],
        "task_data_filters": [],
        "task_result_filters": [],
    }
    for path, content in ((META, dict(meta)), (SERVER, server), (CLIENT, client)):
        write_json(out / path, content)
    # Our writer makes private folders; a job holds no secret and is passed on.
    (out / "app" / "config").chmod(0o755)
    return out


def _check_free(out: Path) -> None:
    if not _NAME.match(out.name):
        raise BadInput(f"FLARE does not take a job folder called '{out.name}'; use letters, digits, dots and dashes")
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise BadInput(f"{out} is there already and not empty; choose another --out")
    except OSError as error:
        raise BadInput(f"{out} cannot be looked into ({error.strerror}); choose another --out") from error


def read_study(job: Path) -> Study:
    """Read the study of a job folder, and check that server, sites and metadata are given the same one.

    Raises:
        BadInput: it is not a job folder of Crossward, or was changed by hand in one place only.
    """
    meta, at_server, at_sites = _part(job, META), _part(job, SERVER), _part(job, CLIENT)
    _refuse_foreign_code(job, at_server, names.SERVER_CLASSES)
    _refuse_foreign_code(job, at_sites, names.SITE_CLASSES)
    try:
        server = at_server["workflows"][0]["args"]["study"]
        client = at_sites["executors"][0]["executor"]["args"]["study"]
        noted = notes_of(meta)
        same = server == client == noted["study"]
    except (KeyError, IndexError, TypeError) as error:
        raise BadInput(f"{job} is not a job of Crossward; write one with: crossward job export") from error
    if not same:
        raise BadInput(
            f"{job} gives the server, the sites and {META} different studies; write it anew with: crossward job export"
        )
    study = Study.from_options(server)
    if study.digest() != noted["digest"]:
        raise BadInput(f"{job} was changed by hand, or by another version; write it anew with: crossward job export")
    return study


def _refuse_foreign_code(job: Path, configuration: Mapping[str, Any], allowed: Sequence[str]) -> None:
    """Say at once what every hospital would refuse later, and only in its own log."""
    if (job / "app" / "custom").exists():
        raise BadInput(f"{job} carries code (app/custom), which no hospital takes; remove it")
    for named in _class_paths(configuration):
        if named not in allowed:
            raise BadInput(
                f"{job} names the class {named}, which no hospital allows; write it with: crossward job export"
            )


def _class_paths(configuration: Any) -> Iterator[str]:
    """Every class that a configuration asks for, however deep."""
    if isinstance(configuration, Mapping):
        if isinstance(configuration.get("path"), str):
            yield configuration["path"]
        parts: Iterable[Any] = configuration.values()
    else:
        parts = configuration if isinstance(configuration, list) else ()
    for part in parts:
        yield from _class_paths(part)


def _part(job: Path, name: str) -> dict[str, Any]:
    try:
        return read_json(job / name)
    except StorageFailure as error:
        raise BadInput(f"{job} is not a job folder: {error}. Write one with: crossward job export") from error


def notes_of(meta: Mapping[str, Any]) -> dict[str, Any]:
    """What Crossward noted in a job's metadata; empty for a job of somebody else."""
    notes = meta.get(NOTES)
    return dict(notes) if isinstance(notes, dict) else {}


def with_resume(job: Path, run: str, out: Path) -> Path:
    """Copy a job folder to go on with an earlier run; nothing else about it is changed.

    Raises:
        BadInput: it is not a job of Crossward, or the new folder is occupied.
    """
    read_study(job)
    _check_free(out)
    # FLARE leaves its signatures in a folder that was submitted; they are of the job as it was.
    shutil.copytree(job, out, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".__nvfl_*"))
    meta, server = _part(job, META), _part(job, SERVER)
    meta[NOTES]["resume"] = server["workflows"][0]["args"]["resume"] = run
    write_json(out / META, meta)
    write_json(out / SERVER, server)
    return out


def from_meta(meta: Mapping[str, Any], run: str, out: Path) -> Path:
    """Write a job folder from the metadata that FLARE keeps of it, to go on with an earlier run.

    Raises:
        BadInput: the job is not one of Crossward.
    """
    notes = notes_of(meta)
    try:
        kept = {key: meta[key] for key in ("name", "resource_spec", "min_clients", "deploy_map", "scope")}
        noted = {key: notes[key] for key in ("digest", "timing", "study")}
    except KeyError as error:
        raise BadInput(f"the job's metadata does not hold its study ({error} is missing); submit it anew") from error
    return _write({**kept, NOTES: {**noted, "resume": run}}, out)
