"""``crossward data receive``: take the images that an archive or a scanner sends."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from crossward.cli.progress import counting
from crossward.imaging.pacs.files import IMAGES, ImageFolder

_LOOK_EVERY = 0.5


def receive(
    out: Annotated[Path, typer.Option(help="Folder for the images; made private.")],
    caller: Annotated[list[str], typer.Option(help="AE title that may send; repeatable.")],
    title: Annotated[str, typer.Option(help="Our AE title.")] = "CROSSWARD",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Our port; 0 takes a free one.")] = 11112,
    bind: Annotated[str, typer.Option(help="Our address to listen on.")] = "0.0.0.0",
    idle: Annotated[float | None, typer.Option(min=0, help="Stop after so many seconds without an image.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the counts as JSON at the end.")] = False,
) -> None:
    """Take the images that an archive (PACS) or a scanner sends by C-STORE, until Ctrl-C or SIGTERM.

    An AE title is a name, not a proof: keep the port behind the hospital's firewall. Images are kept in the transfer
    syntax that they are sent in, under names that say nothing. Nothing is printed but counts.

    Example: crossward data receive --out scans --caller PACS --title CROSSWARD --port 11112
    """
    # Takes a while to import.
    from crossward.imaging.pacs.store import Receiver

    errors = Console(stderr=True)
    with ImageFolder(out) as images, _told_to_stop() as stop:
        receiver = Receiver(images, title=title, port=port, callers=caller, address=bind)
        received = receiver.received
        with receiver, counting(errors) as progress:
            errors.print(f"{title} listens on port {receiver.port}; Ctrl-C ends it.", highlight=False, markup=False)
            quiet, before = 0.0, -1
            while not stop.wait(_LOOK_EVERY) and (idle is None or quiet < idle):
                now = received.files + received.same + received.replaced
                quiet, before = (quiet + _LOOK_EVERY if now == before else 0.0), now
                progress("files received", now, now)
    if as_json:
        typer.echo(json.dumps({**received.as_json(), "folder": str(out / IMAGES)}, indent=2))
        return
    lines = [
        f"{received.files} files received ({received.bytes / 1e6:.1f} MB) in {out / IMAGES}, "
        f"{received.same} sent again, {received.replaced} replaced, {received.rejected} connections rejected.",
        *(f"{count} refused: {reason}." for reason, count in sorted(received.refused.items())),
    ]
    for line in lines:
        Console().print(line, soft_wrap=True, highlight=False, markup=False)


@contextmanager
def _told_to_stop() -> Iterator[threading.Event]:
    """An event that SIGTERM and SIGINT set, so that what is under way can come to an end."""
    stop = threading.Event()
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
