"""What all sites of a job agree on before they exchange a key, and how many of them a sum needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from crossward.federation.errors import PrivacyRefusal
from crossward.privacy.secagg.canonical import Malformed, digest
from crossward.privacy.secagg.masks import CipherName
from crossward.privacy.secagg.ring import Bits

VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Part of the signed job, the same for all its sites.

    Attributes:
        bits: of the ring.
        cipher: that makes masks.
        colluders: how many sites may work together with the server against the others.
        min_sites: the fewest sites that a sum is over; a site's own policy may ask for more.
        allow_pair: whether two sites may sum; each of them then knows the other's part.
        rounds: of the job; keys are of no use beyond.
    """

    bits: Bits = 32
    cipher: CipherName = "aes-256-ctr"
    colluders: int = 1
    min_sites: int = 3
    allow_pair: bool = False
    rounds: int = 1000

    def __post_init__(self) -> None:
        if self.bits not in (16, 24, 32) or self.cipher not in ("aes-256-ctr", "chacha20"):
            raise PrivacyRefusal("secure aggregation with a ring or a cipher that is not known here")
        if self.colluders < 0 or self.min_sites < 2 or self.rounds < 1:
            raise PrivacyRefusal("secure aggregation with settings that make no sense")
        if self.min_sites < 3 and not self.allow_pair:
            raise PrivacyRefusal("a sum over two sites shows each of them the other's part; sites must allow it")

    def threshold(self, sharers: int) -> int:
        """How many of the sharers it takes to open a secret.

        More than half of the sharers and colluders: opening both secrets of one site would take more honest sites
        than there are, since each answers once (SECURITY 3.1).
        """
        return (sharers + self.colluders) // 2 + 1

    @property
    def fewest(self) -> int:
        """The fewest sites that a sum may be over: two honest ones at least beside those that collude."""
        pair = self.allow_pair and self.min_sites == 2 and self.colluders <= 1
        return 2 if pair else max(3, self.colluders + 2, self.min_sites)

    def check_cohort(self, count: int) -> None:
        """Refuse a cohort in which a single site could be told from the sum, or that could never open a secret."""
        if count < self.fewest:
            raise PrivacyRefusal(f"a sum over {count} sites, and {self.fewest} is the fewest that is allowed")
        if self.threshold(count) > count:
            raise PrivacyRefusal(f"{count} sites cannot guard against {self.colluders} that collude with the server")

    def message(self) -> dict[str, Any]:
        """As it is signed."""
        return {**asdict(self), "allow_pair": int(self.allow_pair), "version": VERSION}

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Settings:
        """Read what ``message`` gave.

        Raises:
            Malformed: it is something else, or of another version of the protocol.
        """
        usual = cls().message()
        if {name: type(value) for name, value in message.items()} != {name: type(usual[name]) for name in usual}:
            raise Malformed("settings of secure aggregation that are none")
        values = dict(message)
        if values.pop("version") != VERSION:
            raise Malformed("settings of another version of secure aggregation")
        return cls(**{**values, "allow_pair": bool(values["allow_pair"])})

    def digest(self) -> bytes:
        return digest("settings", self.message())
