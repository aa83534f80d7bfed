"""Errors that a person can act on: each says what is wrong, where, and what to do next."""

from __future__ import annotations


class CrosswardError(Exception):
    """Base of every error that Crossward reports in one plain line.

    Attributes:
        exit_code: what the command returns to the shell.
    """

    exit_code = 1


class BadInput(CrosswardError):
    """The user asked for something that cannot be done; nothing was changed."""

    exit_code = 2


class SiteFailure(CrosswardError):
    """A site could not do its part of a round.

    Args:
        site: the site's name.
        round_number: the round in which it happened, from 1.
        cause: what went wrong, in plain words and without patient data.
        remedy: what to do about it.
    """

    exit_code = 3

    def __init__(self, *, site: str, round_number: int, cause: str, remedy: str) -> None:
        super().__init__(f"{site}, round {round_number}: {cause}. {remedy}")
        self.site = site
        self.round_number = round_number
        self.cause = cause
        self.remedy = remedy


class RunFailure(CrosswardError):
    """A run cannot go on; what was finished before is kept."""

    exit_code = 3


class StorageFailure(CrosswardError):
    """Something could not be written or read back; the previous version is untouched."""

    exit_code = 4


class OtherStudy(StorageFailure):
    """A file was written for another study or by another version; it is left as it is, and not used."""


class PrivacyRefusal(CrosswardError):
    """Something would have left a site that may not leave it."""

    exit_code = 5
