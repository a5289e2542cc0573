"""Who can reach what: tokens and interfaces, as far as they show without a running Ray."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.config.pem import ROLES, DataPlaneConfig, PartsTlsConfig, TlsConfig
from cluster.config.schema import Config, NetworkConfig
from deployments.app import resolved
from deployments.preflight import inspect
from deployments.ray_environment import check_asks_for_token, prepare_to_join, prepare_to_start
from deployments.replica import address_for
from tests.conftest import Run
from tests.support.deployments.fake_http import answering
from tests.support.deployments.server import tiny_config
from tests.support.errors import config_error
from tests.support.rpc.certificates import Authority

NAMES = (
    "RAY_AUTH_MODE",
    "RAY_AUTH_TOKEN",
    "RAY_AUTH_TOKEN_PATH",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER",
    "RAY_USAGE_STATS_ENABLED",
    "RAY_worker_niceness",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO",
)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Without any of Ray's settings, and put back as it was afterwards."""
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that it is put back whoever sets it
        monkeypatch.delenv(name)
    return monkeypatch


def test_a_ray_that_is_joined_without_a_token_is_refused_with_the_remedy(
    environment: pytest.MonkeyPatch, run: Run
):
    environment.setenv("RAY_AUTH_MODE", "disabled")
    message = run("serve", "configs/tiny.yaml", "--address", "auto", status=2)
    assert "RAY_AUTH_MODE=disabled: whoever reaches this machine's ports could run code" in message
    assert "unset it" in message


def test_a_ray_of_ones_own_gets_another_token_every_time(environment: pytest.MonkeyPatch):
    tokens = set()
    for _ in range(2):
        environment.delenv("RAY_AUTH_TOKEN", raising=False)
        prepare_to_start(Config())
        assert os.environ["RAY_AUTH_MODE"] == "token"
        tokens.add(os.environ["RAY_AUTH_TOKEN"])
    assert len(tokens) == 2
    assert min(map(len, tokens)) >= 32


def test_the_users_own_token_is_kept(environment: pytest.MonkeyPatch):
    prepare_to_join()
    assert os.environ["RAY_AUTH_MODE"] == "token"
    assert "RAY_AUTH_TOKEN" not in os.environ
    environment.setenv("RAY_AUTH_TOKEN_PATH", "/some/file")
    prepare_to_start(Config())
    assert "RAY_AUTH_TOKEN" not in os.environ
    environment.setenv("RAY_AUTH_TOKEN", "mine")
    prepare_to_start(Config())
    assert os.environ["RAY_AUTH_TOKEN"] == "mine"


@pytest.mark.parametrize("interface", ["loopback", "node"])
def test_ray_itself_listens_where_the_parts_do(interface: str, environment: pytest.MonkeyPatch):
    prepare_to_start(Config(network=NetworkConfig(interface)))
    is_told = os.environ.get("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER") == "0"
    assert is_told == (interface == "loopback")


@contextmanager
def dashboard(answer: bytes) -> Iterator[str]:
    with answering("/api/authentication_mode", answer) as port:
        yield f"127.0.0.1:{port}"


def test_a_cluster_that_asks_nobody_for_a_token_is_not_joined():
    with (
        dashboard(b'{"authentication_mode": "disabled"}') as where,
        config_error("ray get-auth-token --generate"),
    ):
        check_asks_for_token("10.0.0.1:6379", where)
    with dashboard(b'{"authentication_mode": "token"}') as where:
        check_asks_for_token("10.0.0.1:6379", where)


@pytest.mark.parametrize("answer", [b"<html>", b"{}", b"[]"])
def test_a_dashboard_that_does_not_say_is_warned_of(
    answer: bytes, caplog: pytest.LogCaptureFixture
):
    with dashboard(answer) as where:
        check_asks_for_token("10.0.0.1:6379", where)
    assert "does not say who may use" in caplog.text


def test_parts_listen_on_loopback_unless_the_configuration_says_node():
    assert address_for("loopback", 1, "10.0.0.1") == "127.0.0.1"
    assert address_for("node", 3, "10.0.0.1") == "10.0.0.1"
    with config_error("has 2 nodes; set it to node", "network.interface"):
        address_for("loopback", 2, "10.0.0.1")


def test_certificates_and_secrets_are_tried_before_anything_is_started(
    llama_folder: Path, tmp_path: Path
):
    authority = Authority.new()
    for role in ROLES:
        authority.write(tmp_path / role, f"{role}.drafthouse")
    (tmp_path / "secret").write_text("s" * 32)
    of_parts = (str(tmp_path / "{role}" / f"{name}.pem") for name in ("cert", "key", "ca"))
    own = str(tmp_path / "target")
    config = replace(
        tiny_config(llama_folder),
        tls=TlsConfig(f"{own}/cert.pem", f"{own}/key.pem"),
        data_plane=DataPlaneConfig(str(tmp_path / "secret"), PartsTlsConfig(*of_parts)),
    )
    inspect(config, is_here=True)
    for path, message in (
        (tmp_path / "drafter/key.pem", r"data_plane\.tls\.key_file"),
        (tmp_path / "target/cert.pem", r"tls\.cert_file"),
        (tmp_path / "secret", r"data_plane\.secret_file"),
    ):
        kept = path.read_bytes()
        path.unlink()
        with config_error(message):
            inspect(config, is_here=True)
        inspect(config, is_here=False)  # elsewhere they may be
        path.write_bytes(kept)


def test_files_are_named_to_replicas_as_this_process_finds_them():
    found = resolved({"data_plane": {"secret_file": "secret", "tls": {"ca_file": ""}}})
    here = str(Path("secret").resolve())
    assert found == {"data_plane": {"secret_file": here, "tls": {"ca_file": ""}}}
    template = "configs/templates/smollm2-tools.jinja"
    found = resolved({"answers": {"chat_template": template}, "tape": {"folder": "a/b"}})
    assert found["answers"]["chat_template"] == str(Path(template).resolve())
    assert found["tape"] == {"folder": str(Path("a/b").resolve())}
    words = {"target": {"generation_config": "auto"}, "answers": {"chat_template": ""}}
    assert resolved(words) == words
