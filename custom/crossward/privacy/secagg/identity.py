"""Who a site is: its certificate of the federation, which signs the keys of one job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes
from cryptography.x509.oid import NameOID

from crossward.federation.errors import PrivacyRefusal

_PSS = padding.PSS(mgf=padding.MGF1(hashes.SHA256()), salt_length=padding.PSS.DIGEST_LENGTH)


class Untrusted(PrivacyRefusal):
    """A certificate or a signature that is not what it claims to be."""


@dataclass(frozen=True)
class Identity:
    """A site's certificate and private key, from its start-up kit.

    Attributes:
        certificate: PEM, the site's own and whatever links it to the root.
        key: PEM, not encrypted; it never leaves the site.
    """

    certificate: bytes
    key: bytes

    def __repr__(self) -> str:
        return "Identity(...)"

    def sign(self, message: bytes) -> bytes:
        """Sign with the certificate's key."""
        key = serialization.load_pem_private_key(self.key, password=None)
        if isinstance(key, rsa.RSAPrivateKey):
            return key.sign(message, _PSS, hashes.SHA256())
        if isinstance(key, ec.EllipticCurvePrivateKey):
            return key.sign(message, ec.ECDSA(hashes.SHA256()))
        raise Untrusted("the site's certificate has a kind of key that is not supported")


def check_signed(message: bytes, signature: bytes, *, certificate: bytes, name: str, roots: bytes) -> None:
    """Hold a signature against a certificate, and the certificate against the federation's root.

    Args:
        message: what was signed.
        signature: of the site.
        certificate: PEM, the site's own first.
        name: who it is said to be.
        roots: PEM, this site's own copy of the root certificate.

    Raises:
        Untrusted: any of it does not hold.
    """
    try:
        chain = x509.load_pem_x509_certificates(certificate)
        trusted = x509.load_pem_x509_certificates(roots)
        _check_chain(chain, trusted)
        names = chain[0].subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        if [each.value for each in names] != [name]:
            raise Untrusted(f"the certificate given for {name} is another's")
        # Provisioning writes it into the certificates of people; sites have none.
        if chain[0].subject.get_attributes_for_oid(NameOID.UNSTRUCTURED_NAME):
            raise Untrusted(f"the certificate of {name} is that of a user and not of a site")
        _verify(chain[0].public_key(), message, signature)
    except (ValueError, TypeError, InvalidSignature, x509.ExtensionNotFound) as error:
        raise Untrusted(f"what is said to come from {name} is not signed by its certificate") from error


def _check_chain(chain: Sequence[x509.Certificate], trusted: Sequence[x509.Certificate]) -> None:
    now = datetime.now(UTC)
    if not chain or len(chain) > 4:
        raise ValueError("no chain, or a long one")
    for certificate in chain:
        if not certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc:
            raise Untrusted("a certificate that is not valid today; renew the site's kit")
    for certificate, issuer in pairwise(chain):
        if not issuer.extensions.get_extension_for_class(x509.BasicConstraints).value.ca:
            raise ValueError("issued by a certificate that may not issue")
        certificate.verify_directly_issued_by(issuer)
    for root in trusted:
        try:
            chain[-1].verify_directly_issued_by(root)
        except (ValueError, TypeError, InvalidSignature):
            continue
        return
    raise ValueError("not issued under the federation's root")


def _verify(key: CertificatePublicKeyTypes, message: bytes, signature: bytes) -> None:
    if isinstance(key, rsa.RSAPublicKey):
        key.verify(signature, message, _PSS, hashes.SHA256())
    elif isinstance(key, ec.EllipticCurvePublicKey):
        key.verify(signature, message, ec.ECDSA(hashes.SHA256()))
    else:
        raise ValueError("a kind of key that is not supported")
