"""Certificates made for a test."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

__all__ = ["Authority", "Issued"]

_VALID_FOR = timedelta(hours=1)


@dataclass(frozen=True)
class Issued:
    """A certificate and its key, PEM."""

    certificate: bytes
    key: bytes

    def write(self, cert_file: Path, key_file: Path) -> None:
        cert_file.write_bytes(self.certificate)
        key_file.write_bytes(self.key)


class Authority:
    """Signs certificates for 127.0.0.1."""

    def __init__(self, name: str = "Test CA") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        found = self._builder(self._name, self._key.public_key()).add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True
        )
        self.certificate = _pem(found.sign(self._key, hashes.SHA256()))

    def issue(self, name: str, *, valid_for: timedelta = _VALID_FOR) -> Issued:
        key = ec.generate_private_key(ec.SECP256R1())
        found = self._builder(_name(name), key.public_key(), valid_for).add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]),
            critical=False,
        )
        private = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        return Issued(_pem(found.sign(self._key, hashes.SHA256())), private)

    def _builder(
        self,
        subject: x509.Name,
        public_key: ec.EllipticCurvePublicKey,
        valid_for: timedelta = _VALID_FOR,
    ) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(hours=1))
            .not_valid_after(now + valid_for)
        )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
