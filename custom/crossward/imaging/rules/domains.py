"""Which scanner domain a file belongs to: a function of its header alone, never of the folder it lies in."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from hashlib import blake2b
from operator import ge, gt, le, lt

from crossward.federation.errors import BadInput
from crossward.imaging.dicom.scans import Header
from crossward.imaging.labels.patients import names_someone
from crossward.imaging.refusals import Reason, Refused
from crossward.imaging.rules.site import DEFAULT_DOMAIN, DomainRule

TEXT_FIELDS = (
    "sop_class",
    "modality",
    "manufacturer",
    "model",
    "software",
    "station",
    "serial",
    "institution",
    "body_part",
    "view",
    "laterality",
    "image_type",
    "kernel",
)
NUMBER_FIELDS = ("kvp", "field_strength", "slice_thickness")
FIELDS = (*TEXT_FIELDS, *NUMBER_FIELDS)
LONGEST_NAME = 64

# They tell which hospital or which single machine it is, and the names of domains are printed.
_DISGUISED = ("station", "serial", "institution")
_SEPARATORS = frozenset(" .,;:_-/()\\")
_SAFE = re.compile(r"[a-z0-9][a-z0-9._-]*")
_NUMBER = r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
_COMPARISON = re.compile(rf"\s*(>=|<=|>|<|=)\s*({_NUMBER})\s*")
_DIGIT_PATTERN = re.compile(r"[-+0-9.*?\[\]!]*")
_OPERATORS: dict[str, Callable[[float, float], bool]] = {">=": ge, "<=": le, ">": gt, "<": lt, "=": math.isclose}


def domain_of(header: Header, rule: DomainRule) -> str:
    """The domain of a file.

    Raises:
        Refused: no match of the rule fits, and the fields that would make up the name are missing or name a person.
    """
    for name, patterns in rule.names:
        if _fits(header, patterns):
            return name
    if not rule.fields:
        raise Refused(Reason.NO_DOMAIN)
    lacking = [field for field in rule.fields if not _written(header, field)]
    if lacking:
        raise Refused(Reason.NO_DOMAIN, f"its header has no {', '.join(lacking)}")
    personal = [field for field in rule.fields if names_someone(_written(header, field), header)]
    if personal:
        raise Refused(Reason.NO_DOMAIN, f"what names a person stands in its {', '.join(personal)}")
    return safe_name(" ".join(_shown(header, field) for field in rule.fields))


def safe_name(text: str) -> str:
    """Small letters, digits, '.', '_' and '-', 64 at most: fit for a file name, a page and a line of a log.

    Where that loses letters or signs, a hash of the whole keeps two scanners apart.
    """
    plain = unicodedata.normalize("NFKD", text.replace("+", " plus "))
    letters = "".join(letter for letter in plain if letter.isascii())
    name = re.sub(r"[^a-z0-9._]+", "-", letters.lower()).strip("-._")
    kept = {letter for letter in letters if letter.isalnum()} | _SEPARATORS
    lost = any(letter not in kept and not unicodedata.combining(letter) for letter in plain)
    if lost or len(name) > LONGEST_NAME or name in ("", DEFAULT_DOMAIN):
        name = f"{name[: LONGEST_NAME - 9].rstrip('-._')}-{_hash(text.casefold())}".lstrip("-")
    return name


def check_name(name: str) -> None:
    """Refuses a domain's name that could not stand in a file name or a log."""
    if name == DEFAULT_DOMAIN:
        raise BadInput(f"'{DEFAULT_DOMAIN}' stands for every domain that has no steps of its own; choose another name")
    if len(name) > LONGEST_NAME or not _SAFE.fullmatch(name):
        raise BadInput(f"a domain's name is small letters, digits, '.', '_' and '-', {LONGEST_NAME} at most; rename it")


def check_pattern(field: str, pattern: str) -> None:
    """Refuses a pattern that could never fit what the field holds."""
    compares = pattern.lstrip()[:1] in ("<", ">", "=")
    if field in TEXT_FIELDS and compares:
        raise BadInput(f"{field} is text, which has no larger and smaller; give a pattern such as 'abc*'")
    if field in NUMBER_FIELDS and not (_DIGIT_PATTERN.fullmatch(pattern) or _comparisons(pattern)):
        raise BadInput(f"{field} is a number; give one, or a range such as '>=1.4 <1.6'")


def _fits(header: Header, patterns: Mapping[str, str]) -> bool:
    return all(_fits_one(header, field, pattern) for field, pattern in patterns.items())


def _fits_one(header: Header, field: str, pattern: str) -> bool:
    number = getattr(header, field) if field in NUMBER_FIELDS else None
    comparisons = _comparisons(pattern) if field in NUMBER_FIELDS else []
    if comparisons:
        return number is not None and all(compare(number, other) for compare, other in comparisons)
    return fnmatchcase(_written(header, field).casefold(), pattern.casefold())


def _comparisons(pattern: str) -> list[tuple[Callable[[float, float], bool], float]]:
    """The comparisons that a pattern is made of, all to be met; none where it is something else."""
    if re.fullmatch(_NUMBER, pattern.strip()):
        return [(math.isclose, float(pattern))]
    if not re.fullmatch(f"(?:{_COMPARISON.pattern})+", pattern):
        return []
    return [(_OPERATORS[sign], float(number)) for sign, number in _COMPARISON.findall(pattern)]


def _written(header: Header, field: str) -> str:
    value = getattr(header, field)
    if field in NUMBER_FIELDS:
        return "" if value is None else f"{value:g}"
    return " ".join(str(value).split())


def _shown(header: Header, field: str) -> str:
    written = _written(header, field)
    return _hash(written.casefold()) if field in _DISGUISED else written


def _hash(text: str) -> str:
    return blake2b(text.encode(), digest_size=4).hexdigest()
