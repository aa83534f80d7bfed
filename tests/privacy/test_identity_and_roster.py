from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import NameOID

from crossward.federation.errors import PrivacyRefusal
from crossward.privacy.secagg.canonical import Malformed, decode, digest, encode
from crossward.privacy.secagg.identity import Identity, Untrusted, check_signed
from crossward.privacy.secagg.keys import JobKeys
from crossward.privacy.secagg.memory import Forgetful
from crossward.privacy.secagg.roster import Roster, check_roster, hello
from crossward.privacy.secagg.settings import Settings
from tests.privacy.federation import JOB, Authority, authority, identity, names, secure_site

SETTINGS = Settings()


@dataclass(frozen=True)
class Holder:
    """A certificate with its key, that may issue others."""

    certificate: x509.Certificate
    key: Any

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    def identity(self, *more: Holder) -> Identity:
        key = self.key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
        )
        return Identity(self.pem + b"".join(each.pem for each in more), key)


def _subject(*common_names: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name) for name in common_names])


def _issue(
    *common_names: str,
    by: Holder | None = None,
    ca: bool | None = False,
    key: Any = None,
    begins: int = -1,
    ends: int = 1,
) -> Holder:
    key = key or ec.generate_private_key(ec.SECP256R1())
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(_subject(*common_names))
        .issuer_name(by.certificate.subject if by else _subject(*common_names))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + timedelta(days=begins))
        .not_valid_after(now + timedelta(days=ends))
    )
    if ca is not None:
        builder = builder.add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
    return Holder(builder.sign(by.key if by else key, hashes.SHA256()), key)


@lru_cache(maxsize=1)
def _root() -> Holder:
    return _issue("federation", ca=True)


@lru_cache(maxsize=8)
def _rsa(number: int) -> Any:
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


def _check(who: Identity, *, name: str = "site-00", roots: bytes | None = None, message: bytes = b"message") -> None:
    check_signed(
        message,
        who.sign(b"message"),
        certificate=who.certificate,
        name=name,
        roots=_root().pem if roots is None else roots,
    )


# Certificates


@pytest.mark.parametrize("kind", ["ec", "rsa"])
def test_a_certificate_of_the_root_is_trusted(kind: str) -> None:
    key = _rsa(0) if kind == "rsa" else None
    _check(_issue("site-00", by=_root(), key=key).identity())


def test_certificates_as_flare_makes_them() -> None:
    """RSA-2048 for root and site; the site's own has no basic constraints."""
    root = _issue("federation", ca=True, key=_rsa(0))
    _check(_issue("site-00", by=root, key=_rsa(1), ca=None).identity(), roots=root.pem)


def test_a_chain_with_a_certificate_in_between() -> None:
    between = _issue("between", by=_root(), ca=True)
    site = _issue("site-00", by=between)
    _check(site.identity(between))
    with pytest.raises(Untrusted):
        _check(site.identity())


def test_the_root_itself_may_end_the_chain() -> None:
    _check(_issue("site-00", by=_root()).identity(_root()))


def test_one_of_several_roots_is_enough() -> None:
    other = _issue("other", ca=True)
    _check(_issue("site-00", by=_root()).identity(), roots=other.pem + _root().pem)


def test_a_site_cannot_issue_certificates() -> None:
    site = _issue("site-01", by=_root())
    forged = _issue("site-00", by=site)
    with pytest.raises(Untrusted):
        _check(forged.identity(site))


def test_a_certificate_without_basic_constraints_cannot_issue() -> None:
    site = _issue("site-01", by=_root(), ca=None)
    with pytest.raises(Untrusted):
        _check(_issue("site-00", by=site).identity(site))


def test_a_root_of_the_same_name_is_not_the_root() -> None:
    impostor = _issue("federation", ca=True)
    with pytest.raises(Untrusted):
        _check(_issue("site-00", by=impostor).identity())
    with pytest.raises(Untrusted):
        _check(_issue("site-00", by=impostor).identity(impostor))


def test_a_long_chain_is_refused() -> None:
    chain = [_issue("between-0", by=_root(), ca=True)]
    for number in range(1, 4):
        chain.insert(0, _issue(f"between-{number}", by=chain[0], ca=True))
    with pytest.raises(Untrusted):
        _check(_issue("site-00", by=chain[0]).identity(*chain))


@pytest.mark.parametrize(("begins", "ends"), [(-3, -1), (1, 3)])
def test_a_certificate_is_valid_today(begins: int, ends: int) -> None:
    with pytest.raises(Untrusted, match="not valid today"):
        _check(_issue("site-00", by=_root(), begins=begins, ends=ends).identity())
    between = _issue("between", by=_root(), ca=True, begins=begins, ends=ends)
    with pytest.raises(Untrusted, match="not valid today"):
        _check(_issue("site-00", by=between).identity(between))


@pytest.mark.parametrize("common_names", [("site-01",), ("site-00", "site-01"), ("site-00 ",), ()])
def test_a_certificate_is_of_the_site_that_it_is_said_to_be(common_names: tuple[str, ...]) -> None:
    with pytest.raises(Untrusted):
        _check(_issue(*common_names, by=_root()).identity())


def test_another_message_or_another_key_is_not_signed() -> None:
    site = _issue("site-00", by=_root())
    with pytest.raises(Untrusted):
        _check(site.identity(), message=b"another")
    stolen_certificate = Identity(site.pem, _issue("site-00", by=_root()).identity().key)
    with pytest.raises(Untrusted):
        _check(stolen_certificate)


@pytest.mark.parametrize("signature", [b"", b"x", bytes(64), bytes(256)])
def test_what_is_no_signature_is_refused(signature: bytes) -> None:
    for key in (None, _rsa(0)):
        site = _issue("site-00", by=_root(), key=key)
        with pytest.raises(Untrusted):
            check_signed(b"message", signature, certificate=site.pem, name="site-00", roots=_root().pem)


@pytest.mark.parametrize(
    "certificate", [b"", b"text", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"]
)
def test_what_is_no_certificate_is_refused(certificate: bytes) -> None:
    with pytest.raises(Untrusted):
        check_signed(b"message", b"", certificate=certificate, name="site-00", roots=_root().pem)
    with pytest.raises(Untrusted):
        _check(_issue("site-00", by=_root()).identity(), roots=certificate)


def test_a_kind_of_key_that_is_not_supported_is_refused() -> None:
    key = ed25519.Ed25519PrivateKey.generate()
    site = _issue("site-00", by=_root(), key=key)
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    with pytest.raises(Untrusted):
        Identity(site.pem, pem).sign(b"message")
    with pytest.raises(Untrusted):
        check_signed(b"message", key.sign(b"message"), certificate=site.pem, name="site-00", roots=_root().pem)


def test_an_identity_does_not_print_its_key() -> None:
    assert "PRIVATE" not in repr(identity("site-00"))
    assert "BEGIN" not in repr(identity("site-00"))


# Rosters


def _hello(name: str, *, job: str = JOB, settings: Settings = SETTINGS, keys: JobKeys | None = None) -> bytes:
    return hello(name, job, settings=settings, identity=identity(name), keys=keys or JobKeys())


def _roster(hellos: list[bytes], settings: Settings = SETTINGS) -> Roster:
    return check_roster(hellos, job=JOB, settings=settings, roots=authority().roots)


def _hellos(count: int = 3) -> list[bytes]:
    return [_hello(name) for name in names(count)]


def _changed(message: bytes, **changes: Any) -> bytes:
    """With another body under the old signature."""
    outer = decode(message)
    return encode({**outer, "body": encode({**decode(outer["body"]), **changes})})


def _signed_anyway(name: str, **changes: Any) -> bytes:
    """With another body that the site's certificate signs all the same: a site that lies."""
    outer = decode(_hello(name))
    content = encode({**decode(outer["body"]), **changes})
    return encode({**outer, "body": content, "signature": identity(name).sign(digest("hello", content))})


def test_a_roster_is_the_same_in_whatever_order_it_comes() -> None:
    hellos = _hellos(4)
    one, other = _roster(hellos), _roster(hellos[::-1])
    assert one == other
    assert [(member.name, member.place) for member in one.members.values()] == [
        (name, place) for place, name in enumerate(names(4), 1)
    ]


def test_places_follow_names() -> None:
    roster = _roster([_hello(name) for name in ("site-9", "site-10", "Site-2")])
    assert {name: member.place for name, member in roster.members.items()} == {"Site-2": 1, "site-10": 2, "site-9": 3}


def test_rosters_with_one_other_key_have_another_digest() -> None:
    hellos = _hellos()
    assert _roster(hellos).digest != _roster([*hellos[:2], _hello("site-02")]).digest


_FAULTS: dict[str, Callable[[], bytes]] = {
    "another key": lambda: _changed(_hello("site-02"), agree_key=JobKeys().agree_key),
    "another name": lambda: _changed(_hello("site-02"), name="site-03"),
    "swapped keys": lambda: _changed(_hello("site-02"), agree_key=JobKeys().verify_key),
    "another root": lambda: hello(
        "site-02", JOB, settings=SETTINGS, identity=Authority().identity("site-02"), keys=JobKeys()
    ),
    "expired": lambda: hello(
        "site-02", JOB, settings=SETTINGS, identity=authority().identity("site-02", days=-1), keys=JobKeys()
    ),
    "another's certificate": lambda: hello(
        "site-02", JOB, settings=SETTINGS, identity=identity("site-03"), keys=JobKeys()
    ),
    "another job": lambda: _hello("site-02", job="job-2"),
    "a name twice": lambda: _hello("site-01"),
    "short key": lambda: _signed_anyway("site-02", agree_key=bytes(31)),
    "no key": lambda: _signed_anyway("site-02", verify_key=None),
    "no job": lambda: _signed_anyway("site-02", job=5),
    "a path as a name": lambda: hello(
        "../site-02", JOB, settings=SETTINGS, identity=authority().identity("../site-02"), keys=JobKeys()
    ),
    "other settings": lambda: _hello("site-02", settings=Settings(min_sites=4)),
    "another ring": lambda: _hello("site-02", settings=Settings(bits=24)),
    "another version": lambda: _signed_anyway("site-02", settings={**SETTINGS.message(), "version": 2}),
    "one setting more": lambda: _signed_anyway("site-02", settings={**SETTINGS.message(), "more": 1}),
    "no settings": lambda: _signed_anyway("site-02", settings=None),
    "no message": lambda: b"nothing",
    "an empty message": lambda: encode({}),
    "a list": lambda: encode([]),
    "a body that is no message": lambda: encode({**decode(_hello("site-02")), "body": b"x"}),
    "a body that is a list": lambda: encode({**decode(_hello("site-02")), "body": encode([1])}),
}


@pytest.mark.parametrize("fault", _FAULTS)
def test_a_roster_with_a_fault_is_refused(fault: str) -> None:
    with pytest.raises(PrivacyRefusal):
        _roster([*_hellos(2), _FAULTS[fault]()])


def test_two_sites_with_one_key_are_refused() -> None:
    keys = JobKeys()
    with pytest.raises(Untrusted):
        _roster([_hello("site-00"), _hello("site-01", keys=keys), _hello("site-02", keys=keys)])
    doubled = JobKeys()
    doubled.verify_key = doubled.agree_key
    with pytest.raises(Untrusted):
        _roster([*_hellos(2), _hello("site-02", keys=doubled)])


def test_a_roster_of_two_is_too_small() -> None:
    with pytest.raises(PrivacyRefusal):
        _roster(_hellos(2))
    pair = Settings(allow_pair=True, min_sites=2)
    assert len(_roster([_hello(name, settings=pair) for name in names(2)], pair).members) == 2


def test_a_site_refuses_a_roster_with_other_keys_for_itself() -> None:
    """All signatures hold: the keys are of an earlier start of the same site in the same job."""
    site = secure_site("site-00", settings=SETTINGS, memory=Forgetful())
    site.hello()
    with pytest.raises(Untrusted):
        site.join(_hellos())


def test_a_site_refuses_a_roster_without_itself() -> None:
    site = secure_site("site-05", settings=SETTINGS, memory=Forgetful())
    site.hello()
    with pytest.raises(Untrusted):
        site.join(_hellos())


def test_sites_that_were_shown_different_rosters_do_not_go_on() -> None:
    sites = {name: secure_site(name, settings=SETTINGS, memory=Forgetful()) for name in names(4)}
    hellos = {name: site.hello() for name, site in sites.items()}
    joined = {name: site.join(list(hellos.values())) for name, site in sites.items() if name != "site-03"}
    joined["site-03"] = sites["site-03"].join([hellos[name] for name in ("site-00", "site-01", "site-03")])
    for site in sites.values():
        with pytest.raises(PrivacyRefusal):
            site.take_group(joined)


def test_a_group_key_that_the_first_site_did_not_seal_is_refused() -> None:
    sites = {name: secure_site(name, settings=SETTINGS, memory=Forgetful()) for name in names(3)}
    hellos = [site.hello() for site in sites.values()]
    joined = {name: site.join(hellos) for name, site in sites.items()}
    boxes = decode(decode(joined["site-00"])["body"])["boxes"]
    assert boxes.keys() == {"site-01", "site-02"}
    swapped = {"site-01": boxes["site-02"], "site-02": boxes["site-01"]}
    outer = decode(joined["site-00"])
    with pytest.raises(PrivacyRefusal):
        sites["site-01"].take_group({**joined, "site-00": encode({**outer, "body": encode({"boxes": swapped})})})
    with pytest.raises(Malformed):
        sites["site-02"].take_group({**joined, "site-00": b""})


def test_all_sites_have_the_same_group_key_and_another_in_every_job() -> None:
    def keys(job: str) -> set[bytes]:
        sites = {name: secure_site(name, settings=SETTINGS, memory=Forgetful(), job=job) for name in names(3)}
        hellos = [site.hello() for site in sites.values()]
        joined = {name: site.join(hellos) for name, site in sites.items()}
        for site in sites.values():
            site.take_group(joined)
        assert {site.group_key("other purpose", round_number=1) for site in sites.values()}.isdisjoint(
            {site.group_key("purpose", round_number=1) for site in sites.values()}
        )
        return {site.group_key("purpose", round_number=1) for site in sites.values()}

    one, other = keys("job-1"), keys("job-2")
    assert len(one) == len(other) == 1
    assert one != other
