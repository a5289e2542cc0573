"""The clients encrypt, check who answers, and show their certificate."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from cluster.client import Endpoint, GenerateRequest, UnavailableError
from tests.client.conftest import Complete, Serve
from tests.support.rpc.scripted_service import NUM_TOKENS, ScriptedService

REQUEST = GenerateRequest(model="toy", text="prompt")


@dataclass(frozen=True)
class Identity:
    """A key and its certificate, PEM."""

    key: bytes
    certificate: bytes


@dataclass(frozen=True)
class Authority:
    """Signs certificates."""

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @classmethod
    def new(cls) -> Authority:
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority")])
        constraints = x509.BasicConstraints(ca=True, path_length=None)
        unsigned = builder(key, name, name).add_extension(constraints, critical=True)
        return cls(key, unsigned.sign(key, hashes.SHA256()))

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    def identity(self, *names: x509.GeneralName) -> Identity:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "somebody")])
        unsigned = builder(key, subject, self.certificate.subject)
        if names:
            unsigned = unsigned.add_extension(x509.SubjectAlternativeName(names), critical=False)
        signed = unsigned.sign(self.key, hashes.SHA256())
        return Identity(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            ),
            signed.public_bytes(serialization.Encoding.PEM),
        )


def builder(
    key: ec.EllipticCurvePrivateKey, subject: x509.Name, issuer: x509.Name
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return x509.CertificateBuilder(
        issuer,
        subject,
        key.public_key(),
        x509.random_serial_number(),
        now - datetime.timedelta(days=1),
        now + datetime.timedelta(days=1),
    )


LOCALHOST = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
ELSEWHERE = x509.DNSName("llm.example.com")


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority.new()


def secure(server: Identity, client_authority: Authority | None = None) -> grpc.ServerCredentials:
    return grpc.ssl_server_credentials(
        [(server.key, server.certificate)],
        None if client_authority is None else client_authority.pem,
        require_client_auth=client_authority is not None,
    )


def test_an_encrypted_answer_is_read(
    serve: Serve, complete: Complete, authority: Authority
) -> None:
    address = serve(ScriptedService(), secure(authority.identity(LOCALHOST)))
    answer = complete(Endpoint(address, tls=True, root_certificates=authority.pem), REQUEST)
    assert answer.usage.completion_tokens == NUM_TOKENS


def test_a_server_that_another_authority_vouches_for_is_refused(
    serve: Serve, complete: Complete, authority: Authority
) -> None:
    service = ScriptedService()
    address = serve(service, secure(Authority.new().identity(LOCALHOST)))
    with pytest.raises(UnavailableError):
        complete(Endpoint(address, tls=True, root_certificates=authority.pem), REQUEST)
    assert service.requests == []


def test_a_server_with_another_name_needs_that_name(
    serve: Serve, complete: Complete, authority: Authority
) -> None:
    address = serve(ScriptedService(), secure(authority.identity(ELSEWHERE)))
    with pytest.raises(UnavailableError):
        complete(Endpoint(address, tls=True, root_certificates=authority.pem), REQUEST)
    named = Endpoint(
        address, tls=True, root_certificates=authority.pem, server_name=ELSEWHERE.value
    )
    assert complete(named, REQUEST).usage.completion_tokens == NUM_TOKENS


def test_a_client_certificate_is_shown_where_the_server_asks(
    serve: Serve, complete: Complete, authority: Authority
) -> None:
    service = ScriptedService()
    address = serve(service, secure(authority.identity(LOCALHOST), authority))
    with pytest.raises(UnavailableError):
        complete(Endpoint(address, tls=True, root_certificates=authority.pem), REQUEST)
    assert service.requests == []
    me = authority.identity()
    shown = Endpoint(
        address,
        tls=True,
        root_certificates=authority.pem,
        private_key=me.key,
        certificate_chain=me.certificate,
    )
    assert complete(shown, REQUEST).usage.completion_tokens == NUM_TOKENS
