"""``crossward data deidentify``: a copy of a folder without names, numbers and dates of persons."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from crossward.cli.progress import counting
from crossward.federation.errors import BadInput, PrivacyRefusal
from crossward.imaging.deidentify.file import Outcome
from crossward.imaging.deidentify.folder import CLEAN, HELD, MAPPING
from crossward.imaging.deidentify.folder import deidentify as clean_folder
from crossward.imaging.deidentify.report import REPORT_TEXT, Summary
from crossward.imaging.deidentify.rules import Options
from crossward.imaging.secret import site_secret

_INTERRUPTED = 130


def deidentify_folder(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder with DICOM files; only read.")],
    out: Annotated[Path, typer.Option(help=f"The site's folder for the outcome; hand on only its {CLEAN}/.")],
    secret: Annotated[Path, typer.Option(help="File with the site's secret; made where it is not there. Back it up.")],
    keep_device: Annotated[bool, typer.Option("--keep-device", help="Keep what names the scanner.")] = False,
    keep_patient: Annotated[
        bool, typer.Option("--keep-patient", help="Keep sex, age (90 and over as 90), size and weight.")
    ] = False,
    keep_descriptions: Annotated[
        bool, typer.Option("--keep-descriptions", help="Keep words of descriptions that a closed list has.")
    ] = False,
    structured: Annotated[
        bool, typer.Option("--structured", help="Take structured reports too, with their codes and numbers only.")
    ] = False,
    accept_burned_in: Annotated[
        Path | None,
        typer.Option(metavar="LIST", help=f"Text file with files in {HELD}/ that a person looked at, one a line."),
    ] = None,
    mapping: Annotated[
        bool, typer.Option("--mapping", help=f"Also write {MAPPING}: which original became which file. Keep it locked.")
    ] = False,
    processes: Annotated[
        int | None, typer.Option(min=0, help="Files at once, 0 without workers; else one per processor.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the counts as JSON.")] = False,
) -> None:
    """Copy a folder of DICOM images without identifiers (DICOM PS3.15 Annex E), and check that none is left.

    Dates are moved by a number of days that only the secret tells, the same for all files of a patient. What may still
    name somebody is put into held/ for a person to look at; the exit code is then 5. A run that was stopped goes on
    where it was. No name, id, date or file name is shown.

    Example: crossward data deidentify archive --out deidentified --secret keys/site.secret
    """
    errors = Console(stderr=True)
    if any(place in secret.resolve().parents for place in (out.resolve(), folder.resolve())):
        raise BadInput("the secret would lie among the images; keep it in a folder of its own with --secret")
    options = Options(device=keep_device, patient=keep_patient, descriptors=keep_descriptions, structured=structured)
    reviewed = _listed(accept_burned_in)
    try:
        with counting(errors) as progress:
            summary = clean_folder(
                folder,
                out,
                secret=site_secret(secret),
                options=options,
                reviewed=reviewed,
                mapping=mapping,
                processes=processes,
                progress=progress,
            )
    except KeyboardInterrupt:
        errors.print("stopped: what was done is kept; the same command goes on from there", soft_wrap=True)
        raise typer.Exit(_INTERRUPTED) from None
    unknown = reviewed - summary.rows.keys() - {row.output for row in summary.rows.values()}
    if unknown:
        errors.print(f"[yellow]warning:[/] {len(unknown)} lines of the list name no file here", soft_wrap=True)
    if as_json:
        typer.echo(json.dumps(summary.as_json(files=False), indent=2, allow_nan=False))
    else:
        _show(Console(), summary, out)
    if not summary.count(Outcome.OK) and not summary.count(Outcome.HELD):
        raise BadInput(f"no file was de-identified among {len(summary.rows):,}; {REPORT_TEXT} in the output says why")
    if summary.count(Outcome.HELD):
        raise typer.Exit(PrivacyRefusal.exit_code)


def _listed(path: Path | None) -> frozenset[str]:
    if path is None:
        return frozenset()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} cannot be read ({type(error).__name__}); name a text file, one file a line") from None
    names = (line.strip().removeprefix(f"{HELD}/") for line in lines)
    return frozenset(name for name in names if name and not name.startswith("#"))


def _show(console: Console, summary: Summary, out: Path) -> None:
    for outcome, reasons in summary.reasons.items():
        table = Table("files", "why", title=outcome, box=box.SIMPLE_HEAD, title_justify="left")
        for reason, count in reasons.items():
            table.add_row(f"{count:,}", reason)
        console.print(table)
    totals: dict[str, int] = {}
    for actions in summary.attributes.values():
        for action, count in actions.items():
            totals[action] = totals.get(action, 0) + count
    said = ", ".join(f"{count:,} {action}" for action, count in sorted(totals.items()))
    console.print(f"attributes: {said or 'none'}", soft_wrap=True, highlight=False)
    ok, held, refused = (summary.count(outcome) for outcome in Outcome)
    console.print(
        f"{ok:,} files are in {out / CLEAN}, {held:,} are held in {out / HELD}, {refused:,} were refused; "
        f"{out / REPORT_TEXT} says which and why (it names files: keep it in the house).",
        soft_wrap=True,
        highlight=False,
    )
    if held:
        console.print(
            "Next: look at what is held. Files held for drawn text pass with --accept-burned-in; "
            "files that still hold an identifier never do.",
            soft_wrap=True,
            highlight=False,
        )
