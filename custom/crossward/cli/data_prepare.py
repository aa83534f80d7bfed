"""``crossward data prepare``: a site's DICOM images as cached pictures, ready to train on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from crossward.cli.progress import counting
from crossward.federation.errors import BadInput
from crossward.imaging.prepare.manifest import PARTS, Manifest, folder_of
from crossward.imaging.prepare.report import write_report
from crossward.imaging.prepare.site import prepare as prepare_site
from crossward.imaging.rules.config import read_site_rules


def prepare(
    site: Annotated[Path, typer.Argument(help="The hospital's site.yaml, or the folder that has it.")],
    size: Annotated[int, typer.Option(help="Height and width of the pictures, as the study has them.")] = 32,
    channels: Annotated[int, typer.Option(help="1 refuses images in colour; 3 takes them.")] = 1,
    classes: Annotated[str | None, typer.Option(help="Labels to keep, with commas between; all if none.")] = None,
    processes: Annotated[int | None, typer.Option(help="Workers; as many as there are processors if none.")] = None,
    report: Annotated[Path | None, typer.Option(help="Folder for a page that shows every scanner domain.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the counts as JSON.")] = False,
) -> None:
    """Make a site's DICOM images into cached pictures, once; training then reads nothing else.

    May be interrupted at any time and run again: what is finished is not done again. Every file that becomes no
    picture has its reason in the manifest, which stays in the site's cache folder.

    Example: crossward data prepare site.yaml --size 32 --report domains
    """
    rules = read_site_rules(site)
    with counting(Console(stderr=True)) as progress:
        manifest = prepare_site(
            rules,
            size=size,
            channels=channels,
            classes=[name.strip() for name in classes.split(",")] if classes is not None else None,
            processes=processes,
            progress=progress,
        )
        page = write_report(rules, manifest, report, processes=processes, progress=progress) if report else None
    summary = manifest.summary()
    if as_json:
        typer.echo(json.dumps({**summary, "report": page and str(page)}, indent=2, allow_nan=False))
    else:
        _show(Console(), manifest, summary)
        cache = folder_of(rules.cache, size=size, channels=channels)
        Console().print(f"Cache and manifest: {cache}", soft_wrap=True, highlight=False)
        if page is not None:
            Console().print(f"Scanner domains, with images of patients: {page}", soft_wrap=True, highlight=False)
    if not manifest.pictures:
        raise BadInput("no image could be prepared; the reasons are in the manifest, file by file")


def _show(console: Console, manifest: Manifest, summary: dict[str, Any]) -> None:
    files = summary["files"]
    left_out = f", {files['left_out']} left out for another one of their series" if files["left_out"] else ""
    console.print(
        f"{files['seen']} files seen: {files['accepted']} accepted, {files['rejected']} rejected{left_out}. "
        f"{summary['pictures']} pictures of {summary['patients']} patients, "
        f"{manifest.size} x {manifest.size}, {manifest.channels} channel(s).",
        soft_wrap=True,
        highlight=False,
    )
    if summary["reasons"]:
        console.print(_table("rejected because it", ("files",), {why: [n] for why, n in summary["reasons"].items()}))
    by_class = {label: [summary["parts"][part][label] for part in PARTS] for label in manifest.classes}
    console.print(_table("class", PARTS, by_class, total=True))
    console.print(_table("scanner domain", PARTS, {name: list(n.values()) for name, n in summary["domains"].items()}))
    for warning in summary["warnings"]:
        console.print(f"warning: {warning}", style="yellow", soft_wrap=True, highlight=False, markup=False)


def _table(what: str, columns: tuple[str, ...], rows: dict[str, list[int]], *, total: bool = False) -> Table:
    table = Table(what, *columns)
    for name, numbers in rows.items():
        table.add_row(name, *map(str, numbers))
    if total:
        table.add_section()
        table.add_row("all", *(str(sum(column)) for column in zip(*rows.values(), strict=True)))
    return table
