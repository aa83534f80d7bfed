"""Progress on long work: a bar where a person looks on, a line per round where the output goes to a file."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from crossward.site.inprocess import Event


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


@contextmanager
def counting(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """Show counts of named pieces of work; gives the ``progress(what, done, total)`` that library code calls."""
    with _bar(console) as bar:
        tasks: dict[str, int] = {}

        def progress(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = int(bar.add_task(what, total=total))
            bar.update(bar.tasks[tasks[what]].id, completed=done, total=total)

        yield progress


class RoundDisplay:
    """Listens to a run and shows every site and round."""

    def __init__(self, console: Console, *, rounds: int, sites: int) -> None:
        self._console = console
        self._rounds = rounds
        self._bar = _bar(console)
        self._task = self._bar.add_task("starting", total=rounds * sites)
        self._lock = threading.Lock()
        self._began = time.monotonic()

    def __enter__(self) -> RoundDisplay:
        self._bar.start()
        return self

    def __exit__(self, *details: object) -> None:
        self._bar.stop()

    def __call__(self, event: Event) -> None:
        """Take one event; called from the threads that train."""
        with self._lock:
            getattr(self, f"_on_{event.kind}")(event)

    def _on_resumed(self, event: Event) -> None:
        self._say(f"resumed after round {event.round_number}")
        total = self._bar.tasks[0].total or 0
        self._bar.update(self._task, completed=event.round_number * total / self._rounds)

    def _on_round(self, event: Event) -> None:
        self._began = time.monotonic()
        self._bar.update(self._task, description=f"round {event.round_number} of {self._rounds}")

    def _on_trained(self, event: Event) -> None:
        figures = event.figures or {}
        self._bar.update(
            self._task,
            advance=1,
            description=f"round {event.round_number} of {self._rounds}: {event.site} loss {figures['loss']:.3f}",
        )

    def _on_failed(self, event: Event) -> None:
        reason = (event.figures or {}).get("reason")
        self._say(f"round {event.round_number}: {event.site} failed: {reason}", style="red")

    def _on_aggregated(self, event: Event) -> None:
        figures = event.figures or {}
        sites = " ".join(f"{name} {_percent(fact['val_accuracy'])}" for name, fact in figures["sites"].items())
        seconds = time.monotonic() - self._began
        self._say(
            f"round {event.round_number:>3}/{self._rounds}  validation {_percent(figures['val_accuracy'])}"
            f"  ({sites})  {seconds:.1f} s"
        )

    def _say(self, line: str, *, style: str = "") -> None:
        self._console.print(line, style=style, highlight=False, markup=False, soft_wrap=True)


def _percent(value: float | None) -> str:
    return "n/a" if value is None else f"{100 * value:.1f} %"
