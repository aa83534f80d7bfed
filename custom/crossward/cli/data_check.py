"""``crossward data check``: whether a ``site.yaml`` is right, and what would be trained on with it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from secrets import token_bytes
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from crossward.cli.progress import counting
from crossward.imaging.inventory.scan import scan
from crossward.imaging.labels.report import PARTS, problems
from crossward.imaging.prepare.candidates import Choice, choose
from crossward.imaging.rules.config import read_site_rules
from crossward.imaging.rules.site import DEFAULT_DOMAIN, SiteRules

_NOTHING_TO_TRAIN_ON = 2


def check(
    site_file: Annotated[Path, typer.Argument(metavar="SITE.YAML", help="The site's rules, or their folder.")],
    processes: Annotated[
        int | None, typer.Option(min=0, help="Files read at once, 0 without workers; else one per processor.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Check a site's rules, and say what would be trained on: labels, conflicts, classes in every split, domains.

    Only headers are read; prepare may still refuse an image whose pixels are not in order. Every mistake in the file is
    told with its line. Names, ids and file names are never shown.

    Example: crossward data check site.yaml
    """
    rules = read_site_rules(site_file)
    with counting(Console(stderr=True)) as progress:
        inventory = scan(rules.data, state=rules.cache, processes=processes, progress=progress)
        # Its pseudonyms are not kept, so the site's own secret is not needed.
        choice = choose(rules, inventory.files, secret=token_bytes(), processes=processes, progress=progress)
    figures = _figures(rules, choice, seen=len(inventory.files))
    if as_json:
        typer.echo(json.dumps(figures, indent=2, allow_nan=False))
    else:
        _show(Console(), figures)
    if not choice.candidates:
        raise typer.Exit(_NOTHING_TO_TRAIN_ON)


def _figures(rules: SiteRules, choice: Choice, *, seen: int) -> dict[str, Any]:
    pictures = [candidate for candidate in choice.candidates for _ in candidate.frames]
    classes = sorted({picture.label for picture in pictures})
    counts = Counter((picture.part, picture.label) for picture in pictures)
    domains = Counter(picture.domain for picture in pictures)
    reasons = Counter(row.reason for row in choice.rejected)
    return {
        "files": seen,
        "left_out": choice.left_out,
        "images": len(pictures),
        "patients": len({picture.patient for picture in pictures}),
        "classes": classes,
        "parts": {name: {label: counts[part, label] for label in classes} for part, name in PARTS.items()},
        "domains": {
            name: {"images": domains[name], "steps": [step.name for step in rules.steps(name)]}
            for name in sorted(domains)
        },
        "refused": {reason.value: count for reason, count in reasons.most_common()},
        "problems": problems(reasons),
        "warnings": [*choice.warnings, *_idle_steps(rules, set(domains))],
    }


def _idle_steps(rules: SiteRules, domains: set[str]) -> list[str]:
    """Steps for a scanner that nobody has are most often a name that is written wrong."""
    idle = {*rules.transforms, *rules.augment} - {DEFAULT_DOMAIN} - domains
    return [f"there are steps for the domain '{name}', and no image is of it; check its name" for name in sorted(idle)]


def _show(console: Console, figures: Mapping[str, Any]) -> None:
    parts, domains = figures["parts"], figures["domains"]
    if figures["images"]:
        rows = [(label, *(f"{parts[part][label]:,}" for part in parts)) for label in figures["classes"]]
        totals = [("all", *(f"{sum(parts[part].values()):,}" for part in parts))]
        console.print(_table(("class", *parts), [*rows, *totals]))
        steps = [(name, f"{of['images']:,}", ", ".join(of["steps"]) or "usual") for name, of in domains.items()]
        console.print(_table(("scanner domain", "images", "steps"), steps))
    for kind, style in (("problems", "red"), ("warnings", "yellow")):
        for line in figures[kind]:
            console.print(Text.assemble((f"{kind[:-1]}: ", style), line), soft_wrap=True)
    refused = sum(figures["refused"].values())
    left_out = f", {figures['left_out']:,} told by another of their series" if figures["left_out"] else ""
    console.print(
        f"{figures['files']:,} files, {refused:,} refused{left_out}: {figures['images']:,} images of "
        f"{figures['patients']:,} patients in {len(figures['classes'])} classes would be trained on and tested with.",
        soft_wrap=True,
        highlight=False,
    )


def _table(headings: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table
