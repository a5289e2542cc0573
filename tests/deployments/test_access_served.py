"""Keys of an application on Ray Serve that listens on all interfaces."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import httpx
import pytest

from cluster.client import Client, Endpoint, GenerateRequest, InvalidRequestError, SamplingOptions
from cluster.config.schema import Config, HttpConfig
from deployments.readiness import health
from deployments.serve_command import asking
from tests.deployments.conftest import MODEL, Served, arguments, free_port, wait_until
from tests.support.choices import by_night
from tests.support.deployments.place import write_keys

# A second application.
pytestmark = by_night
APPLICATION = "guarded"


@pytest.fixture(scope="module")
def keys_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("access") / "keys.yaml"
    write_keys(path, root={"admin": True}, alice={})
    return path


@pytest.fixture(scope="module")
def guarded(
    served: Served, keys_file: Path, long_folder: Path, long_draft_folder: Path
) -> Iterator[Served]:
    from ray import serve

    from deployments.app import build

    admin_port = free_port()
    wanted = copy.deepcopy(arguments(long_folder, long_draft_folder))
    wanted["http"]["host"], wanted["drafters"] = "0.0.0.0", {}
    wanted["access"] = {"keys_file": str(keys_file), "admin": {"port": admin_port}}
    wanted["ingress"]["replicas"] = 1
    serve.run(build(wanted), name=APPLICATION, route_prefix=f"/{APPLICATION}")
    url = f"http://127.0.0.1:{wanted['http']['port']}"
    wait_until(lambda: health(url)["status"] == "ok")
    yield replace(
        served,
        http=url,
        grpc=f"127.0.0.1:{wanted['grpc']['port']}",
        dashboard=f"http://127.0.0.1:{admin_port}",
    )
    serve.delete(APPLICATION)


def test_http_asks_for_a_key(guarded: Served) -> None:
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 2}

    def asked(key: str) -> int:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        url = f"{guarded.http}/v1/completions"
        return httpx.post(url, json=body, headers=headers, timeout=120).status_code

    assert [asked(key) for key in ("", "wrong", "alice")] == [401, 401, 200]


def test_grpc_asks_for_a_key(guarded: Served) -> None:
    request = GenerateRequest(model=MODEL, text="hello", sampling=SamplingOptions(max_tokens=2))

    def client(key: str) -> Client:
        metadata = [("authorization", f"Bearer {key}")]
        return Client(Endpoint(guarded.grpc, metadata=metadata), max_retries=0)

    with client("alice") as allowed:
        assert allowed.complete(request).usage.completion_tokens == 2
        assert [model.id for model in allowed.list_models().models] == [MODEL]
    with client("wrong") as refused:
        for ask in (lambda: refused.complete(request), refused.list_models):
            with pytest.raises(InvalidRequestError) as caught:
                ask()
            assert caught.value.status is grpc.StatusCode.UNAUTHENTICATED


def test_operators_have_a_key_and_a_port(guarded: Served) -> None:
    assert health(guarded.http) == {"status": "ok"}
    assert httpx.get(f"{guarded.http}/metrics", timeout=60).status_code == 401
    admin = {"Authorization": "Bearer root"}
    found = httpx.get(f"{guarded.http}/metrics", headers=admin, timeout=60)
    assert "drafthouse_requests_total" in found.text
    assert health(guarded.dashboard)["keys"] == {"callers": ["alice", "root"], "fault": ""}
    # Whoever starts it learns what it waits for.
    port = int(guarded.http.rpartition(":")[2])
    where = Config(http=HttpConfig(port=port))
    assert asking(lambda: where, APPLICATION)()["targets"] == 1


def test_the_replicas_read_the_file_again(guarded: Served, keys_file: Path) -> None:
    url = f"{guarded.http}/v1/models"

    def status(key: str) -> int:
        return httpx.get(url, headers={"x-api-key": key}, timeout=60).status_code

    assert status("bob") == 401
    write_keys(keys_file, root={"admin": True}, alice={}, bob={})
    wait_until(lambda: status("bob") == 200)
    keys_file.write_text("keys: {carol: {}}")
    wait_until(lambda: "keys.carol.sha256" in health(guarded.dashboard)["keys"]["fault"])
    assert status("bob") == 200
