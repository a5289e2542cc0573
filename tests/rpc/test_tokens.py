"""A token proves the key of one service, for one call to one process, once and now."""

from pathlib import Path

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from cluster.rpc.tokens import (
    HEADER,
    MAX_SKEW_S,
    Metadata,
    ServiceKeys,
    TokenCheck,
    derive,
    main,
    secrets_of,
)
from tests.support.errors import config_error

OLD, NEW = "old-secret-" * 4, "new-secret-" * 4
METHOD, WORKER, NOW = "/drafthouse.v1.DrafterService/Draft", "d-1", 1_800_000_000.0
SERVICE = "drafter suffix"


def keys(*lines: str, service: str = SERVICE) -> ServiceKeys:
    return ServiceKeys(lambda: lines, service)


def refusal(sent: Metadata) -> str:
    return TokenCheck(keys(OLD), WORKER, lambda: NOW).refusal(METHOD, sent)


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        ((), "no drafthouse-token came"),
        (((HEADER, "Bearer abc"),), "another form"),
        (keys(NEW).sign(METHOD, WORKER, NOW), "not of drafter suffix's key"),
        (keys(OLD, service="drafter lm").sign(METHOD, WORKER, NOW), "not of drafter suffix's key"),
        (keys(OLD).sign("/drafthouse.v1.DrafterService/Describe", "", NOW), "not for this call"),
        (keys(OLD).sign(METHOD, "d-2", NOW), "not for this call"),
        (keys(OLD).sign(METHOD, WORKER, NOW - MAX_SKEW_S - 1), "61 s old"),
        (keys(OLD).sign(METHOD, WORKER, NOW + MAX_SKEW_S + 1), "NTP"),
    ],
)
def test_any_other_token_is_refused_by_name(sent: Metadata, reason: str):
    assert reason in refusal(sent)


def test_no_part_of_a_token_can_be_changed():
    ((_, token),) = keys(OLD).sign(METHOD, WORKER, NOW)
    for index, char in enumerate(token):
        other = "0" if char != "0" else "1"
        assert refusal(((HEADER, token[:index] + other + token[index + 1 :]),))


def test_what_was_seen_is_forgotten_only_when_its_time_is_over():
    now = NOW
    check = TokenCheck(keys(OLD), WORKER, lambda: now)
    ahead = keys(OLD).sign(METHOD, WORKER, NOW + MAX_SKEW_S)
    assert check.refusal(METHOD, ahead) == ""
    for _ in range(4):
        now += MAX_SKEW_S / 2
        check.refusal(METHOD, keys(OLD).sign(METHOD, WORKER, now))
        assert check.refusal(METHOD, ahead)
    now += 2 * MAX_SKEW_S
    check.refusal(METHOD, keys(OLD).sign(METHOD, WORKER, now))
    assert len(check._seen) < 4


@pytest.mark.parametrize("text", ["", "\n \n", "short", f"{OLD}\nshort"])
def test_a_file_without_secrets_is_refused_with_the_remedy(tmp_path: Path, text: str):
    path = tmp_path / "secret"
    path.write_text(text)
    with config_error(r"data_plane.secret_file: .*openssl rand"):
        secrets_of(str(path))
    with config_error("cannot be read"):
        secrets_of(str(tmp_path / "absent"))


def test_a_drafter_of_others_gets_its_own_key_and_no_secret(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "secret").write_text(f"{NEW}\n{OLD}\n")
    main(str(tmp_path / "secret"), SERVICE)
    (tmp_path / "key").write_text(capsys.readouterr().out)
    given = secrets_of(str(tmp_path / "key"))
    assert ServiceKeys(given, SERVICE).get() == keys(NEW, OLD).get()
    assert ServiceKeys(given, "target").get() == ()
    assert ServiceKeys(given, "target").sign(METHOD, WORKER) == ()


def test_keys_are_derived_as_rfc_5869_says():
    for secret, service in ((OLD, "target"), (NEW, SERVICE)):
        oracle = HKDF(hashes.SHA256(), 32, b"drafthouse data plane", service.encode())
        assert derive(secret, service) == oracle.derive(secret.encode())
