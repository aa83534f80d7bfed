"""Whose an image is, as far as its header tells, and where two people seem to share an id."""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations

from crossward.imaging.dicom.scans import Header

_SEXES = {"M", "F"}
_ISSUED = "{id} ({issuer})"
_SHORTEST_WORD = 4


def patient_ids(headers: Mapping[str, Header]) -> dict[str, str]:
    """The patient of each file, by its path; files without a patient id are left out.

    Two hospitals may give one id to two people: where every file with an id says who issued it, the issuer counts.
    Where some do not say, the id alone does, so that no person's images come apart.
    """
    issuers: defaultdict[str, set[str]] = defaultdict(set)
    for header in headers.values():
        issuers[header.patient_id.strip()].add(header.issuer.strip())
    ids = {}
    for path, header in headers.items():
        patient, issuer = header.patient_id.strip(), header.issuer.strip()
        if patient:
            apart = "" not in issuers[patient] and len(issuers[patient]) > 1
            ids[path] = _ISSUED.format(id=patient, issuer=issuer) if apart else patient
    return ids


def clashing(headers: Sequence[Header]) -> bool:
    """Whether headers with one patient id speak of two people.

    They do when birth dates differ, when one says male and one female, or when two names have no part in common and
    there is no birth date in all of them to vouch for a changed name. What a header does not say contradicts nothing.
    """
    births = {header.birth_date.strip() for header in headers}
    if len(births - {""}) > 1 or {header.sex.strip().upper() for header in headers} >= _SEXES:
        return True
    if births and "" not in births:
        return False
    names = {words for header in headers if (words := frozenset(_words(header.patient_name)))}
    return any(one.isdisjoint(other) for one, other in combinations(names, 2))


def names_someone(text: str, header: Header) -> bool:
    """Whether a text is about the patient: written as names are, with a word of theirs, or with an id."""
    if "^" in text:
        return True
    ids = (header.patient_id, header.birth_date, header.accession, header.study_uid)
    words = {word for word in _words(header.patient_name) if len(word) >= _SHORTEST_WORD}
    return not words.isdisjoint(_words(text)) or any(
        len(each) >= _SHORTEST_WORD and each.casefold() in text.casefold() for each in ids
    )


def _words(name: str) -> list[str]:
    """In any writing, without accents, case and order."""
    plain = unicodedata.normalize("NFKD", name.casefold())
    return re.findall(r"\w+", "".join(letter for letter in plain if not unicodedata.combining(letter)))
