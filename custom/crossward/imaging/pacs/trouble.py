"""What can go wrong with an archive: what passes is tried again, what stays is a row with a reason of a closed list."""

from __future__ import annotations

import logging
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

Result = TypeVar("Result")

# An archive that errs about one image errs about it again; one that is away may be away for a minute.
FEW_ATTEMPTS = 3
_TALKATIVE = ("pydicom", "pynetdicom", "urllib3")


class Trouble(StrEnum):
    """Why something that the archive lists is not in the folder; the value is what a report prints."""

    GONE = "is listed, but no longer there"
    FORBIDDEN = "may not be read with this login"
    NOT_DELIVERED = "is listed, but not delivered"
    SHORT_LIST = "is counted, but not listed"
    NOT_DICOM = "came as something that is not DICOM"
    DAMAGED = "came cut short or damaged"
    OTHER = "came as another image than the one asked for"


class Lost(Exception):
    """An image or a study that is given up, with the reason; the pull goes on."""

    def __init__(self, trouble: Trouble) -> None:
        super().__init__(trouble.value)
        self.trouble = trouble


class Passing(Exception):
    """Something that may go away by itself.

    Args:
        line: what is wrong, where, and what to do, should it stay.
        attempts: after so many it counts as staying; as many as the patience allows when not given.
        trouble: the reason in a report, should it stay with one image only.
        wait: the least seconds until the next attempt, where the archive asks for it.
    """

    def __init__(
        self,
        line: str,
        *,
        attempts: int | None = None,
        trouble: Trouble = Trouble.NOT_DELIVERED,
        wait: float = 0.0,
    ) -> None:
        super().__init__(line)
        self.attempts = attempts
        self.trouble = trouble
        self.wait = wait


class Stopped(Exception):
    """Somebody asked the pull to end."""


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How often and how long to wait for an archive.

    Attributes:
        attempts: how many in all.
        first: seconds until the second one; every later wait is twice as long.
        longest: no wait is longer, save where the archive asks for it.
    """

    attempts: int = 8
    first: float = 1.0
    longest: float = 30.0

    def seconds(self, attempt: int) -> float:
        """The wait after an attempt, from 1; half of it by chance, so that clients do not march in step."""
        return min(self.longest, self.first * 2.0 ** (attempt - 1)) * random.uniform(0.5, 1.0)


class Retrying:
    """Runs actions again that fail in passing; counts how often, and can be stopped from another thread."""

    LONGEST_REQUESTED = 120.0

    def __init__(self, patience: Patience) -> None:
        self.retries = 0
        self._patience = patience
        self._answered = False
        self._lock = threading.Lock()
        self._stop = threading.Event()

    def __call__(self, action: Callable[[], Result]) -> Result:
        """The action's result.

        Raises:
            Passing: it failed until patience ended.
            Stopped: `stop` was called.
        """
        attempt = 0
        while True:
            self.check()
            try:
                result = action()
            except Passing as error:
                attempt += 1
                if attempt >= min(self._patience.attempts, error.attempts or self._patience.attempts, self._most()):
                    raise
                with self._lock:
                    self.retries += 1
                wait = max(self._patience.seconds(attempt), min(error.wait, self.LONGEST_REQUESTED))
                if self._stop.wait(wait):
                    raise Stopped from None
            else:
                self._answered = True
                return result

    def _most(self) -> int:
        # Whoever mistyped the host should not wait for a minute to learn it.
        return self._patience.attempts if self._answered else 2

    def stop(self) -> None:
        """Let every action end at its next attempt or check."""
        self._stop.set()

    def check(self) -> None:
        """Raises Stopped after `stop`."""
        if self._stop.is_set():
            raise Stopped


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Keep the libraries from writing headers, UIDs and searches to logs and to standard error."""
    loggers = [logging.getLogger(name) for name in _TALKATIVE]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
