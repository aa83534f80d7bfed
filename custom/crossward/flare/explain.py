"""Why a job failed: site, round, cause, log line and next step, also for jobs that never ran.

The server gets codes and numbers only. What else is known stays in the log of the site where it happened, and is shown
where that site's kit is at hand.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from crossward.flare import names
from crossward.flare.console import JobConsole
from crossward.flare.outcome import ABORTED, COMPLETED, FINISHED, left_file
from crossward.site.evidence import KEPT
from crossward.site.troubles import Code, words

SERVER: Final = "server"
LONGEST: Final = 300
"""Characters of a log line that are shown."""

EXPORT: Final = "Write the job with crossward job export, which uses allowed classes only, and submit it again"


@dataclass(frozen=True)
class Line:
    """One thing that went wrong.

    Attributes:
        site: where; ``server`` for the server, ``-`` where it is not one place.
        round_number: in which round; none where no round had begun.
        cause: in plain words.
        log: the line of the log that shows it, where the log is at hand.
        next_step: what to do.
    """

    site: str
    round_number: int | None
    cause: str
    log: str | None
    next_step: str


@dataclass(frozen=True)
class _Sign:
    """Words of FLARE by which a cause is known, in a job's metadata or in a log."""

    pattern: re.Pattern[str]
    cause: str
    next_step: str

    @classmethod
    def of(cls, pattern: str, cause: str, next_step: str) -> _Sign:
        return cls(re.compile(pattern), cause, next_step)


_SIGNS: Final = (
    _Sign.of(
        r"BYOC not permitted",
        "the job brings its own code (a folder app/custom), which is not permitted here",
        f"Crossward jobs are configuration only. {EXPORT}",
    ),
    _Sign.of(
        r"not in allow_list|not in (?:the )?class_allow_list|ComponentNotAuthorized|UnsafeComponentError",
        "the job names a class that is not on the list of allowed classes",
        f"{EXPORT}; an administrator decides about local/resources.json",
    ),
    _Sign.of(
        r"unsigned job rejected|UNSIGNED_JOB",
        "the job is not signed, and only signed jobs are taken",
        "Submit it with an administrator's kit of this project",
    ),
    _Sign.of(
        r"signature verif\w* failed|does not pass signature|no signer identity",
        "the job's signature does not fit its files, or is of another project",
        "Submit it again with an administrator's kit of this project",
    ),
    _Sign.of(
        r"privacy scope '.*' is not allowed",
        "the site's policy does not define the job's privacy scope",
        "The kit's local/privacy.json must define the scope 'crossward'; ask the site's administrator",
    ),
    _Sign.of(
        r"no reply \(deployment timeout\)|timed out at start-job",
        "the site did not answer when the job was handed out",
        "See whether the site's processes run and reach the server, then submit the job again",
    ),
    _Sign.of(
        r"connected sites \(\d+\) < min_sites|missing required site|exceeded max schedule count",
        "fewer sites are connected than the job needs",
        "Start the missing sites (crossward job list shows who is connected), or export with a smaller --min-sites",
    ),
    _Sign.of(
        r"not enough sites have enough resources|don't have enough resources",
        "too few sites have what the job reserves, such as free GPUs, or another job holds it",
        "Wait for the other job, or export with fewer --gpus",
    ),
    _Sign.of(
        r"num_ok_sites \d+ < required_min_sites",
        "too few sites took the job",
        "The lines of the sites say why; submit it again when they are mended",
    ),
    _Sign.of(
        r"ModuleNotFoundError|No module named|cannot import",
        "the software that the job needs is missing there, or is another version",
        "Install the same version of Crossward everywhere",
    ),
    _Sign.of(r"No space left on device", "the disk is full", "Free some space there, then resume the run"),
    _Sign.of(
        r"MemoryError|Cannot allocate memory",
        "memory ran out",
        "Use a smaller batch size, or give the machine more memory",
    ),
    _Sign.of(
        r"Address already in use",
        "the port is taken by another process",
        "Stop the other process, or provision with another port",
    ),
)

_REPORTED = re.compile(r"(?:Failing|Aborting) job \S+ due to reported failure from ([^\s:.]+)\S*: (.*)")
_DEAD = re.compile(r"terminal outcome unavailable from ([^\s:]+)")
_EXIT = re.compile(r"child worker process finished with RC (?![01]\b)-?\d+()")
"""A process that was told to end returns 0 or 1."""
_TROUBLE_LINE = re.compile(r" - (?:ERROR|CRITICAL) - |^[\w.]*(?:Error|Exception|Refusal)\b")
_NOISE = re.compile(r"get_widget|Late stream error|target_unreachable|no connection to child|Traceback \(most recent")
"""What FLARE calls an error and is none: messages to a process that is just starting or has just ended."""

_DIED: Final = "the job's process at the site died, and FLARE ended the job"
_AFTER_DEATH: Final = "Look at the site for memory that ran out or a restart; crossward job watch resumes the run"

_STATUS: Final = {
    ABORTED: (
        "the job was stopped: by a person, or by FLARE when a site found it unsafe",
        "If nobody stopped it, look into the sites' logs (--kits, or at the sites); finished rounds are kept",
    ),
    COMPLETED: (
        "FLARE calls the job completed, but the run left no outcome, so there is no result",
        "The job may not be one of Crossward; otherwise the server's log has more",
    ),
    "FINISHED:ABNORMAL": (
        "a process of the job was killed, at the server or at a site",
        "Look for a machine that ran out of memory or was restarted; crossward job watch resumes the run",
    ),
    "FINISHED:EXECUTION_EXCEPTION": (
        "a process of the job died, at the server or at a site",
        "Look for a machine that ran out of memory or was restarted; crossward job watch resumes the run",
    ),
    "FINISHED:FAILED_TO_RUN": ("FLARE could not hand out or start the job", "The server's log has more"),
    "FINISHED:CAN_NOT_SCHEDULE": (
        "FLARE tried again and again, and never found enough sites for the job",
        "Start the missing sites, then submit the job again",
    ),
}


def explain(console: JobConsole, job_id: str, *, kits: Path | None = None) -> list[Line]:
    """Explain a job.

    Args:
        console: the session with the server.
        job_id: FLARE's id of the job.
        kits: folder with the kits of sites whose logs may be read here, named as the sites.

    Returns:
        What went wrong, the most telling first; empty for a run that completed without trouble.
    """
    meta = console.meta(job_id)
    status = str(meta.get("status", ""))
    logs = _site_logs(kits, job_id) if kits else {}
    if not status.startswith(FINISHED):
        return _unfinished(console, meta, status)
    with tempfile.TemporaryDirectory(prefix="crossward-") as folder:
        download = console.download(job_id, Path(folder))
        told = left_file(download, names.OUTCOME)
        log = _read(download / "workspace" / "log.txt") if download else []
    logs = {**logs, SERVER: [*logs.get(SERVER, []), *log]}
    if told is not None and told.get("status") == "completed":
        return list(_troubles(told, logs))
    at_work = int(told.get("round") or 0) + 1 if told else None
    lines = [*_deployment(meta), *(_told(told, logs) if told else []), *_found(logs, at_work)]
    return _unique(lines) or [_by_status(status, logs, told)]


def _unfinished(console: JobConsole, meta: Mapping[str, Any], status: str) -> list[Line]:
    job_id = str(meta.get("job_id", ""))
    if status in ("RUNNING", "DISPATCHED"):
        if job_id in console.running_jobs():
            return [Line("-", None, "the job is running", None, f"Follow it with: crossward job watch {job_id}")]
        return [
            Line(
                SERVER,
                None,
                "the job has no process at the server: it was restarted, or FLARE waits for a stopped site",
                None,
                f"crossward job watch {job_id} reads the outcome, or resumes the run",
            )
        ]
    history = [str(entry) for entry in meta.get("schedule_history") or []]
    sign = _sign_in(history[-1]) if history else None
    cause = sign.cause if sign else "the job waits for its turn"
    next_step = sign.next_step if sign else "FLARE starts it when other jobs have ended and enough sites are connected"
    return [Line("-", None, cause, history[-1] if history else None, next_step)]


def _deployment(meta: Mapping[str, Any]) -> Iterator[Line]:
    """What came of handing the job out; and of finding a time for it, where it never came to that."""
    details = [str(detail) for detail in meta.get("job_deploy_detail") or []]
    for detail in details:
        site, colon, text = detail.partition(": ")
        if text == "OK":
            continue
        sign = _sign_in(detail)
        yield Line(
            site if colon else "-",
            None,
            sign.cause if sign else f"the job was not taken: {text or detail}",
            detail,
            sign.next_step if sign else "The log there has more",
        )
    history = [str(entry) for entry in meta.get("schedule_history") or []]
    if not details:
        reasons = [(entry, sign) for entry in history if (sign := _sign_in(entry))]
        yield from (Line("-", None, sign.cause, entry, sign.next_step) for entry, sign in reasons[:1])


def _told(told: Mapping[str, Any], logs: Mapping[str, list[str]]) -> Iterator[Line]:
    """What the run says of its own end, and of every trouble on the way.

    That it was ended from outside says less than FLARE's log does.
    """
    if told.get("code") not in (None, Code.ABORTED):
        site = str(told.get("site") or SERVER)
        yield _coded(site, int(told.get("round") or 0), told, logs)
    yield from _troubles(told, logs)


def _troubles(told: Mapping[str, Any], logs: Mapping[str, list[str]]) -> Iterator[Line]:
    """The last trouble of its kind at every site: one site that fails in ten rounds is one line."""
    last = {(trouble.get("site"), trouble.get("code")): trouble for trouble in told.get("troubles") or []}
    for trouble in last.values():
        yield _coded(str(trouble.get("site") or SERVER), int(trouble.get("round") or 0), trouble, logs)


def _coded(site: str, round_number: int, told: Mapping[str, Any], logs: Mapping[str, list[str]]) -> Line:
    cause, _, remedy = words(int(told["code"]), told.get("numbers") or {}).partition(". ")
    log = logs.get(site, [])
    shown = told.get("evidence") or _last_evidence(int(told["code"]), log) or _last_trouble(log)
    return Line(site, round_number or None, cause, shown, remedy)


def _found(logs: Mapping[str, list[str]], at_work: int | None) -> Iterator[Line]:
    """What the logs show that no code reported: refusals before anything ran, and processes that died."""
    # What is indented is the source code in a stack.
    lines = [(site, line) for site, log in logs.items() for line in log if not line.startswith(" ")]
    signs = [(site, line, sign) for site, line in lines if (sign := _sign_in(line))]
    for site, line, sign in signs:
        yield Line(site, None, sign.cause, _short(line), sign.next_step)
    refused = {site for site, _, _ in signs}
    for site, line in lines:
        match = _REPORTED.search(line) or _DEAD.search(line) or _EXIT.search(line)
        if match and (match.group(1) or site) not in refused:
            yield Line(match.group(1) or site, at_work, _DIED, _short(line), _AFTER_DEATH)


def _by_status(status: str, logs: Mapping[str, list[str]], told: Mapping[str, Any] | None) -> Line:
    """What remains to be said where neither the run nor a log at hand gives a cause."""
    cause, next_step = _STATUS.get(status, (f"FLARE ended the job as {status}", "The server's log has more"))
    # FLARE's word for sites that went away: where the run left no word either, they may have refused the job.
    unsaid = told is not None or status == "FINISHED:ABNORMAL"
    if (
        unsaid
        and status != ABORTED
        and not any(event.get("kind") == "joined" for event in (told or {}).get("events") or [])
    ):
        cause = "the sites' processes ended before any site joined: they were killed, or refused what the job names"
        next_step = "Look into the sites' logs (--kits, or at the sites), which say which of the two"
    at_work = int(told.get("round") or 0) + 1 if told else None
    return Line(SERVER, at_work, cause, _last_trouble(logs.get(SERVER, [])), next_step)


def _unique(lines: list[Line]) -> list[Line]:
    """The first line of every cause at a site: logs repeat themselves."""
    return list({(line.site, line.cause): line for line in reversed(lines)}.values())[::-1]


def _sign_in(text: str) -> _Sign | None:
    return next((sign for sign in _SIGNS if sign.pattern.search(text)), None)


def _last_trouble(log: list[str]) -> str | None:
    told = (line for line in reversed(log) if _TROUBLE_LINE.search(line) and not _NOISE.search(line))
    return next((_short(line) for line in told), None)


def _last_evidence(code: int, log: list[str]) -> str | None:
    """Where a site keeps what shows why it did not take a step of secure aggregation."""
    return next((line.strip() for line in reversed(log) if code == Code.NOT_MASKED and KEPT in line), None)


def _site_logs(kits: Path, job_id: str) -> dict[str, list[str]]:
    """The logs of a job in the kits at hand; where it never ran, what the site's main process says of it."""
    logs = {}
    for kit in sorted(path.parent.parent for path in kits.glob("*/startup/fed_*.json")):
        own = _read(kit / job_id / "log.txt")
        about = [line for line in _read(kit / "log.txt") if job_id in line and not _NOISE.search(line)]
        logs[kit.name] = [*about, *own]
    return logs


def _read(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _short(line: str) -> str:
    line = line.strip()
    return line if len(line) <= LONGEST else f"{line[:LONGEST]} ..."
