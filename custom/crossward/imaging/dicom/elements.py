"""The elements of a DICOM data set, unpacked value by value.

pydicom walks the file, but its own conversion of values warns in words that quote them.
"""

from __future__ import annotations

import io
import logging
import struct
import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any

from pydicom.charset import decode_bytes
from pydicom.datadict import dictionary_VR, tag_for_keyword
from pydicom.dataelem import RawDataElement
from pydicom.dataset import Dataset
from pydicom.filereader import read_sequence

from crossward.imaging.refusals import Reason, Refused

# What pydicom says of a broken file may quote the file.
warnings.filterwarnings("ignore", module=r"pydicom(\.|$)")
logging.getLogger("pydicom").setLevel(logging.CRITICAL + 1)

UNDEFINED_LENGTH = 0xFFFFFFFF
# What asking for a malformed value raises.
MALFORMED = (ValueError, OverflowError, struct.error)
_ESCAPE = b"\x1b"
_BLANKS = " \0\t\r\n"
_NUMBERS = {"US": "H", "SS": "h", "UL": "I", "SL": "i", "UV": "Q", "SV": "q", "FL": "f", "FD": "d"}
_TEXTS = frozenset({"AE", "AS", "CS", "DA", "DS", "DT", "IS", "LO", "LT", "PN", "SH", "ST", "TM", "UC", "UI", "UT"})
_WORDS = frozenset({"OV", "OW", "OB", "US", "SS", "UN"})


@cache
def tag(keyword: str) -> int:
    """The number of an element of the standard."""
    number = tag_for_keyword(keyword)
    if number is None:
        raise KeyError(keyword)
    return int(number)


class Elements:
    """The elements of a data set or of a sequence's item.

    Methods that give numbers raise one of `MALFORMED` where something else is written.
    """

    def __init__(self, dataset: Dataset, encodings: Sequence[str]) -> None:
        self._dataset = dataset
        self._encodings = encodings

    def text(self, keyword: str) -> str:
        """The text, empty where there is none; several values stay separated by backslashes."""
        value, _, _ = self._value(tag(keyword), keyword)
        if value.isascii() and _ESCAPE not in value:
            return value.decode("ascii").strip(_BLANKS)
        try:
            return str(decode_bytes(value, self._encodings, {0x5C, 0x5E, 0x3D})).strip(_BLANKS)
        except Exception:
            return value.decode("latin-1").strip(_BLANKS)

    def numbers(self, keyword: str) -> list[float]:
        """The numbers of an element, whichever way they are written."""
        return self.numbers_at(tag(keyword), keyword)

    def numbers_at(self, number: int, keyword: str = "") -> list[float]:
        """The same of an element that has no keyword, as in the groups of overlays."""
        value, vr, order = self._value(number, keyword)
        if vr in _NUMBERS:
            return [float(each) for (each,) in struct.iter_unpack(order + _NUMBERS[vr], value)]
        if vr not in _TEXTS:
            raise ValueError(vr)
        words = value.decode("ascii").strip(" \0").split("\\")
        return [] if words == [""] else [float(word) for word in words]

    def number(self, keyword: str) -> float | None:
        """The first number, None where there is none."""
        found = self.numbers(keyword)
        return found[0] if found else None

    def integer(self, keyword: str) -> int | None:
        """The first number, which must be whole."""
        found = self.number(keyword)
        if found is None:
            return None
        if found != int(found):
            raise ValueError(keyword)
        return int(found)

    def words(self, keyword: str) -> tuple[bytes, str]:
        """The bytes of a table, and their byte order as struct writes it."""
        value, vr, order = self._value(tag(keyword), keyword)
        if vr not in _WORDS:
            raise ValueError(vr)
        return value, order

    def items(self, keyword: str) -> list[Elements]:
        """The items of a sequence; none where there is no such sequence."""
        raw = self._raw(tag(keyword))
        if raw is None:
            return []
        try:
            # Not by the data set itself, which would convert other elements on the way.
            if isinstance(raw, RawDataElement):
                value = raw.value or b""
                stream = io.BytesIO(value)
                items = read_sequence(stream, raw.is_implicit_VR, raw.is_little_endian, len(value), self._encodings)
            else:
                items = raw.value
            return [Elements(item, self._encodings) for item in items]
        except Exception:
            raise Refused(Reason.DAMAGED, f"sequence {keyword}") from None

    def check_whole(self) -> None:
        """Refuses values that are shorter than they say: the last one of a file that was cut off."""
        for raw in self._dataset.values():
            if isinstance(raw, RawDataElement) and raw.length not in (0, UNDEFINED_LENGTH):
                if raw.value is None:
                    raise Refused(Reason.TOO_LARGE, "its header")
                if len(raw.value) < raw.length:
                    raise Refused(Reason.DAMAGED, "an element is longer than the file")

    def _raw(self, number: int) -> Any:
        try:
            return self._dataset.get_item(number)
        except KeyError:
            return None

    def _value(self, number: int, keyword: str) -> tuple[bytes, str, str]:
        """The bytes, the value representation (the dictionary's where the file gives none) and the byte order."""
        raw = self._raw(number)
        if raw is None:
            return b"", "LO", "<"
        if not isinstance(raw, RawDataElement):
            raise ValueError(keyword)
        vr = raw.VR
        if vr in (None, "UN"):
            vr = dictionary_VR(number).split(" or ")[0] if keyword else "US"
        if raw.value is None and raw.length:
            raise ValueError(keyword)
        return raw.value or b"", str(vr), "<" if raw.is_little_endian else ">"
