"""Progress on long work: a bar where a person looks on, a line per round where the output goes to a file."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from crossward.site.troubles import words


class Event(Protocol):
    """What a run tells about itself, in one process or through FLARE."""

    @property
    def kind(self) -> str: ...
    @property
    def round_number(self) -> int: ...
    @property
    def site(self) -> str | None: ...
    @property
    def figures(self) -> Mapping[str, Any] | None: ...


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
        """Take one event; called from the threads that train. A kind that is not known here needs no line."""
        show = getattr(self, f"_on_{event.kind}", None)
        if show is not None:
            with self._lock:
                show(event)

    def _on_resumed(self, event: Event) -> None:
        self._say(f"resumed after round {event.round_number}")
        total = self._bar.tasks[0].total or 0
        self._bar.update(self._task, completed=event.round_number * total / self._rounds)

    def _on_round(self, event: Event) -> None:
        self._began = time.monotonic()
        self._bar.update(self._task, description=f"round {event.round_number} of {self._rounds}")

    def _on_trained(self, event: Event) -> None:
        loss = (event.figures or {})["loss"]
        told = "trained" if loss is None else f"loss {loss:.3f}"
        self._bar.update(
            self._task, advance=1, description=f"round {event.round_number} of {self._rounds}: {event.site} {told}"
        )

    def _on_failed(self, event: Event) -> None:
        reason = (event.figures or {}).get("reason")
        self._say(f"round {event.round_number}: {event.site} failed: {reason}", style="red")

    def _on_aggregated(self, event: Event) -> None:
        figures = event.figures or {}
        sites = " ".join(f"{name} {_percent(fact['val_accuracy'])}" for name, fact in figures["sites"].items())
        seconds = figures.get("seconds", time.monotonic() - self._began)
        each = f"({sites})" if sites else "(all sites together)"
        self._say(
            f"round {event.round_number:>3}/{self._rounds}  validation {_percent(figures['val_accuracy'])}"
            f"  {each}  {seconds:.1f} s"
        )

    def _say(self, line: str, *, style: str = "") -> None:
        self._console.print(line, style=style, highlight=False, markup=False, soft_wrap=True)


class JobDisplay(RoundDisplay):
    """Listens to a run on FLARE: the same lines, and what can happen to sites and server on the way."""

    def __init__(self, console: Console) -> None:
        super().__init__(console, rounds=0, sites=0)

    def _on_started(self, event: Event) -> None:
        figures = event.figures or {}
        sites, after = figures["sites"], figures.get("resumed_after")
        self._rounds = int(figures["rounds"])
        self._bar.update(self._task, total=self._rounds * len(sites), completed=(after or 0) * len(sites))
        again = "" if after is None else f", going on after round {after}"
        self._say(f"run {figures['run']}: {len(sites)} sites, {self._rounds} rounds{again}")

    def _on_joined(self, event: Event) -> None:
        self._say(f"  {event.site} joined: versions, policy, labels and images are in order")

    def _on_refused(self, event: Event) -> None:
        self._trouble(event, "refused to join")

    def _on_failed(self, event: Event) -> None:
        self._trouble(event, "failed")

    def _on_absent(self, event: Event) -> None:
        self._trouble(event, "is left out")

    def _on_back(self, event: Event) -> None:
        self._say(f"round {event.round_number}: {event.site} is back", style="green")

    def _on_closed(self, event: Event) -> None:
        reported = (event.figures or {}).get("reported", [])
        self._bar.update(self._task, description=f"round {event.round_number} closed with {len(reported)} sites")

    def _on_finished(self, event: Event) -> None:
        self._say(f"every site deploys the model of round {event.round_number}")

    def _on_waiting(self, event: Event) -> None:
        self._say(f"waiting: {(event.figures or {}).get('reason')}", style="yellow")

    def _on_unreachable(self, event: Event) -> None:
        self._say(f"the server does not answer (after round {event.round_number}); trying again", style="yellow")

    def _on_reachable(self, event: Event) -> None:
        self._say(f"the server answers again (after round {event.round_number})", style="green")

    def _on_resuming(self, event: Event) -> None:
        run = (event.figures or {}).get("run")
        self._say(
            f"the job died after round {event.round_number}; its run {run} is resumed as a new job", style="yellow"
        )

    def _on_resumed(self, event: Event) -> None:
        self._say(f"resumed as job {(event.figures or {}).get('job')}", style="green")

    def _trouble(self, event: Event, what: str) -> None:
        figures = event.figures or {}
        told = words(int(figures.get("code", 0)), figures.get("numbers"))
        self._say(f"round {event.round_number}: {event.site} {what}: {told}", style="red")


def _percent(value: float | None) -> str:
    return "n/a" if value is None else f"{100 * value:.1f} %"
