"""What became of a run: read from what its controller left in the job's download, or told from FLARE's status.

What FLARE says of a job is not what became of the run: FINISHED:COMPLETED only means that the controller returned, and
a run whose result is whole ends as FINISHED:ABNORMAL when one site was restarted. The controller's own outcome.json
decides. A job that left none died: its process was killed, or the server was.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from crossward.federation.errors import RunFailure, StorageFailure
from crossward.federation.storage import read_json
from crossward.flare import names
from crossward.site.troubles import Code, words

FINISHED: Final = "FINISHED:"
"""How every status of an ended job begins; what comes after it is FLARE's view, not ours."""

COMPLETED: Final = "FINISHED:COMPLETED"
ABORTED: Final = "FINISHED:ABORTED"
FAILED_TO_RUN: Final = "FINISHED:FAILED_TO_RUN"
CAN_NOT_SCHEDULE: Final = "FINISHED:CAN_NOT_SCHEDULE"
LOST: Final = "RUNNING, without a process"
"""Our name for a job that a restarted server still lists as running: it can be neither stopped nor downloaded."""

REFUSED: Final = frozenset({FAILED_TO_RUN, CAN_NOT_SCHEDULE})

_PASSING_CODES = frozenset(
    {Code.ABORTED, Code.NO_ANSWER, Code.NOT_EXECUTED, Code.QUORUM, Code.BUSY, Code.NO_SUM, Code.NO_KEYS}
)

PASSING: Final = frozenset({None, *_PASSING_CODES})
"""Ends that may be better the next time without anybody's help. All others wait for a person."""

LASTING: Final = frozenset(set(Code) - _PASSING_CODES - {Code.MEMORY})
"""Troubles of a site that are the same again the next time."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a run.

    Attributes:
        status: completed only if the run's own outcome says so.
        job: the last job's id; ``jobs`` has all of them, in order.
        run: the run's id, by which it can be resumed.
        round_number: the last round that was closed, of ``rounds``.
        reason: why it is not completed, in plain words, with what to do next.
        folder: of the last job's download, where it could be downloaded and was asked for.
        result: the content of result.json, where the run is completed.
    """

    status: Literal["completed", "failed", "aborted"]
    job: str
    jobs: tuple[str, ...]
    run: str
    round_number: int = 0
    rounds: int = 0
    best_round: int | None = None
    resumable: bool = False
    code: int | None = None
    numbers: Mapping[str, float] = field(default_factory=dict)
    site: str | None = None
    troubles: tuple[Mapping[str, Any], ...] = ()
    reason: str = ""
    folder: Path | None = None
    result: Mapping[str, Any] | None = None


def files_in(download: Path) -> Path:
    """What the controller left, in a job's download."""
    return download / "workspace" / names.RUN_FILES


def left_file(download: Path | None, name: str) -> dict[str, Any] | None:
    """A file that the controller left in a job's download; none if it did not."""
    if download is None or not (files_in(download) / name).exists():
        return None
    try:
        return read_json(files_in(download) / name)
    except StorageFailure as error:
        raise RunFailure(f"the job was downloaded, but what the run left in it is damaged: {error}") from error


def job_in(download: Path | None) -> Path | None:
    """The job folder in a download: FLARE keeps the name that it was submitted under."""
    if download is None:
        return None
    return next((path.parent for path in sorted((download / "job").glob("*/meta.json"))), None)


def silent_end(status: str, outcome: Outcome) -> str:
    """Why a job ended that left no word of its own."""
    again = f"crossward job explain {outcome.job} looks for the cause"
    causes = {
        LOST: "the server was stopped or killed while the job ran",
        ABORTED: "the job was aborted",
        COMPLETED: "FLARE calls the job completed, but the run left no outcome and no result",
        FAILED_TO_RUN: "FLARE could not start the job",
        CAN_NOT_SCHEDULE: "FLARE found no time at which enough sites could take the job",
    }
    return f"{causes.get(status, f'the job died: FLARE says {status}')}; {again}"


def told_end(outcome: Outcome) -> str:
    """Why a run failed, by its own account."""
    where = f"{outcome.site}: " if outcome.site else ""
    if outcome.code not in (None, Code.ABORTED):
        return f"{where}{words(outcome.code, outcome.numbers)}"
    after = f" after round {outcome.round_number} of {outcome.rounds}" if outcome.rounds else ""
    if outcome.status == "aborted":
        return f"the run was aborted{after}; to go on with it: crossward job submit JOB --resume {outcome.run}"
    return f"the run was stopped{after}; finished rounds are kept"
