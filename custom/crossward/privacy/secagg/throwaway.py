"""Certificates for a federation on one machine: made for one run, kept by nobody, trusted nowhere else."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from crossward.privacy.secagg.identity import Identity

_ROOT = "throw-away root"


class Authority:
    """A root certificate and the sites' certificates that it issues."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.roots = self._issue(_ROOT, self._key.public_key(), ca=True, days=7)

    def identity(self, name: str, *, days: int = 7) -> Identity:
        """A certificate and key for a site."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._issue(name, key.public_key(), ca=False, days=days)
        pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return Identity(certificate, pem)

    def _issue(self, name: str, key: ec.EllipticCurvePublicKey, *, ca: bool, days: int) -> bytes:
        now = datetime.now(UTC)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, _ROOT)]))
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=2))
            .not_valid_after(now + timedelta(days=days))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        return certificate.public_bytes(serialization.Encoding.PEM)
