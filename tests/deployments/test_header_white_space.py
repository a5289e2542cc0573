"""White space around the values of headers is no part of them (RFC 9110, 5.5)."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.config.schema import ApiConfig
from tests.support.deployments.server import MODEL, Server, serving, tiny_config

ORIGIN = "https://page.example"


@pytest.fixture(scope="module")
def server(llama_folder: Path) -> Iterator[Server]:
    with serving(tiny_config(llama_folder, ApiConfig(cors_origins=(ORIGIN,)))) as running:
        yield running


def answered(server: Server, headers: dict[str, str]) -> http.client.HTTPResponse:
    """The answer to a request whose headers are sent as they are."""
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
    body = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 1}).encode()
    connection.putrequest("POST", "/v1/completions", skip_accept_encoding=True)
    for name, value in {"Content-Length": str(len(body)), **headers}.items():
        connection.putheader(name, value)
    connection.endheaders(body)
    response = connection.getresponse()
    response.read()
    connection.close()
    return response


@pytest.mark.parametrize("around", [" {}", "{} ", "{}\t", "\t {} \t", "{}     "])
def test_every_header_is_read_without_it(server: Server, around: str) -> None:
    values = {"X-Request-Timeout-Ms": "5000", "X-Request-Id": "mine-7", "Origin": ORIGIN}
    response = answered(server, {name: around.format(value) for name, value in values.items()})
    assert response.status == 200
    assert response.headers["X-Request-Id"] == "mine-7"
    assert response.headers["Access-Control-Allow-Origin"] == ORIGIN


def test_white_space_within_a_value_is_a_part_of_it(server: Server) -> None:
    assert answered(server, {"X-Request-Timeout-Ms": "50 00"}).status == 400
    assert len(answered(server, {"X-Request-Id": "a b"}).headers["X-Request-Id"]) == 32
