"""Who takes part in a job: every site's keys, endorsed by its certificate, and the same list at every site."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from crossward.federation.errors import BadInput, PrivacyRefusal
from crossward.federation.names import check_site_name
from crossward.privacy.secagg.canonical import Malformed, decode, digest, encode, field
from crossward.privacy.secagg.identity import Identity, Untrusted, check_signed
from crossward.privacy.secagg.keys import KEY_BYTES, JobKeys
from crossward.privacy.secagg.settings import Settings


@dataclass(frozen=True)
class Member:
    """One site of a roster.

    Attributes:
        name: as in its certificate.
        place: its number among the names in order, from 1: where its shares are on every polynomial.
        agree_key: to agree on a secret with it.
        verify_key: to check what it signs.
    """

    name: str
    place: int
    agree_key: bytes
    verify_key: bytes


@dataclass(frozen=True)
class Roster:
    """The sites of a job, checked.

    Attributes:
        members: by name, in order.
        digest: of everything that was said, the same at every site or they share no key.
    """

    members: Mapping[str, Member]
    digest: bytes


def hello(name: str, job: str, *, settings: Settings, identity: Identity, keys: JobKeys) -> bytes:
    """A site's keys for a job, signed by its certificate."""
    body = {
        "name": name,
        "job": job,
        "agree_key": keys.agree_key,
        "verify_key": keys.verify_key,
        "settings": settings.message(),
    }
    content = encode(body)
    signature = identity.sign(digest("hello", content))
    return encode({"body": content, "certificate": identity.certificate, "signature": signature})


def check_roster(hellos: Sequence[bytes], *, job: str, settings: Settings, roots: bytes) -> Roster:
    """Hold every hello against this site's own root certificate and settings.

    Raises:
        Untrusted: a key that no certificate of the federation endorses for this job.
        PrivacyRefusal: too few sites, one of them twice, or other settings at another site.
    """
    bodies = [checked_hello(each, job=job, settings=settings, roots=roots) for each in hellos]
    names = [body["name"] for body in bodies]
    keys = [body[kind] for body in bodies for kind in ("agree_key", "verify_key")]
    if len(set(names)) != len(names) or len(set(keys)) != len(keys):
        raise Untrusted("two sites of the roster have one name, or one key")
    settings.check_cohort(len(names))
    members = {
        body["name"]: Member(body["name"], place, body["agree_key"], body["verify_key"])
        for place, body in enumerate(sorted(bodies, key=lambda body: str(body["name"])), start=1)
    }
    return Roster(members, digest("roster", job, sorted(hellos)))


def checked_hello(message: bytes, *, job: str, settings: Settings, roots: bytes) -> dict[str, Any]:
    """What one site says of itself, when its certificate endorses it for this job."""
    outer = decode(message)
    content = field(outer, "body", bytes)
    body: dict[str, Any] = decode(content)
    name = field(body, "name", str)
    try:
        check_site_name(name)
    except BadInput as error:
        raise Malformed("a site of the roster has no proper name") from error
    check_signed(
        digest("hello", content),
        field(outer, "signature", bytes),
        certificate=field(outer, "certificate", bytes),
        name=name,
        roots=roots,
    )
    if field(body, "job", str) != job:
        raise Untrusted(f"{name}'s keys are of another job")
    if any(len(field(body, kind, bytes)) != KEY_BYTES for kind in ("agree_key", "verify_key")):
        raise Malformed(f"{name}'s keys are none")
    if Settings.from_message(field(body, "settings", dict)) != settings:
        raise PrivacyRefusal(f"{name} was given other settings of secure aggregation than this site")
    return body
