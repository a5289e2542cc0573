"""The doors for clients: keys over HTTP and gRPC, what each opens, and how they change."""

import asyncio
import dataclasses
import itertools
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import grpc
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster import metrics
from cluster.client.generated import generation_pb2
from cluster.config.doors import AccessConfig, AdminConfig, digest_of
from cluster.config.schema import Config, HttpConfig, IngressConfig
from deployments.ingress.grpc_api import GENERATION
from deployments.ingress.http import create_admin_app
from deployments.ingress.keys import OTHER, KeyRing
from tests.support.deployments.place import BODIES, bearer, generate, place, refusal
from tests.support.errors import config_error

Write = Callable[..., Config]
PUBLIC = HttpConfig(host="0.0.0.0")


@pytest.fixture
def write(write: Write) -> Write:
    """For a server that others reach."""
    return partial(write, http=PUBLIC)


@pytest.mark.parametrize("key", ["", "wrong", digest_of("alice")])
async def test_without_a_key_that_is_known_no_page_answers(write: Write, key: str):
    async with place(write(alice={})) as here:
        answers = {path: await here.ask(path, key=key) for path in BODIES}
        for path in ("/", "/v1/models", "/v1/responses/x", "/openapi.json", "/metrics"):
            answers[path] = await here.client.get(path, headers=bearer(key))
        assert refusal(answers.pop("/v1/messages")) == (401, "authentication_error", "")
        for answer in answers.values():
            assert refusal(answer) == (401, "invalid_request_error", "invalid_api_key")
            assert answer.headers["www-authenticate"] == "Bearer"
            assert not key or key not in answer.text
        assert (await here.client.get("/ping")).status_code == 200
        assert (await here.client.get("/-/healthz")).text == "success"  # KubeRay's probe
        assert here.rooms.coordinator.status()["num_running"] == 0


@pytest.mark.parametrize("path", BODIES)
async def test_a_key_opens_every_door_by_either_header(write: Write, path: str):
    async with place(write(alice={}, bob={})) as here:
        assert (await here.ask(path, key="alice")).status_code == 200
        assert (await here.ask(path, headers={"x-api-key": "bob"})).status_code == 200


async def test_grpc_asks_for_a_key_whatever_is_called_and_before_the_message_is_read(write: Write):
    """A call that sends nothing would else wait for ever in the place of another."""
    config = dataclasses.replace(write(alice={}), ingress=IngressConfig(max_body_bytes=1000))
    kinds = [
        *itertools.product(
            ("Generate", "Tokenize", "ListModels", "NoSuch"),
            (b"", b"\xff\xff", b"a" * 300_000, None),
            ((), (("authorization", "Bearer wrong"),)),
        )
    ]
    async with place(config) as here, here.listening() as (channel, _):
        for method, sent, metadata in kinds:
            path = f"/{GENERATION}/{method}"
            if sent is None:
                call = channel.stream_stream(path)(metadata=metadata)
            else:
                call = channel.unary_stream(path)(sent, metadata=metadata)
            async with asyncio.timeout(60):
                assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
        refusals = f'drafthouse_rejected_requests_total{{code="invalid_api_key"}} {len(kinds)}.0'
        assert refusals in here.ingress.recorder.render().decode()


async def test_a_class_that_the_key_may_not_use_is_forbidden(write: Write):
    config = write(alice={}, bob={"classes": ["interactive"], "default_class": "interactive"})
    async with place(config) as here, here.listening() as (channel, _):
        path, wanted = "/v1/completions", {"latency_class": "interactive"}
        answer = await here.ask(path, key="alice", speculation=wanted)
        assert refusal(answer) == (403, "permission_error", "permission_denied")
        assert answer.json()["error"]["param"] == "speculation.latency_class"
        options = generation_pb2.SpeculationRequest(latency_class="interactive")
        refused = generate(channel, "alice", speculation=options)
        assert await refused.code() is grpc.StatusCode.PERMISSION_DENIED
        unknown = await here.ask(path, key="alice", speculation={"latency_class": "none"})
        assert unknown.status_code == 400
        assert (await here.ask(path, key="bob", speculation=wanted)).status_code == 200
        assert (await here.ask(path, key="bob")).status_code == 200
        opened = [each for frame in here.toy.frames for each in frame.opens]
        assert [each.latency_class for each in opened] == ["interactive", "interactive"]


def replace(config: Config, text: str | None) -> str:
    """Put another text in place of the file of keys, or none; its name."""
    path = Path(config.access.keys_file)
    path.unlink() if text is None else path.write_text(text)
    return str(path)


async def test_keys_change_while_streams_run_and_none_is_lost(write: Write):
    async with place(write(alice={}, bob={})) as here:
        here.toy.gate.clear()
        paths = [path for path in BODIES for _ in range(8)]
        running = [here.ask(path, stream=True, key="alice") for path in paths]
        await here.wait_for_running(len(running))
        rotated = {"sha256": digest_of("new"), "previous_sha256": digest_of("bob")}
        write(carol={}, bob=rotated)
        await here.ingress.keys.look()
        here.toy.gate.set()
        answers = await asyncio.gather(*running)
        assert all(answer.status_code == 200 for answer in answers)
        assert not any('"error": {' in answer.text for answer in answers)
        allowed = {
            key: (await here.ask("/v1/completions", key=key)).status_code == 200
            for key in ("alice", "bob", "new", "carol")
        }
        assert allowed == {"alice": False, "bob": True, "new": True, "carol": True}


async def test_a_wrong_file_keeps_the_keys_and_says_so(
    write: Write, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    async with place(write(alice={"admin": True})) as here:
        for text in ("keys: {mallory: {sha256: secret-word}}", "", None):
            path = replace(here.ingress.config, text)
            await here.ingress.keys.look()
            assert (await here.ask("/v1/completions", key="alice")).status_code == 200
            said = (await here.client.get("/health", headers=bearer("alice"))).json()["keys"]
            assert said["callers"] == ["alice"]
            assert path in said["fault"]
        assert caplog.text.count("what was read before stays in use") == 3
        await here.ingress.keys.look()
        write(alice={}, bob={})
        await here.ingress.keys.look()
        assert here.ingress.keys.status()["keys"]["fault"] == ""
        assert (await here.ask("/v1/completions", key="bob")).status_code == 200
    assert "secret-word" not in caplog.text
    assert "alice's" not in caplog.text


async def test_the_keys_tenants_are_apart(write: Write):
    async with place(write(alice={}, bob={})) as here:
        for key in ("alice", "bob"):
            for more in ({}, {"cache_salt": "s"}):
                answer = await here.ask("/v1/completions", key=key, **more)
                assert answer.status_code == 200
        tenants = [each.tenant for frame in here.toy.frames for each in frame.opens]
    assert len(set(tenants)) == 4
    assert all(len(tenant) == 16 for tenant in tenants)


async def test_a_stored_answer_belongs_to_its_key(write: Write):
    path = "/v1/responses"
    async with place(write(alice={}, bob={})) as here:
        made = (await here.ask(path, key="alice")).json()["id"]
        asks = [
            lambda key: here.client.get(f"{path}/{made}", headers={"x-api-key": key}),
            lambda key: here.ask(path, key=key, previous_response_id=made),
            lambda key: here.client.delete(f"{path}/{made}", headers={"x-api-key": key}),
        ]
        for ask in asks:
            assert (await ask("bob")).status_code == 404
        for ask in asks:
            assert (await ask("alice")).status_code == 200


async def test_what_operators_see_needs_their_key_or_their_port(write: Write):
    async with place(write(alice={}, root={"admin": True})) as here:
        await here.ask("/v1/completions", key="alice")

        async def seen(key: str = "") -> tuple[int, int, list[str]]:
            health, page, stats = [
                await here.client.get(path, headers=bearer(key))
                for path in ("/health", "/metrics", "/stats")
            ]
            return page.status_code, stats.status_code, list(health.json())

        assert await seen() == (401, 401, ["status"])
        assert await seen("wrong") == (401, 401, ["status"])
        assert await seen("alice") == (200, 403, ["status"])
        *status, shown = await seen("root")
        assert (status, shown[:2]) == ([200, 200], ["status", "model"])
        transport = httpx.ASGITransport(create_admin_app(here.ingress))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            assert (await client.get("/metrics")).status_code == 200
            assert "keys" in (await client.get("/health")).json()
            assert (await client.get("/v1/models")).status_code == 404


async def series(client: httpx.AsyncClient, key: str = "") -> dict[str, set[str]]:
    """The families of /metrics that have samples, each with the keys that these are of."""
    answer = await client.get("/metrics", headers=bearer(key))
    assert answer.status_code == 200
    families = text_string_to_metric_families(answer.text)
    return {
        family.name: {sample.labels.get("key", "") for sample in family.samples}
        for family in families
        if family.samples
    }


BY_KEY = metrics.KEY_TOKENS.name


async def test_a_tenants_metrics_are_its_own_and_an_operators_are_everybodys(write: Write):
    config = write(alice={}, bob={}, al={}, root={"admin": True})
    async with place(config) as here:
        for key in ("alice", "bob"):
            await here.ask("/v1/completions", key=key)
        assert await series(here.client, "alice") == {BY_KEY: {"alice"}}
        assert await series(here.client, "bob") == {BY_KEY: {"bob"}}
        assert await series(here.client, "al") == {}
        seen = await series(here.client, "root")
        assert seen[BY_KEY] == {"alice", "bob"}
        assert len(seen) > 1


async def test_on_loopback_everybody_sees_the_series_of_no_key_and_nobody_anothers(write: Write):
    config = Config(access=write(alice={}, bob={}, root={"admin": True}).access)
    async with place(config) as here:
        for key in ("alice", "bob"):
            await here.ask("/v1/completions", key=key)
        everything = await series(here.client, "root")
        assert everything[BY_KEY] == {"alice", "bob"}
        assert await series(here.client, "alice") == everything | {BY_KEY: {"alice"}}
        others = {name: keys for name, keys in everything.items() if name != BY_KEY}
        for key in ("", "wrong"):
            assert await series(here.client, key) == others
        for key, is_told in (("", False), ("alice", False), ("root", True)):
            health = await here.client.get("/health", headers={"x-api-key": key})
            assert ("keys" in health.json()) == is_told
            assert "engines" in health.json()


async def test_no_key_has_the_name_of_those_beyond_the_first_hundred(write: Write):
    with config_error("is no name of letters"):
        KeyRing(write(**{OTHER: {}}))


@pytest.mark.parametrize(
    ("config", "status"),
    [
        (Config(), 200),
        (Config(http=PUBLIC), 200),
        (Config(http=PUBLIC, access=AccessConfig(admin=AdminConfig(port=1))), 403),
        (Config(access=AccessConfig(admin=AdminConfig(port=1))), 200),
    ],
)
async def test_without_keys_metrics_leave_the_public_port_for_one_of_their_own(
    config: Config, status: int
):
    async with place(config) as here:
        for path in ("/metrics", "/stats"):
            assert (await here.client.get(path)).status_code == status
        shown = (await here.client.get("/health")).json()
        assert ("engines" in shown) == (status == 200)
        assert (await here.ask("/v1/completions")).status_code == 200
