"""De-identification of a folder: originals are only read, and what may still name somebody is held for a person.

The output folder belongs to the site. Its sub-folder ``clean`` is what may be handed on; ``held`` waits for a person;
the report names originals by their path, and the journal lets a run go on where it was stopped.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path

from crossward.federation.errors import BadInput, StorageFailure
from crossward.federation.storage import private_folder
from crossward.imaging.deidentify.file import Job, Made, Outcome, Row, deidentify_file, refusal, stamp_of
from crossward.imaging.deidentify.report import Journal, Lines, Summary
from crossward.imaging.deidentify.rules import Options
from crossward.imaging.refusals import Reason, Refused
from crossward.imaging.secret import keyed
from crossward.imaging.splits import Progress
from crossward.imaging.workers import work

CLEAN, HELD, STAGING, JOURNAL, MAPPING = "clean", "held", ".staging", "journal.jsonl", "mapping.jsonl"
# What other commands keep beside the images.
OWN_FOLDERS = ".crossward"
# Raised when the rules change what a file becomes, so that old and new files are not mixed in one folder.
RULES_VERSION = 1
_WORKER_MEMORY = 4 * 2**30
# What may go better next time is not remembered.
_PASSING = frozenset(
    (Reason.TIMED_OUT, Reason.CRASHED, Reason.UNREADABLE, Reason.CHANGED, Reason.TOO_LARGE, Reason.DUPLICATE)
)
_AREAS = {Outcome.OK: CLEAN, Outcome.HELD: HELD}


def deidentify(
    folder: Path,
    out: Path,
    *,
    secret: bytes,
    options: Options | None = None,
    reviewed: frozenset[str] = frozenset(),
    mapping: bool = False,
    processes: int | None = None,
    seconds: float = 120.0,
    progress: Progress | None = None,
) -> Summary:
    """De-identifies every file of a folder into another one; files that are done already are not done again.

    Args:
        folder: with the originals.
        out: the site's folder for the outcome; neither may lie in the other.
        secret: of the site; the same secret gives the same pseudonyms.
        options: of the profile.
        reviewed: files that a person looked at for burned-in text and found fit to pass, by their path in ``held`` or
            in ``folder``.
        mapping: also write which original became which file, with the old identifiers.
        processes: how many at once.
        seconds: allowed for one file.
        progress: called with what is counted, how many are done, and how many there are.

    Raises:
        BadInput: the folders do not fit, or the output folder was made with other options or another secret.
        StorageFailure: something cannot be written; what was done before is kept.
    """
    options = options or Options()
    _check_folders(folder, out)
    private_folder(out)
    settings = keyed(secret, "settings", f"{RULES_VERSION} {sorted(asdict(options).items())}").hex()
    with closing(Journal(out / JOURNAL, settings)) as journal:
        run = _Run(folder, out, secret=secret, options=options, reviewed=reviewed, journal=journal, mapping=mapping)
        try:
            summary = run.go(processes=processes, seconds=seconds, progress=progress)
        finally:
            run.close()
        summary.write(out)
    return summary


def _check_folders(folder: Path, out: Path) -> None:
    if not folder.is_dir():
        raise BadInput(f"there is no folder {folder}; name the folder with the originals")
    inside, outside = folder.resolve(), out.resolve()
    if inside == outside or inside in outside.parents or outside in inside.parents:
        raise BadInput("the output folder and the folder with the originals lie in one another; choose another --out")


class _Run:
    def __init__(
        self,
        folder: Path,
        out: Path,
        *,
        secret: bytes,
        options: Options,
        reviewed: frozenset[str],
        journal: Journal,
        mapping: bool,
    ) -> None:
        self._folder = folder
        self._out = out
        self._secret = secret
        self._options = options
        self._reviewed = reviewed
        self._journal = journal
        self._mapping = Lines(out / MAPPING) if mapping else None
        self._mapped = {line["key"] for line in self._mapping.found} if self._mapping else set()
        self._rows: dict[str, Row] = {}
        self._owners: dict[str, str] = {}

    def close(self) -> None:
        if self._mapping is not None:
            self._mapping.close()

    def go(self, *, processes: int | None, seconds: float, progress: Progress | None) -> Summary:
        keys = {self._key(path): path for path in self._walk()}
        for key in [key for key, path in keys.items() if self._is_done(key, path)]:
            self._take_old(key, keys[key])
        # By key, not by name: so the journal's order says nothing about names, and is the same in every run.
        todo = sorted(key for key, path in keys.items() if path not in self._rows)
        staging = self._out / STAGING
        shutil.rmtree(staging, ignore_errors=True)
        private_folder(staging)
        jobs = [self._job(key, keys[key], staging) for key in todo]
        # In this process itself, which is for tests, standard error belongs to the caller.
        answers = work(deidentify_file, jobs, processes=processes, seconds=seconds, memory=_WORKER_MEMORY)
        for number, made in _in_order(answers):
            self._settle(todo[number], keys[todo[number]], jobs[number], made)
            if progress is not None:
                progress("files", number + 1, len(jobs))
        shutil.rmtree(staging, ignore_errors=True)
        return Summary(self._rows, self._options)

    def _walk(self) -> Iterator[str]:
        """Paths of all plain files, from the folder on; what cannot be looked at becomes a row."""

        def unreadable(error: OSError) -> None:
            self._rows[os.path.relpath(error.filename, self._folder)] = refusal(Refused(Reason.UNREADABLE))

        for place, folders, names in os.walk(self._folder, onerror=unreadable):
            folders[:] = [name for name in folders if not name.startswith(OWN_FOLDERS)]
            for name in [*names, *(name for name in folders if os.path.islink(os.path.join(place, name)))]:
                path = os.path.join(place, name)
                relative = os.path.relpath(path, self._folder)
                try:
                    plain = stat.S_ISREG(os.lstat(path).st_mode)
                except OSError:
                    plain = False
                if plain:
                    yield relative
                else:
                    self._rows[relative] = refusal(Refused(Reason.UNREADABLE, "not a plain file"))

    def _key(self, path: str) -> str:
        return keyed(self._secret, "original", path).hex()

    def _job(self, key: str, path: str, staging: Path) -> Job:
        source = self._folder / path
        return Job(source, staging / f"{key}.dcm", stamp_of(source), self._secret, self._options)

    def _is_done(self, key: str, path: str) -> bool:
        row = self._journal.rows.get(key)
        if row is None or row.stamp != stamp_of(self._folder / path):
            return False
        if row.outcome is Outcome.REFUSED:
            return True
        return self._at(row).is_file() and (self._mapping is None or key in self._mapped)

    def _take_old(self, key: str, path: str) -> None:
        """A file that an earlier run finished; a held one passes when it has been reviewed since."""
        row = self._journal.rows[key]
        passed = self._reviewed_row(row, path)
        if passed is not row:
            self._move(self._at(row), passed)
            self._journal.add(key, passed)
        self._claim(key, passed)
        self._rows[path] = passed

    def _settle(self, key: str, path: str, job: Job, made: Made | Refused) -> None:
        if isinstance(made, Refused):
            made = Made(refusal(made), {})
        if made.failure:
            raise StorageFailure(
                f"{self._out} cannot be written to ({os.strerror(made.failure)}); what was done is kept: "
                "free some space or choose another folder, and run again"
            )
        row = self._reviewed_row(replace(made.row, stamp=job.stamp), path)
        owner = self._owners.get(row.output, key)
        if row.output and owner != key:
            same = _same_bytes(job.staged, self._at(self._journal.rows[owner]))
            job.staged.unlink()
            row = replace(refusal(Refused(Reason.DUPLICATE, "" if same else "with the same UID and other content")),
                          stamp=job.stamp)  # fmt: skip
        old = self._journal.rows.get(key)
        if old is not None and old.output and self._owners.get(old.output, key) == key:
            self._at(old).unlink(missing_ok=True)
        if row.output:
            self._move(job.staged, row)
            if self._mapping is not None:
                self._mapping.add({"key": key, "file": path, "output": row.output, **made.link})
        if row.reason not in _PASSING:
            row = self._journal.add(key, row)
            self._claim(key, row)
        self._rows[path] = row

    def _claim(self, key: str, row: Row) -> None:
        if row.output:
            self._owners[row.output] = key

    def _reviewed_row(self, row: Row, path: str) -> Row:
        if row.reason == Reason.BURNED_IN and row.outcome is Outcome.HELD and {row.output, path} & self._reviewed:
            return replace(row, outcome=Outcome.OK, detail="reviewed")
        return row

    def _at(self, row: Row) -> Path:
        return self._out / _AREAS[row.outcome] / row.output

    def _move(self, source: Path, row: Row) -> None:
        target = self._at(row)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            source.replace(target)
        except OSError as error:
            raise StorageFailure(f"a file cannot be put into {target.parents[3]}: {error.strerror}") from error


def _in_order(results: Iterator[tuple[int, Made | Refused]]) -> Iterator[tuple[int, Made | Refused]]:
    """Results by their number: which of two copies passes must not depend on which worker is faster."""
    waiting: dict[int, Made | Refused] = {}
    following = 0
    for number, made in results:
        waiting[number] = made
        while following in waiting:
            yield following, waiting.pop(following)
            following += 1


def _same_bytes(one: Path, other: Path) -> bool:
    return one.is_file() and other.is_file() and one.read_bytes() == other.read_bytes()
