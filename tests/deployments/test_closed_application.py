"""A whole application with a secret, and with certificates between its parts and to clients."""

from __future__ import annotations

import os
import signal
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.client import Client, Endpoint, GenerateRequest, SamplingOptions
from cluster.config.doors import ROLES
from tests.deployments.conftest import (
    DEADLINE_S,
    MODEL,
    Served,
    arguments,
    places,
    wait_until,
)
from tests.support.rpc.certificates import Authority
from tests.support.rpc.servers import SECRET

APPLICATION = "closed"
DRAFTERS = {"lookup": 1, "suffix": 1}


@dataclass(frozen=True)
class Closed:
    """Where it answers.  parts: the authority of its own parts, which is not that of clients."""

    client: httpx.Client
    grpc: Endpoint
    folder: Path
    parts: Authority

    def drafters(self) -> dict[str, Any]:
        return dict(self.client.get("/health").json()["drafters"])

    def text(self) -> str:
        body = {"model": MODEL, "prompt": "Once", "max_tokens": 24, "temperature": 0, "seed": 1}
        answer = self.client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])


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
    settings = arguments(long_folder, long_draft_folder) | {
        "tls": {
            "cert_file": str(folder / "public" / "cert.pem"),
            "key_file": str(folder / "public" / "key.pem"),
        },
        "data_plane": {"secret_file": str(folder / "secret"), "tls": of_parts},
    }
    # One of each role: each has certificates of its own.
    settings["ingress"]["replicas"] = 1
    del settings["drafters"]["lm"], settings["drafters"]["ngram"]
    serve.run(build(settings), name=APPLICATION, route_prefix="/closed")
    context = ssl.create_default_context(cadata=public.cert.decode())
    where = Endpoint(
        f"localhost:{settings['grpc']['port']}", tls=True, root_certificates=public.cert
    )
    base = f"https://localhost:{settings['http']['port']}"
    with httpx.Client(base_url=base, verify=context, timeout=DEADLINE_S) as client:
        yield Closed(client, where, folder, parts)
    serve.delete(APPLICATION)


def test_all_parts_find_each_other_and_clients_are_answered(closed: Closed) -> None:
    wait_until(lambda: closed.drafters() == DRAFTERS)
    with Client(closed.grpc) as client:
        sampling = SamplingOptions(max_tokens=24, temperature=0.0, seed=1)
        answer = client.complete(GenerateRequest(model=MODEL, text="Once", sampling=sampling))
    assert answer.choices[0].text == closed.text()


def test_a_killed_coordinator_is_met_again_with_new_certificates(closed: Closed) -> None:
    before = closed.text()
    successor = Authority.new("its successor")
    for role in ROLES:
        successor.write(closed.folder / role, f"{role}.drafthouse")
    assert closed.text() == before
    (place,) = places("coordinator", APPLICATION)
    os.kill(place["pid"], signal.SIGKILL)
    assert closed.text() == before
    wait_until(lambda: closed.drafters() == DRAFTERS)
