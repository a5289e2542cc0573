"""Joining a Ray that runs already: where the ingress could listen there, and where it could not."""

import socket
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from cluster.config.schema import Config, GrpcConfig, HttpConfig
from deployments import local_ray
from deployments.local_ray import JoinedRay
from tests.deployments.conftest import free_ports
from tests.support.errors import config_error


@dataclass
class Running:
    """A Ray that asks for tokens, its living and dead nodes, and its applications."""

    alive: list[bool] = field(default_factory=lambda: [True])
    applications: dict[str, object] = field(default_factory=dict)


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> Running:
    found = Running()
    monkeypatch.setattr(local_ray.ray, "init", lambda **_: SimpleNamespace(dashboard_url=""))
    monkeypatch.setattr(local_ray.ray, "nodes", lambda: [{"Alive": one} for one in found.alive])
    monkeypatch.setattr(local_ray.serve, "status", lambda: found)
    monkeypatch.setattr(local_ray.serve, "delete", found.applications.pop)
    monkeypatch.setattr(local_ray.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(local_ray.ray, "shutdown", lambda: None)
    monkeypatch.setattr(local_ray, "check_asks_for_token", lambda *_: None)
    monkeypatch.setattr(local_ray, "listen_address", lambda _: None)
    return found


def config(host: str = "127.0.0.1") -> Config:
    http, grpc = free_ports(2)
    return Config(http=HttpConfig(host, port=http), grpc=GrpcConfig(host, port=grpc))


def test_on_several_nodes_the_ingress_may_be_anywhere(running: Running):
    running.alive = [True, True]
    with config_error(r"http\.host: 127.* any of 2 here; set it to 0\.0\.0\.0"):
        JoinedRay(config(), "auto", ["mine"]).start()
    JoinedRay(config("0.0.0.0"), "auto", ["mine"]).start()
    running.alive = [True, False]
    JoinedRay(config(), "auto", ["mine"]).start()


def test_a_port_that_another_application_has_is_not_shared(running: Running):
    wanted = config()
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as an ingress does
        taken.bind((wanted.http.host, wanted.http.port))
        taken.listen(1)
        with config_error(rf"http\.port: port {wanted.http.port} taken by"):
            JoinedRay(wanted, "auto", ["mine"]).start()
        running.applications["mine"] = object()  # its own, which is to be changed
        JoinedRay(wanted, "auto", ["mine"]).start()


def test_what_was_served_before_is_left_where_nothing_was_deployed(running: Running):
    running.applications["mine"] = object()
    joined = JoinedRay(config(), "auto", ["mine"])
    joined.start()
    joined.stop(is_serving=False)
    assert running.applications
    joined.is_ours = True
    joined.stop(is_serving=False)
    assert not running.applications


def test_an_address_that_is_none_is_named():
    with config_error("--address nonsense: no Ray cluster answers there"):
        JoinedRay(config(), "nonsense", ["mine"]).start()
