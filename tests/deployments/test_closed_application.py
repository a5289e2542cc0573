"""A whole application that others reach: keys, a secret, and certificates between its parts and to
clients."""

import os
import signal
import ssl
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from cluster.client import Client, Endpoint, GenerateRequest, InvalidRequestError, SamplingOptions
from cluster.config.pem import ROLES
from deployments.serve_command import state_of
from tests.deployments.conftest import (
    DEADLINE_S,
    Served,
    arguments,
    free_port,
    places,
    wait_until,
)
from tests.support.deployments.api import MODEL
from tests.support.deployments.place import bearer, write_keys
from tests.support.rpc.certificates import Authority
from tests.support.rpc.servers import SECRET

APPLICATION = "closed"
DRAFTERS = {"lookup": 1, "suffix": 1}
BODY = {"model": MODEL, "prompt": "Once", "max_tokens": 24, "temperature": 0, "seed": 1}


@dataclass(frozen=True)
class Closed:
    """Where it answers alice.  parts: the authority of its own parts, which is not that of
    clients.  operators: the URL of their port."""

    client: httpx.Client
    grpc: Endpoint
    folder: Path
    parts: Authority
    operators: str

    def drafters(self) -> dict[str, Any]:
        return dict(self.health().get("drafters", {}))

    def health(self) -> dict[str, Any]:
        return dict(httpx.get(f"{self.operators}/health").json())

    def answer(self, key: str = "alice") -> httpx.Response:
        return self.client.post("/v1/completions", json=BODY, headers=bearer(key))

    def text(self) -> str:
        answer = self.answer()
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]


@pytest.fixture(scope="module")
def closed(
    served: Served,
    long_folder: Path,
    long_draft_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Closed]:
    """served: has started Serve, as the other tests need it."""
    from ray import serve

    from deployments.app import build

    folder = tmp_path_factory.mktemp("doors")
    (folder / "secret").write_text(SECRET)
    parts, public = Authority.new(), Authority.new("public")
    for role in ROLES:
        parts.write(folder / role, f"{role}.drafthouse")
    public.write(folder / "public", "localhost")
    of_parts = {
        f"{name}_file": str(folder / "{role}" / f"{name}.pem") for name in ("cert", "key", "ca")
    }
    write_keys(folder / "keys.yaml", root={"admin": True}, alice={})
    admin_port = free_port()
    settings = arguments(long_folder, long_draft_folder) | {
        "access": {"keys_file": str(folder / "keys.yaml"), "admin": {"port": admin_port}},
        "tls": {
            "cert_file": str(folder / "public/cert.pem"),
            "key_file": str(folder / "public/key.pem"),
        },
        "data_plane": {"secret_file": str(folder / "secret"), "tls": of_parts},
    }
    # One of each role: each has certificates of its own.
    settings["ingress"]["replicas"] = 1
    settings["http"]["host"] = "0.0.0.0"
    del settings["drafters"]["lm"], settings["drafters"]["ngram"]
    serve.run(build(settings), name=APPLICATION, route_prefix="/closed")
    context = ssl.create_default_context(cadata=public.cert.decode())
    where = Endpoint(
        f"localhost:{settings['grpc']['port']}",
        tls=True,
        root_certificates=public.cert,
        metadata=[("authorization", "Bearer alice")],
    )
    base = f"https://localhost:{settings['http']['port']}"
    with httpx.Client(base_url=base, verify=context, timeout=DEADLINE_S) as client:
        operators = f"http://127.0.0.1:{admin_port}"
        yield Closed(client, where, folder, parts, operators)
    serve.delete(APPLICATION)


def test_all_parts_find_each_other_and_clients_are_answered(closed: Closed):
    wait_until(lambda: closed.drafters() == DRAFTERS)
    with Client(closed.grpc) as client:
        sampling = SamplingOptions(max_tokens=24, temperature=0.0, seed=1)
        answer = client.complete(GenerateRequest(model=MODEL, text="Once", sampling=sampling))
    assert answer.choices[0].text == closed.text()


def test_http_and_grpc_ask_for_a_key(closed: Closed):
    assert [closed.answer(key).status_code for key in ("", "wrong", "alice")] == [401, 401, 200]
    wrong = replace(closed.grpc, metadata=[("authorization", "Bearer wrong")])
    with Client(wrong, max_retries=0) as refused:
        for ask in (
            lambda: refused.complete(GenerateRequest(model=MODEL, text="x")),
            refused.list_models,
        ):
            with pytest.raises(InvalidRequestError) as caught:
                ask()
            assert caught.value.status is grpc.StatusCode.UNAUTHENTICATED


def test_operators_have_a_key_and_a_port_and_whoever_starts_it_learns_what_it_waits_for(
    closed: Closed,
):
    assert closed.client.get("/health").json() == {"status": "ok"}
    assert closed.client.get("/metrics").status_code == 401
    found = closed.client.get("/metrics", headers=bearer("root"))
    assert "drafthouse_requests_total" in found.text
    assert closed.health()["keys"] == {"callers": ["alice", "root"], "fault": ""}
    assert state_of(APPLICATION)["targets"] == 1


def test_the_replicas_read_the_keys_again(closed: Closed):
    keys = closed.folder / "keys.yaml"
    assert closed.answer("bob").status_code == 401
    write_keys(keys, root={"admin": True}, alice={}, bob={})
    wait_until(lambda: closed.answer("bob").status_code == 200)
    keys.write_text("keys: {carol: {}}")
    wait_until(lambda: "keys.carol.sha256" in str(closed.health().get("keys")))
    assert closed.answer("bob").status_code == 200


def test_a_killed_coordinator_is_met_again_with_new_certificates(closed: Closed):
    before = closed.text()
    successor = Authority.new("its successor")
    for role in ROLES:
        successor.write(closed.folder / role, f"{role}.drafthouse")
    assert closed.text() == before
    (place,) = places("coordinator", APPLICATION)
    os.kill(place["pid"], signal.SIGKILL)
    assert closed.text() == before
    wait_until(lambda: closed.drafters() == DRAFTERS)
