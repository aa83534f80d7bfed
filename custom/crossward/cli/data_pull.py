"""``crossward data pull``: copy studies from an archive into a folder of this site."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from crossward.cli.progress import counting
from crossward.federation.errors import BadInput, RunFailure
from crossward.imaging.pacs.access import LOGIN_VARIABLE, TOKEN_VARIABLE, read_access
from crossward.imaging.pacs.files import IMAGES, ImageFolder
from crossward.imaging.pacs.pull import Archive, Pulled
from crossward.imaging.pacs.pull import pull as pull_studies
from crossward.imaging.pacs.query import Query, read_day, read_list
from crossward.imaging.pacs.state import STATE_FILE
from crossward.imaging.pacs.trouble import Patience, Retrying
from crossward.imaging.pacs.web import DicomWeb

_MOST_LINES = 10


def pull(
    out: Annotated[Path, typer.Option(help="Folder for the images; made private. Start again with it to go on.")],
    url: Annotated[str | None, typer.Option(help="DICOMweb service, as https://archive.example/dicom-web.")] = None,
    pacs: Annotated[
        str | None, typer.Option(help="Instead of --url: an archive to C-MOVE from, TITLE@host:port.")
    ] = None,
    since: Annotated[str | None, typer.Option(help="First study day, as 2024-01-31.")] = None,
    until: Annotated[str | None, typer.Option(help="Last study day.")] = None,
    modality: Annotated[list[str] | None, typer.Option(help="Studies with such a series, as CT; repeatable.")] = None,
    studies: Annotated[Path | None, typer.Option(help="Text file with a study UID a line.")] = None,
    accessions: Annotated[Path | None, typer.Option(help="Text file with an accession number a line.")] = None,
    login_file: Annotated[
        Path | None, typer.Option(help=f"File with user:password; or set {LOGIN_VARIABLE} in the environment.")
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(help=f"File with a bearer token; or set {TOKEN_VARIABLE} in the environment.")
    ] = None,
    ca: Annotated[Path | None, typer.Option(help="PEM file of the authority that vouches for the archive.")] = None,
    certificate: Annotated[Path | None, typer.Option(help="This site's own certificate (PEM).")] = None,
    key: Annotated[Path | None, typer.Option(help="Its key, where it is in another file.")] = None,
    allow_http: Annotated[bool, typer.Option("--allow-http", help="Send a login over plain http.")] = False,
    title: Annotated[str, typer.Option(help="Our AE title, for --pacs.")] = "CROSSWARD",
    port: Annotated[int, typer.Option(help="Our port, which the archive sends to, for --pacs.")] = 11112,
    bind: Annotated[str, typer.Option(help="Our address to listen on, for --pacs.")] = "0.0.0.0",
    connections: Annotated[
        int | None, typer.Option(min=1, max=32, help="Studies at a time (4; with --pacs 1).")
    ] = None,
    attempts: Annotated[int, typer.Option(min=1, help="How often to try what fails in passing.")] = Patience.attempts,
    as_json: Annotated[bool, typer.Option("--json", help="Print the counts as JSON.")] = False,
) -> None:
    """Copy studies from an archive (PACS) into a folder, over DICOMweb or by C-MOVE; stopped, it goes on.

    Files come as the archive keeps them, one for each image, under names that say nothing. Nothing is printed but
    counts. What did not come is in the folder's pull.jsonl, with the reason.

    Example: crossward data pull --out scans --url https://archive.example/dicom-web --login-file login --since
    2024-01-01 --until 2024-03-31 --modality CT

    Example: crossward data pull --out scans --pacs PACS@10.0.0.5:104 --port 11112 --studies uids.txt
    """
    if (url is None) == (pacs is None):
        raise BadInput("an archive is needed, and only one; give --url (DICOMweb) or --pacs (C-MOVE)")
    query = Query(
        since=read_day(since, "--since"),
        until=read_day(until, "--until"),
        modalities=tuple(modality or ()),
        studies=read_list(studies) if studies else {},
        accessions=read_list(accessions) if accessions else {},
    )
    retrying = Retrying(Patience(attempts=attempts))

    with ExitStack() as stack:
        images = stack.enter_context(ImageFolder(out))
        archive: Archive
        if pacs:
            # Takes a while to import, and DICOMweb does without it.
            from crossward.imaging.pacs.move import MovingArchive, Peer
            from crossward.imaging.pacs.store import Receiver

            peer = Peer.parse(pacs)
            receiver = Receiver(images, title=title, port=port, callers=[peer.title], address=bind, only_expected=True)
            stack.enter_context(receiver)
            archive = stack.enter_context(
                MovingArchive(peer, receiver=receiver, retrying=retrying, connections=connections or 1)
            )
        else:
            archive = DicomWeb(
                url or "",
                access=read_access(
                    login_file=login_file, token_file=token_file, ca_file=ca, certificate=certificate, key=key
                ),
                retrying=retrying,
                connections=connections or 4,
                allow_http=allow_http,
            )
        progress = stack.enter_context(counting(Console(stderr=True)))
        pulled = pull_studies(archive, query, images, progress=progress)
    if as_json:
        typer.echo(json.dumps({**pulled.as_json(), "folder": str(out / IMAGES)}, indent=2))
    else:
        _tell(Console(), pulled, out)
    if not pulled.complete:
        raise typer.Exit(RunFailure.exit_code)


def _tell(console: Console, pulled: Pulled, out: Path) -> None:
    def say(line: str) -> None:
        console.print(line, soft_wrap=True, highlight=False, markup=False)

    say(
        f"{pulled.studies} studies: {pulled.files} files came ({pulled.bytes / 1e6:.1f} MB in {pulled.seconds:.1f} s, "
        f"{pulled.retries} retries), {pulled.present} were in {out / IMAGES} already."
    )
    if pulled.unasked:
        say(f"{pulled.unasked} studies left out: the archive named them although they do not fit the question.")
    for name, lines in pulled.not_found.items():
        some = ", ".join(map(str, lines[:_MOST_LINES])) + (", ..." if len(lines) > _MOST_LINES else "")
        say(f"{len(lines)} of --{name} not found (line {some}).")
    for trouble, count in sorted(pulled.missing.items()):
        say(f"{count} missing: {trouble.value}.")
    if pulled.missing:
        say(f"Which ones: {out / STATE_FILE} (keep it private). The same command asks for them again.")
