"""Files of certificates: what is wrong with them is said by name, and a change is followed."""

import logging
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from cluster.config.pem import PartsTlsConfig, Pem, TlsConfig
from tests.support.errors import config_error
from tests.support.rpc.certificates import Authority

AUTHORITY = Authority.new()
NAME = "target.drafthouse"


def files(folder: Path) -> TlsConfig:
    return PartsTlsConfig(*(str(folder / f"{each}.pem") for each in ("cert", "key", "ca")))


def load(folder: Path) -> Pem:
    return files(folder).load("data_plane.tls", NAME)


def test_sound_files_are_read(tmp_path: Path):
    AUTHORITY.write(tmp_path, NAME)
    pem = load(tmp_path)
    assert pem.cert.startswith(b"-----BEGIN CERTIFICATE-----")
    assert b"PRIVATE KEY" in pem.key
    assert "PRIVATE KEY" not in repr(pem)


def encrypted() -> bytes:
    key = serialization.load_pem_private_key(AUTHORITY.issue(NAME)[1], None)
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )


@pytest.mark.parametrize(
    ("file", "held", "message"),
    [
        ("cert.pem", None, r"tls\.cert_file: .*cert.pem cannot be"),
        ("key.pem", None, r"tls\.key_file: .*key.pem cannot be read"),
        ("ca.pem", None, r"tls\.ca_file: .*ca.pem cannot be read"),
        ("cert.pem", b"no", r"tls\.cert_file: .*no PEM"),
        ("key.pem", b"no", r"tls\.key_file: .*no PEM"),
        ("key.pem", AUTHORITY.issue(NAME)[1], r"tls\.key_file: .*is not the key of"),
        ("key.pem", encrypted(), r"tls\.key_file: .*without a passphrase"),
        ("ca.pem", Authority.new("other").cert, r"tls\.cert_file: .*issuer"),
    ],
)
def test_what_cannot_be_used_is_refused_by_its_key(
    tmp_path: Path, file: str, held: bytes | None, message: str
):
    AUTHORITY.write(tmp_path, NAME)
    (tmp_path / file).unlink()
    if held is not None:
        (tmp_path / file).write_bytes(held)
    with config_error(message):
        load(tmp_path)


def test_a_certificate_of_another_name_is_refused(tmp_path: Path):
    AUTHORITY.write(tmp_path, "drafter.drafthouse")
    with config_error(r"tls\.cert_file: .*target\.drafthouse"):
        load(tmp_path)


def test_an_expired_certificate_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    AUTHORITY.write(tmp_path, NAME, days=-1)
    TlsConfig(*(str(tmp_path / f"{each}.pem") for each in ("cert", "key"))).pem()
    assert "cert.pem: certificate has expired" in caplog.text


def test_a_change_is_followed_and_half_a_change_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.WARNING)
    AUTHORITY.write(tmp_path, NAME)
    held = files(tmp_path).pem("data_plane.tls", NAME)
    assert held is not None
    first = held.get()
    assert held.get() is first
    cert, key = AUTHORITY.issue(NAME)
    (tmp_path / "cert.pem").write_bytes(cert)
    for _ in range(3):
        assert held.get() is first
    assert caplog.text.count("what was read before stays in use") == 1
    (tmp_path / "key.pem").write_bytes(key)
    assert held.get().cert == cert


@pytest.mark.parametrize("given", ["cert_file", "key_file"])
def test_half_of_a_pair_is_refused(given: str):
    with config_error(r"^\w+_file: empty; name cert_file, key_file"):
        TlsConfig(**{given: "x.pem"})
