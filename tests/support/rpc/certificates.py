"""Certificates for tests, each with the files that a process would be given."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

_DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Authority:
    """Signs certificates.  days: how long they are valid from now; below 0 they never are."""

    name: x509.Name
    key: ec.EllipticCurvePrivateKey
    cert: bytes

    @classmethod
    def new(cls, name: str = "authority") -> Authority:
        key, subject = ec.generate_private_key(ec.SECP256R1()), _named(name)
        builder = _builder(subject, subject, key, days=1.0)
        constraints = x509.BasicConstraints(ca=True, path_length=None)
        certificate = builder.add_extension(constraints, critical=True).sign(key, hashes.SHA256())
        return cls(subject, key, certificate.public_bytes(Encoding.PEM))

    def issue(self, *names: str, days: float = 1.0) -> tuple[bytes, bytes]:
        """Return a certificate for these DNS names, and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(_named("part"), self.name, key, days=days)
        if names:
            alternatives = x509.SubjectAlternativeName([x509.DNSName(name) for name in names])
            builder = builder.add_extension(alternatives, critical=False)
        certificate = builder.sign(self.key, hashes.SHA256())
        return certificate.public_bytes(Encoding.PEM), key.private_bytes(
            Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
        )

    def write(self, folder: Path, *names: str, days: float = 1.0) -> Path:
        """Write cert.pem, key.pem and ca.pem into `folder`, each at once; returns it."""
        cert, key = self.issue(*names, days=days)
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in (("cert.pem", cert), ("key.pem", key), ("ca.pem", self.cert)):
            fresh = folder / f"{name}.new"
            fresh.write_bytes(data)
            fresh.replace(folder / name)
        return folder


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, *, days: float
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - 2 * _DAY)
        .not_valid_after(now + days * _DAY)
    )
