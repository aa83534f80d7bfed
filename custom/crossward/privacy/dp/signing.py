"""Who vouches for a ledger: a key that the site keeps in a file, or the certificate of its kit."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)

from crossward.federation.errors import PrivacyRefusal, StorageFailure
from crossward.federation.storage import private_folder, sync_folder
from crossward.privacy.secagg.identity import Identity

Verify = Callable[[bytes, bytes], bool]
PublicKey = ed25519.Ed25519PublicKey | ec.EllipticCurvePublicKey | rsa.RSAPublicKey

_PSS = padding.PSS(mgf=padding.MGF1(hashes.SHA256()), salt_length=padding.PSS.DIGEST_LENGTH)
_OTHERS = 0o077


@dataclass(frozen=True)
class Signer:
    """A pair of functions, and what lines that were signed with it say.

    Attributes:
        sign: a message.
        verify: a message and its signature; false where it is not this signer's.
        label: kind and fingerprint of the key.
    """

    sign: Callable[[bytes], bytes]
    verify: Verify
    label: str


def local_signer(path: Path, *, ledger: Path) -> Signer:
    """Sign with a key of the site's own, which is made the first time.

    Args:
        path: of the key, readable for its owner alone. It belongs into the site's backup: without it a ledger can be
            neither checked nor continued.
        ledger: folder of the ledger that it signs; where that has lines, no key is made.

    Raises:
        PrivacyRefusal: the key is missing although there is a ledger, can be read by others, or is no such key.
    """
    if not path.exists():
        if ledger.is_dir() and any(ledger.iterdir()):
            raise PrivacyRefusal(
                f"the key {path} is missing, but there is a privacy ledger in {ledger} that was signed with it; put "
                "the key back from the site's backup. A new one would leave what was spent unproven"
            )
        _make(path)
    try:
        mode = path.stat().st_mode
        key = load_pem_private_key(path.read_bytes(), password=None)
    except OSError as error:
        raise PrivacyRefusal(f"the ledger's key {path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise PrivacyRefusal(f"{path} is not the key of a ledger; put the key back from the site's backup") from error
    if mode & _OTHERS:
        raise PrivacyRefusal(f"the ledger's key {path} can be read by others, who could sign too; run chmod 600 on it")
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise PrivacyRefusal(f"{path} holds another kind of key than a ledger's; put the key back from the backup")
    public = key.public_key()
    return Signer(key.sign, _verifier([public]), _label(public))


def certificate_signer(identity: Identity, *, earlier: Sequence[bytes] = ()) -> Signer:
    """Sign with the certificate of the site's kit.

    Args:
        identity: certificate and key.
        earlier: PEM, certificates that the site had before; what was signed with them stays good. That a certificate
            has expired does not matter: lines are as old as they are.
    """
    public = _public_key(identity.certificate)
    keys = [public, *(_public_key(certificate) for certificate in earlier)]
    return Signer(identity.sign, _verifier(keys), _label(public))


def verifier(path: Path) -> Verify:
    """Check signatures only: with a ledger's key file, the public half of it, or one certificate or more.

    Raises:
        PrivacyRefusal: the file has none.
    """
    try:
        content = path.read_bytes()
        return _verifier([_public_key(each) for each in certificates(content) or [content]])
    except OSError as error:
        raise PrivacyRefusal(
            f"the key {path} of the ledger cannot be read: {error.strerror}; name it by --key"
        ) from error


def certificates(content: bytes) -> list[bytes]:
    """The certificates in a file, each as PEM; none where it holds something else."""
    try:
        found = x509.load_pem_x509_certificates(content)
    except ValueError:
        return []
    return [certificate.public_bytes(Encoding.PEM) for certificate in found]


def _make(path: Path) -> None:
    """Write the whole file under another name first: of two that do so at once one is kept, and both go on with it."""
    key = ed25519.Ed25519PrivateKey.generate()
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    draft = path.with_name(f".{path.name}.{os.getpid()}.{token_hex(4)}.part")
    try:
        private_folder(path.parent)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(pem)
                stream.flush()
                os.fsync(stream.fileno())
            with suppress(FileExistsError):
                os.link(draft, path)
        finally:
            draft.unlink()
        sync_folder(path.parent)
    except OSError as error:
        raise StorageFailure(f"the key {path} of the ledger cannot be made: {error.strerror or error}") from error


def _public_key(pem: bytes) -> PublicKey:
    """The public key of a certificate, of a private key, or by itself."""
    readers: tuple[Callable[[], object], ...] = (
        lambda: x509.load_pem_x509_certificate(pem).public_key(),
        lambda: load_pem_private_key(pem, password=None).public_key(),
        lambda: load_pem_public_key(pem),
    )
    for read in readers:
        with suppress(ValueError, TypeError, UnsupportedAlgorithm):
            key = read()
            if isinstance(key, PublicKey):
                return key
    raise PrivacyRefusal("a ledger's signatures are checked with a key or a certificate in PEM; this is neither")


def _verifier(keys: Sequence[PublicKey]) -> Verify:
    return lambda message, signature: any(_verifies(key, message, signature) for key in keys)


def _verifies(key: PublicKey, message: bytes, signature: bytes) -> bool:
    try:
        if isinstance(key, rsa.RSAPublicKey):
            key.verify(signature, message, _PSS, hashes.SHA256())
        elif isinstance(key, ec.EllipticCurvePublicKey):
            key.verify(signature, message, ec.ECDSA(hashes.SHA256()))
        else:
            key.verify(signature, message)
    except InvalidSignature:
        return False
    return True


def _label(key: PublicKey) -> str:
    kind = "key" if isinstance(key, ed25519.Ed25519PublicKey) else "certificate"
    content = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return f"{kind} {hashlib.sha256(content).hexdigest()[:16]}"
