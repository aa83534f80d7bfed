"""A site's contribution as one vector of whole numbers, and the sum of such vectors as sums of tensors again.

Products ``coefficient * tensor`` come first, in fixed point within public limits: those for all sites, then a slot for
each site that is to read its own, which ends with check words. After them, exactly: the coefficients alone, the
tallies, and how many values were held at a limit. No number of a single site is ever outside the vector.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray

from crossward.federation.contract import ALL, Contribution, Share, Summed, Tally, Vector
from crossward.federation.errors import PrivacyRefusal
from crossward.federation.rules import per_row
from crossward.privacy.secagg.canonical import digest
from crossward.privacy.secagg.keys import derive
from crossward.privacy.secagg.masks import CipherName, Words, keystream
from crossward.privacy.secagg.ring import Bits, Ring

# An exact number is written in so many bits of every word that sums of 256 of them do not reach the word's end.
_LIMB_BITS: dict[Bits, int] = {16: 8, 24: 15, 32: 20}
_NUMBER_BITS = 60
_FRACTION_BITS = 24
_LARGEST = 2.0 ** (_NUMBER_BITS - _FRACTION_BITS - 1)
_MOST_PARTIES = 256
# Of a tensor with so many values a part of them may be held at a limit: beyond it the sum says little but signs, and
# where all signs agree they are everybody's.
_MANY_VALUES = 1024
_MOST_HELD = 1 / 16
_CHECKS = 32
_CHECKED_AT_ONCE = 1 << 15


@dataclass(frozen=True)
class Section:
    """Where the product of one tensor for one slot is."""

    slot: str
    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def where(self) -> slice:
        return slice(self.start, self.start + prod(self.shape))


class VectorLayout:
    """What is where in the vectors of one sum; the same for all sites of a plan.

    Args:
        template: anybody's contribution under the plan; only its names and shapes count.
        tallies: names and shapes of the numbers that are summed beside it.
        parties: how many sites take part.
        bits: of the ring.
    """

    def __init__(
        self, template: Contribution, tallies: Mapping[str, tuple[int, ...]], *, parties: int, bits: Bits = 32
    ) -> None:
        if not 0 < parties <= _MOST_PARTIES:
            raise PrivacyRefusal(f"a sum over {parties} sites, and {_MOST_PARTIES} is the most")
        self.ring = Ring(bits, parties)
        self._limb_bits = _LIMB_BITS[bits]
        self._limbs = -(-_NUMBER_BITS // self._limb_bits)
        self.sections: list[Section] = []
        self.slots: dict[str, slice] = {}
        self._numbers: dict[tuple[str, ...], tuple[int, ...]] = {}
        end = 0
        for slot in sorted(template, key=lambda slot: (slot != ALL, slot)):
            begin = end
            for name, share in template[slot].items():
                coefficient = np.asarray(share.coefficient)
                rows = coefficient.shape or tuple(share.value.shape[:1])
                self.sections.append(Section(slot, name, (*rows, *share.value.shape[1:]), end))
                self._numbers["coefficient", slot, name] = coefficient.shape
                end += prod(self.sections[-1].shape)
            if slot != ALL:
                end += _CHECKS
                self.slots[slot] = slice(begin, end)
        self._numbers |= {("tally", key): shape for key, shape in tallies.items()}
        self._numbers |= {("outside", name): () for name in sorted({section.name for section in self.sections})}
        self._exact_start = end
        self._exact = sum(prod(shape) for shape in self._numbers.values())
        self.words = end + self._limbs * self._exact

    def digest(self, limits: Mapping[str, float]) -> str:
        """Of the layout and the limits, so that no site masks for another one."""
        content = [
            [[section.slot, section.name, list(section.shape)] for section in self.sections],
            [[list(key), list(shape)] for key, shape in self._numbers.items()],
            {name: float(limit).hex() for name, limit in limits.items()},
            [self.ring.bits, self.ring.parties],
        ]
        return digest("layout", content).hex()

    def encode(
        self,
        contribution: Contribution,
        tally: Tally,
        limits: Mapping[str, float],
        *,
        rounding_key: bytes | None = None,
        checks_key: bytes | None = None,
        cipher: CipherName = "aes-256-ctr",
        cut_off: bool = True,
    ) -> Words:
        """Write one site's contribution and tally.

        Args:
            contribution: of this site.
            tally: of this site; what it lacks counts as zero.
            limits: of every tensor, the largest product that is not cut off.
            rounding_key: see ``Ring.encode_into``; every section gets one of its own from it.
            checks_key: of the slots' check words, which are zero without it.
            cipher: likewise.
            cut_off: whether products beyond their limits may be held at them.

        Raises:
            PrivacyRefusal: a number is not finite or too large, a limit would cut off much of a tensor, or the
                contribution is not of this layout.
        """
        words = np.zeros(self.words, dtype=np.uint32)
        numbers: dict[tuple[str, ...], Vector] = {("tally", key): value for key, value in tally.items()}
        outside: dict[str, int] = {}
        for section in self.sections:
            share = contribution[section.slot][section.name]
            values, coefficient = _factors(share)
            if values.shape != section.shape:
                raise PrivacyRefusal(f"'{section.name}' has another shape than the vector has room for")
            held = self.ring.encode_into(
                words[section.where],
                values.reshape(-1),
                weight=1 / self.ring.parties,
                limit=limits[section.name],
                coefficient=coefficient,
                rounding_key=rounding_key and derive(rounding_key, "rounding", parts=[section.slot, section.name]),
                cipher=cipher,
            )
            if held and not cut_off:
                raise PrivacyRefusal(f"'{section.name}' has values beyond the range that all sites have in common")
            if values.size >= _MANY_VALUES and held > _MOST_HELD * values.size:
                raise PrivacyRefusal(f"the range for '{section.name}' is so narrow that mostly signs would be left")
            outside[section.name] = outside.get(section.name, 0) + held
            numbers["coefficient", section.slot, section.name] = np.asarray(share.coefficient, dtype=np.float64)
        numbers |= {("outside", name): np.array(float(count)) for name, count in outside.items()}
        words[self._exact_start :] = self._exactly(self._flat(numbers))
        if checks_key is not None:
            for where in self.slots.values():
                words[where][-_CHECKS:] = checks_of(words[where][:-_CHECKS], checks_key)
        return words

    def _flat(self, numbers: Mapping[tuple[str, ...], Vector]) -> Vector:
        found = [np.zeros(shape) if key not in numbers else numbers[key] for key, shape in self._numbers.items()]
        for value, (key, shape) in zip(found, self._numbers.items(), strict=True):
            if np.shape(value) != shape:
                raise PrivacyRefusal(f"'{key[-1]}' has another shape than the vector has room for")
        return np.array(list(chain.from_iterable(np.ravel(value) for value in found)), dtype=np.float64)

    def numbers(self, words: Words) -> dict[tuple[str, ...], Vector]:
        """The exact sums of an opened vector: coefficients, tallies, and how many values were cut off."""
        flat = self._summed(words[self._exact_start :])
        found, start = {}, 0
        for key, shape in self._numbers.items():
            found[key] = flat[start : start + prod(shape)].reshape(shape)
            start += prod(shape)
        return found

    def sums(self, words: Words, limits: Mapping[str, float], *, slot: str = ALL) -> Iterator[tuple[str, Summed]]:
        """The sums of tensors of one slot of an opened vector; a site's own slot once its pads are off."""
        numbers = self.numbers(words)
        for section in self.sections:
            if section.slot == slot:
                yield section.name, self.summed(section, words[section.where], limits, numbers)

    def summed(
        self,
        section: Section,
        words: Words,
        limits: Mapping[str, float],
        numbers: Mapping[tuple[str, ...], Vector],
    ) -> Summed:
        """One tensor's sum from its own words."""
        values = self.ring.decode(words, limit=limits[section.name] * self.ring.parties)
        coefficient = numbers["coefficient", section.slot, section.name]
        value = torch.from_numpy(values.reshape(section.shape))
        return Summed(value, coefficient if coefficient.ndim else float(coefficient))

    def _exactly(self, values: Vector) -> Words:
        """Numbers as whole multiples of 2^-24, in limbs of a word each, lowest first."""
        if not np.isfinite(values).all() or np.abs(values).max(initial=0.0) >= _LARGEST:
            raise PrivacyRefusal("a number is not finite or too large to be summed; nothing was sent")
        whole = np.rint(values * 2.0**_FRACTION_BITS).astype(np.int64)
        shifts = np.arange(self._limbs, dtype=np.int64) * self._limb_bits
        limbs = (whole[:, None] >> shifts) & ((1 << self._limb_bits) - 1)
        return limbs.astype(np.uint32).reshape(-1)

    def _summed(self, words: Words) -> Vector:
        """Sums modulo 2^60 of such numbers, with their sign."""
        kept = words.reshape(-1, self._limbs).astype(np.uint64) & np.uint64((1 << self.ring.bits) - 1)
        shifts = np.arange(self._limbs, dtype=np.uint64) * np.uint64(self._limb_bits)
        whole = (kept << shifts).sum(axis=1, dtype=np.uint64)
        spare = np.uint64(64 - _NUMBER_BITS)
        signed = (whole << spare).view(np.int64) >> np.int64(spare)
        values: Vector = signed.astype(np.float64) * 2.0**-_FRACTION_BITS
        return values


def checks_of(words: Words, key: bytes) -> Words:
    """Secret linear functions of a slot's words, which add up with them: a sum that was changed does not fit its own.

    A change goes unseen with a chance of one in 2^32, for whoever has not the key.
    """
    found = np.zeros(_CHECKS, dtype=np.uint32)
    for first in range(0, len(words), _CHECKED_AT_ONCE):
        piece = words[first : first + _CHECKED_AT_ONCE]
        factors = keystream(derive(key, "checks", parts=[first]), _CHECKS * len(piece)).reshape(_CHECKS, -1)
        found += (factors * piece).sum(axis=1, dtype=np.uint32)
    return found


def checked(words: Words, key: bytes, *, bits: Bits) -> Words:
    """A site's own slot of an opened sum without its check words, once its pads are off.

    Raises:
        PrivacyRefusal: it is not what the sites summed.
    """
    content, checks = words[:-_CHECKS], words[-_CHECKS:]
    if ((checks_of(content, key) - checks) << np.uint32(32 - bits)).any():
        raise PrivacyRefusal("what is said to be this site's part of a sum is not what the sites summed for it")
    return content


def _factors(share: Share) -> tuple[NDArray[np.float32], float]:
    """Values and the one number that makes products of them; rows with a number each are multiplied here."""
    if isinstance(share.coefficient, np.ndarray):
        rows: NDArray[np.float32] = (share.value * per_row(share.coefficient, share.value)).float().numpy()
        return rows, 1.0
    return share.value.numpy(), share.coefficient
