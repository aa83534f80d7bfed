"""An inventory as one self-contained HTML page: what every scanner made, with a few small pictures of each.

The page names no file, no person and no folder. Images that say, or are of a kind that may have, text burned into their
pixels are counted but not shown.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

from crossward.federation.storage import atomic_file
from crossward.imaging.dicom.scans import Header
from crossward.imaging.inventory.facts import Facts, Scanner, images_by_scanner
from crossward.imaging.inventory.scan import SECONDS_PER_FILE, Found, Inventory
from crossward.imaging.inventory.thumbnail import thumbnail
from crossward.imaging.inventory.walk import Progress
from crossward.imaging.inventory.words import Rows, cautions, overview, scanner_rows
from crossward.imaging.refusals import Refused
from crossward.imaging.workers import work

PICTURES = 8
_WORKER_BYTES = 4 << 30
_SAYS_NONE = "NO"
_TEXT_IS_USUAL = frozenset({"US", "IVUS", "SC", "OT", "XC", "ES", "DOC", "RF", "XA", "BMD", "OP"})
_SECONDARY_CAPTURE = "1.2.840.10008.5.1.4.1.1.7"
# Nothing is fetched and nothing runs, even if something slipped through the escaping.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_STYLE = """
:root{--ink:#1b2733;--soft:#566472;--rule:#d5dce3;--wash:#f4f7fa;--blue:#0072b2;--orange:#b35900}
*{box-sizing:border-box}body{margin:0;color:var(--ink);font:16px/1.5 system-ui,"Segoe UI",Roboto,sans-serif}
main{max-width:64rem;margin:0 auto;padding:2rem 1.25rem 3rem}
h1{font-size:1.8rem;line-height:1.2;margin:0 0 .4rem}
h2{font-size:1.2rem;margin:2.4rem 0 .6rem;padding-top:1rem;border-top:2px solid var(--ink);overflow-wrap:anywhere}
.soft{color:var(--soft);font-size:.9rem}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(8rem,1fr));gap:.8rem;margin:1.2rem 0}
.tile{background:var(--wash);padding:.7rem .9rem;border-top:3px solid var(--blue)}
.tile b{display:block;font-size:1.5rem;font-variant-numeric:tabular-nums}.tile span{color:var(--soft);font-size:.88rem}
.warning{margin:1rem 0;padding:.8rem 1rem;border-left:6px solid var(--orange);background:#fff3e3}
.warning ul{margin:0;padding-left:1.2rem}
table{border-collapse:collapse;width:100%;font-size:.92rem}
th,td{padding:.35rem .6rem;text-align:left;vertical-align:top;border-bottom:1px solid var(--rule)}
td{overflow-wrap:anywhere}
th{width:15rem;font-weight:600}td.count{text-align:right;width:7rem;font-variant-numeric:tabular-nums}
.strip{display:grid;grid-template-columns:repeat(8,1fr);gap:4px;margin:.8rem 0}
.strip img{width:100%;aspect-ratio:1;object-fit:contain;background:#000;display:block}
@media screen and (max-width:44rem){.strip{grid-template-columns:repeat(4,1fr)}th{width:8rem}}
@media print{main{max-width:none;padding:0}tr,.strip,.tile{break-inside:avoid}}
"""


def write_page(
    path: Path,
    folder: Path,
    inventory: Inventory,
    facts: Facts,
    *,
    processes: int | None = None,
    progress: Progress | None = None,
) -> None:
    """Writes the page; pictures are read in worker processes, and one that cannot be read is said with its reason.

    Args:
        path: of the HTML file; replaced atomically.
        folder: that the inventory is of.
        inventory: what was found.
        facts: what it comes to.
        processes: how many read pictures at once; 0 reads in this process.
        progress: told of pictures that are done.

    Raises:
        StorageFailure: the page cannot be written.
    """
    made = images_by_scanner(inventory)
    chosen = {name: choose([found for found in files if _can_be_shown(found)]) for name, files in made.items()}
    drawn = _draw(folder, [found for files in chosen.values() for found in files], processes, progress)
    sections = [
        _section(scanner, made[scanner.name], [drawn[found.path] for found in chosen[scanner.name]])
        for scanner in facts.scanners
    ]
    document = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f"<title>What the scanners made</title><style>{_STYLE}</style></head>\n"
        f"<body><main>{_opening(facts)}{''.join(sections)}{_refusals(facts)}</main></body></html>\n"
    )
    with atomic_file(path) as stream:
        stream.write(document.encode("utf-8", errors="replace"))


def choose(images: Sequence[Found], count: int = PICTURES) -> list[Found]:
    """So many images spread evenly over the patients in the order of the paths, or over all images if patients are few.

    The same images give the same choice.
    """
    firsts: dict[str, Found] = {}
    for found in images:
        firsts.setdefault(found.header.patient_id if found.header else "", found)
    pool = list(firsts.values()) if len(firsts) >= count else list(images)
    if len(pool) <= count:
        return pool
    return [pool[number * (len(pool) - 1) // (count - 1)] for number in range(count)]


def may_show_text(header: Header) -> bool:
    """Whether an image says that it has burned-in text, or does not deny it and is of a kind that often has."""
    said = header.burned_in.strip().upper()
    usual = header.modality.upper() in _TEXT_IS_USUAL or header.sop_class.startswith(_SECONDARY_CAPTURE)
    return said != _SAYS_NONE and (bool(said) or usual)


def _can_be_shown(found: Found) -> bool:
    return found.header is not None and not may_show_text(found.header)


def _draw(
    folder: Path, files: Sequence[Found], processes: int | None, progress: Progress | None
) -> Mapping[str, bytes | Refused]:
    items = [(str(folder / found.path), found.header.frames // 2 if found.header else 0) for found in files]
    drawn: dict[str, bytes | Refused] = {}
    results = work(thumbnail, items, processes=processes, seconds=SECONDS_PER_FILE, memory=_WORKER_BYTES)
    for number, result in results:
        drawn[files[number].path] = result
        if progress is not None:
            progress("pictures", len(drawn), len(files))
    return drawn


def _opening(facts: Facts) -> str:
    figures = {
        "files": facts.files,
        "images": facts.images,
        "patients": facts.patients,
        "studies": facts.studies,
        "series": facts.series,
        "scanners": len(facts.scanners),
        "not read": sum(facts.refused.values()),
    }
    tiles = "".join(f'<div class="tile"><b>{count:,}</b><span>{name}</span></div>' for name, count in figures.items())
    return (
        "<h1>What the scanners made</h1>"
        '<p class="soft">Counted from headers. Keep the page in the hospital: it shows images of patients.</p>'
        f'<div class="tiles">{tiles}</div>{_list(cautions(facts))}{_table(overview(facts))}'
    )


def _section(scanner: Scanner, made: Sequence[Found], pictures: Sequence[bytes | Refused]) -> str:
    shown = "".join(
        f'<img alt="image of this scanner" src="data:image/png;base64,{base64.b64encode(picture).decode()}">'
        for picture in pictures
        if isinstance(picture, bytes)
    )
    hidden = sum(not _can_be_shown(found) for found in made)
    notes = [f"{hidden:,} images may show burned-in text and are left out of the pictures."] if hidden else []
    refused = Counter(str(picture) for picture in pictures if isinstance(picture, Refused))
    notes += [f"{count} of the images chosen for pictures cannot be shown: {why}." for why, count in refused.items()]
    words = "".join(f'<p class="soft">{escape(note)}</p>' for note in notes)
    strip = f'<div class="strip">{shown}</div>' if shown else ""
    return f"<h2>{escape(scanner.name)}</h2>{strip}{words}{_table(scanner_rows(scanner))}"


def _refusals(facts: Facts) -> str:
    if not facts.refused_details:
        return "<h2>Not read</h2><p>Nothing: every file was read.</p>"
    rows = "".join(
        f'<tr><td class="count">{count:,}</td><td>{escape(why)}</td></tr>'
        for why, count in facts.refused_details.items()
    )
    return f"<h2>Not read</h2><table>{rows}</table>"


def _table(rows: Rows) -> str:
    return (
        f"<table>{''.join(f'<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>' for name, value in rows)}</table>"
    )


def _list(lines: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<div class="warning"><ul>{items}</ul></div>' if items else ""
