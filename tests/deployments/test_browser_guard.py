"""What pages of other sites make a browser send is refused, and what programs send is not."""

from __future__ import annotations

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.config.doors import HttpConfig
from deployments.ingress.request_scope import BrowserGuard, RequestScope
from tests.support.deployments.asgi import call

LOCAL = HttpConfig(host_names=("drafts.example",))
PUBLIC = HttpConfig(host="0.0.0.0")


async def here(scope: Scope, receive: Receive, send: Send) -> None:
    await PlainTextResponse(f"here {Request(scope).method}")(scope, receive, send)


def guarded(where: HttpConfig, origins: tuple[str, ...] = ()) -> ASGIApp:
    return RequestScope(here, is_logged=False, check=BrowserGuard(where, origins).check)


async def ask(app: ASGIApp, method: str = "GET", **headers: str) -> httpx.Response:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost:8000") as client:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await client.request(method, "/v1/models", headers=named)


OURS = ["localhost", "localhost:8000", "127.0.0.1:8000", "127.8.8.8", "[::1]:8000", "[::1]"]


@pytest.mark.parametrize("host", [*OURS, "LOCALHOST", "drafts.example", "drafts.example:443"])
async def test_a_server_on_loopback_answers_to_names_of_loopback_and_to_those_it_is_given(
    host: str,
) -> None:
    assert (await ask(guarded(LOCAL), Host=host)).status_code == 200


FOREIGN = ["evil.example", "evil.example:8000", "127.0.0.1.evil", "localhost.evil", "0.0.0.0"]


@pytest.mark.parametrize("host", [*FOREIGN, "192.168.0.1:8000", "[::2]:8000", "", "127.0.0.1@evil"])
async def test_it_answers_to_no_other_name(host: str) -> None:
    answer = await ask(guarded(LOCAL), Host=host)
    assert answer.status_code == 403
    assert "http.host_names" in answer.json()["error"]["message"]
    assert answer.headers["x-request-id"]


async def test_others_do_not_know_their_names() -> None:
    assert (await ask(guarded(PUBLIC), Host="drafts.example")).status_code == 200


@pytest.mark.parametrize("method", ["POST", "DELETE"])
@pytest.mark.parametrize("where", [LOCAL, PUBLIC])
async def test_a_page_of_another_site_may_send_nothing(where: HttpConfig, method: str) -> None:
    sent = {"Sec_Fetch_Site": "cross-site", "Origin": "https://evil.example"}
    answer = await ask(guarded(where, ("https://good.example",)), method, **sent)
    assert answer.status_code == 403
    assert "api.cors_origins" in answer.json()["error"]["message"]


async def test_a_page_that_cors_allows_may_and_so_may_our_own_and_programs() -> None:
    good = {"Sec_Fetch_Site": "cross-site", "Origin": "https://good.example"}
    for origins in (("https://good.example",), ("*",)):
        assert (await ask(guarded(LOCAL, origins), "POST", **good)).status_code == 200
    for site in ("same-origin", "none"):
        assert (await ask(guarded(LOCAL), "POST", Sec_Fetch_Site=site)).status_code == 200
    assert (await ask(guarded(LOCAL), "POST")).status_code == 200


async def test_whoever_follows_a_link_from_elsewhere_may_read() -> None:
    answer = await ask(guarded(LOCAL), Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate")
    assert answer.status_code == 200


SAME = [
    ("http://llm.example", "llm.example"),
    ("http://llm.example", "llm.example:80"),
    ("http://LLM.example:8000", "llm.example:8000"),
    ("https://llm.example", "llm.example"),
    ("https://llm.example", "llm.example:443"),
    ("https://llm.example:443", "llm.example"),
    ("http://[fd00::1]:8000", "[fd00::1]:8000"),
    ("http://[fd00::1]", "[fd00::1]:80"),
]
OTHERS = [
    ("http://evil.example", "llm.example"),
    ("http://llm.example:3000", "llm.example:8000"),
    ("https://llm.example", "llm.example:80"),
    ("http://llm.example", "llm.example:443"),
    ("http://llm.example.evil.example", "llm.example"),
    ("http://evil.example/llm.example", "llm.example"),
    ("http://[fd00::1]:8000", "[fd00::2]:8000"),
    ("http://[::1", "llm.example"),
    ("null", "llm.example"),
    ("null", ""),
    ("file://", "llm.example"),
    ("file://", ""),
    ("llm.example", "llm.example"),
    ("chrome-extension://llm.example", "llm.example"),
    ("x", "x"),
]


@pytest.mark.parametrize("method", ["POST", "DELETE"])
@pytest.mark.parametrize(("origin", "host"), OTHERS)
async def test_an_older_browsers_page_of_another_origin_may_send_nothing(
    method: str, origin: str, host: str
) -> None:
    """Browsers send Sec-Fetch-Site over https and to loopback only, and older ones nowhere."""
    app = guarded(PUBLIC, ("https://good.example",))
    answer = await ask(app, method, Origin=origin, Host=host)
    assert answer.status_code == 403
    assert "api.cors_origins" in answer.json()["error"]["message"]
    assert (await ask(guarded(PUBLIC), "GET", Origin=origin, Host=host)).status_code == 200


@pytest.mark.parametrize(("origin", "host"), SAME)
async def test_an_older_browsers_own_page_may(origin: str, host: str) -> None:
    app = guarded(PUBLIC)
    assert (await ask(app, "POST", Origin=origin, Host=host)).status_code == 200
    # Behind a proxy that says under which name it was asked.
    forwarded = {"Origin": origin, "Host": "10.0.0.7:8000", "X_Forwarded_Host": f"{host}, inner"}
    assert (await ask(app, "POST", **forwarded)).status_code == 200


@pytest.mark.parametrize("allowed", ["http://good.example", "null", "*"])
async def test_an_older_browsers_page_that_cors_allows_may(allowed: str) -> None:
    origin = "http://good.example" if allowed == "*" else allowed
    app = guarded(PUBLIC, (allowed,))
    assert (await ask(app, "POST", Origin=origin, Host="llm.example")).status_code == 200


async def test_a_page_of_another_site_is_refused_on_loopback_as_well() -> None:
    for host in OURS:
        answer = await ask(guarded(LOCAL), "POST", Origin="http://evil.example", Host=host)
        assert answer.status_code == 403


@pytest.mark.parametrize("around", [" {}", "{} ", "{}\t", "\t {} \t"])
async def test_a_header_is_read_without_the_white_space_around_it(around: str) -> None:
    headers = [(b"x-request-id", around.format("mine-7").encode())]
    asked = call(guarded(PUBLIC), "GET", "/", headers=headers)
    await asked.task
    assert (b"x-request-id", b"mine-7") in asked.sent[0]["headers"]
