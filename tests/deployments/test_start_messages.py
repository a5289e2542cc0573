"""What is said once is not said twice, and what is taken from serve's word holds for check."""

import socket
from pathlib import Path

import pytest

from cluster.config.schema import Config, DashboardConfig, EngineConfig, GrpcConfig, HttpConfig
from cluster.engine.loading.peft_folder import read_adapters
from cluster.errors import ConfigError
from cluster.models.names import REPOSITORY, source_of
from cluster.rpc.tokens import secrets_of
from cluster.text.chat import read_template
from deployments.placement import check_free
from deployments.serve_command import cause_of
from tests.conftest import Run
from tests.deployments.conftest import free_port
from tests.support.errors import config_error


def test_check_without_a_file_checks_the_demonstration(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("DRAFTHOUSE_MODELS", str(tmp_path))
    monkeypatch.chdir(REPOSITORY)
    implied = run("check")
    assert run("check", "configs/local.yaml") == implied


@pytest.mark.parametrize("file", ["base", "overlays/autoscaling", "overlays/high-availability"])
def test_what_a_cluster_is_to_serve_can_be_checked_in_a_checkout(file: str, run: Run):
    assert "of target and" in run("check", f"k8s/{file}/serve.yaml")


def test_a_taken_port_of_rays_own_is_one_line(monkeypatch: pytest.MonkeyPatch):
    config = Config(
        http=HttpConfig(port=free_port()),
        grpc=GrpcConfig(port=free_port()),
        dashboard=DashboardConfig(enabled=False),
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("RAY_GCS_SERVER_PORT", str(port))
        with config_error(f"RAY_GCS_SERVER_PORT: port {port}, Ray's own, taken"):
            check_free(config)
        check_free(config, at_any_port=True)
    check_free(config)
    monkeypatch.setenv("RAY_GCS_SERVER_PORT", "0x10")
    with config_error("PORT: '0x10' is no whole number of at least 1"):
        check_free(config)


def test_what_cannot_be_read_is_named_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(REPOSITORY)
    refused = [
        (tmp_path, source_of, str(tmp_path)),
        (REPOSITORY, source_of, "models/nothing.gguf"),
        (tmp_path, secrets_of, str(tmp_path)),
        (tmp_path, read_template, str(tmp_path / "none.jinja")),
        (tmp_path, read_adapters, EngineConfig(adapters={"a": str(tmp_path)})),
    ]
    for named, read, wrong in refused:
        with pytest.raises(ConfigError) as caught:
            read(wrong)
        assert caught.value.message.count(str(named)) == 1
        assert caught.value.message.count(str(REPOSITORY)) <= 1
    with pytest.raises(ConfigError) as caught:
        source_of("/nowhere/m")
    assert str(REPOSITORY) not in caught.value.message


def test_of_three_tracebacks_the_last_error_is_told():
    traceback = (
        "Failed to start replica:\nTraceback (most recent call last):\n"
        '  File "x.py", line 1, in load\nValueError: first\n\nThe above exception was ...\n\n'
        "ray.exceptions.RayTaskError: \x1b[36mray::x\x1b[39m\n"
        '  File "y.py", line 2, in load\n'
        "cluster.errors.ConfigError: /m/model.safetensors is damaged; copy it again\n"
    )
    told = cause_of(3 * traceback)
    assert told == "ConfigError: /m/model.safetensors is damaged; copy it again"
    assert len(cause_of("x " * 10**5)) < 600
