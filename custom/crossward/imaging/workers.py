"""Work on many files in processes of their own, so that a decoder that crashes or hangs costs one file, not the run.

Image decoders are C libraries that get whatever a scanner, a network or a bad disk made of a file. Each worker takes a
few items at a time and notes in shared memory which one it is at; when it dies or stands still, that item is
the one to blame, and a new worker goes on with the rest.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from multiprocessing.sharedctypes import SynchronizedArray
from types import ModuleType
from typing import Any, TypeVar

from crossward.imaging.refusals import Reason, Refused

Item = TypeVar("Item")
Result = TypeVar("Result")
Answers = list[tuple[int, Any]]

_CONTEXT = get_context("forkserver")
# What workers are forked from has read these already, and nothing else: least of all the whole command.
_CONTEXT.set_forkserver_preload(["crossward.imaging.dicom.files"])
_LARGEST_CHUNK = 16
_POLL = 0.25
_IDLE = -1.0


def available_processes() -> int:
    """How many processes this one may keep busy."""
    return len(os.sched_getaffinity(0))


def work(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    *,
    processes: int | None = None,
    seconds: float = 60.0,
    memory: int | None = None,
    prepare: Callable[[], None] | None = None,
) -> Iterator[tuple[int, Result | Refused]]:
    """Gives (number of the item, result) as results come in; what goes wrong with an item is its result.

    Args:
        function: of a module, so that it can be named to another process.
        items: what to call it with.
        processes: how many at once; as many as there are processors when not given, 0 for this process itself.
        seconds: an item that takes longer is given up, and its process killed.
        memory: bytes that a worker may take beyond what it starts with.
        prepare: called once in every worker before its first item.
    """
    if processes == 0:
        if prepare is not None:
            prepare()
        for number, item in enumerate(items):
            yield number, _answer(function, item)
        return
    crew = _Crew(function, items, seconds=seconds, memory=memory, prepare=prepare)
    try:
        yield from crew.run(min(processes or available_processes(), len(items)))
    finally:
        crew.dismiss()


def _answer(function: Callable[[Any], Any], item: Any) -> Any:
    try:
        return function(item)
    except Refused as refused:
        return refused
    except MemoryError:
        return Refused(Reason.TOO_LARGE)
    except Exception as error:
        # Its text may quote the file's header: only the kind is passed on.
        return Refused(Reason.NOT_DECODED, type(error).__name__)


class _Worker:
    """One process with the items that it was given and has not answered."""

    def __init__(self, task: tuple[Any, ...]) -> None:
        self.link, theirs = _CONTEXT.Pipe()
        # The number of the item at work and since when, written by the worker and read by the parent.
        self._at: SynchronizedArray[float] = _CONTEXT.Array("d", [_IDLE, 0.0])
        self.process: ForkServerProcess = _CONTEXT.Process(target=_serve, args=(theirs, self._at, *task), daemon=True)
        with _without_main():
            self.process.start()
        theirs.close()
        self.given: list[int] = []

    def give(self, chunk: list[tuple[int, Any]]) -> None:
        self.given = [number for number, _ in chunk]
        with suppress(OSError):  # It died in the meantime, which its closed link will tell.
            self.link.send(chunk)

    @property
    def at(self) -> int:
        return int(self._at[0])

    def stands_still(self, seconds: float) -> bool:
        number, since = self._at[:]
        return number != _IDLE and time.monotonic() - since > seconds

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.link.close()


@contextmanager
def _without_main() -> Iterator[None]:
    """A started process would import the program that started it, which takes seconds and hundreds of megabytes."""
    program = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = program


def _serve(
    link: Connection,
    at: SynchronizedArray[float],
    function: Callable[[Any], Any],
    memory: int | None,
    prepare: Callable[[], None] | None,
) -> None:
    """A worker's life: ends when the parent closes the link, by will or by dying."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Decoders complain there in words of their own, which may come from the file.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    if prepare is not None:
        prepare()
    if memory is not None:
        limit = _data_bytes() + memory
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    with suppress(EOFError, OSError):
        while True:
            answers: Answers = []
            for number, item in link.recv():
                at[:] = [number, time.monotonic()]
                answers.append((number, _answer(function, item)))
            at[:] = [_IDLE, 0.0]
            link.send(answers)


def _data_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[5]) * resource.getpagesize()


class _Crew:
    def __init__(
        self,
        function: Callable[[Any], Any],
        items: Sequence[Any],
        *,
        seconds: float,
        memory: int | None,
        prepare: Callable[[], None] | None,
    ) -> None:
        self._items = items
        self._seconds = seconds
        self._task = (function, memory, prepare)
        self._waiting = deque(range(len(items)))
        self._workers: list[_Worker] = []
        self._died_idle = 0

    def run(self, processes: int) -> Iterator[tuple[int, Any]]:
        for _ in range(processes):
            self._hire()
        while self._workers:
            links: dict[Any, _Worker] = {worker.link: worker for worker in self._workers}
            ready = wait(list(links), timeout=_POLL)
            for link in ready:
                yield from self._hear(links[link])
            for worker in [each for each in self._workers if each.link not in ready]:
                if worker.stands_still(self._seconds):
                    yield from self._replace(worker, Reason.TIMED_OUT)

    def dismiss(self) -> None:
        for worker in self._workers:
            worker.end()
        self._workers = []

    def _hire(self) -> None:
        worker = _Worker(self._task)
        self._workers.append(worker)
        self._feed(worker)

    def _feed(self, worker: _Worker) -> None:
        """Small chunks towards the end, so that no worker is left with much while others are idle."""
        size = min(_LARGEST_CHUNK, 1 + len(self._waiting) // (4 * len(self._workers)))
        chunk = [self._waiting.popleft() for _ in range(min(size, len(self._waiting)))]
        if chunk:
            worker.give([(number, self._items[number]) for number in chunk])
        else:
            self._workers.remove(worker)
            worker.end()

    def _hear(self, worker: _Worker) -> Answers:
        try:
            answers: Answers = worker.link.recv()
        except (EOFError, OSError):
            return self._replace(worker, Reason.CRASHED)
        self._died_idle = 0
        self._feed(worker)
        return answers

    def _replace(self, worker: _Worker, reason: Reason) -> Answers:
        """Blame the item that the worker was at, put its other items back, and go on with a new worker.

        Raises:
            RuntimeError: workers cannot be started at all: they die before their first item again and again.
        """
        self._workers.remove(worker)
        blamed = worker.at
        worker.end()
        self._waiting.extendleft(reversed([number for number in worker.given if number != blamed]))
        self._died_idle = 0 if blamed in worker.given else self._died_idle + 1
        if self._died_idle > 3:
            raise RuntimeError("worker processes end before they begin")
        if self._waiting:
            self._hire()
        return [(blamed, Refused(reason))] if blamed in worker.given else []
