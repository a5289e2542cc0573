"""What pages of other sites make a browser send is refused, and what programs send is not: the
cases of browser_guard.yaml."""

from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.config.doors import HttpConfig
from deployments.ingress.request_scope import BrowserGuard, RequestScope
from tests.support.deployments.asgi import call

PLACES = {
    "loopback": HttpConfig(host_names=("drafts.example",)),
    "public": HttpConfig(host="0.0.0.0"),
}
CASES = yaml.safe_load(Path(__file__).with_name("browser_guard.yaml").read_text("utf-8"))


async def here(scope: Scope, receive: Receive, send: Send) -> None:
    await PlainTextResponse(f"here {Request(scope).method}")(scope, receive, send)


def guarded(place: str, allows: list[str]) -> ASGIApp:
    check = BrowserGuard(PLACES[place], tuple(allows)).check
    return RequestScope(here, is_logged=False, check=check)


@pytest.mark.parametrize(
    ("case", "headers"),
    [(case, headers) for case in CASES for headers in case["sent"]],
    ids=lambda value: value.get("case", ""),
)
async def test_foreign_names_and_pages_are_refused_and_others_answered(
    case: dict[str, Any], headers: dict[str, str]
):
    transport = httpx.ASGITransport(guarded(case["at"], case.get("allows", [])))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost:8000") as client:
        for method in case.get("methods", ["GET"]):
            answer = await client.request(method, "/v1/models", headers=headers)
            if "told" not in case:
                assert answer.status_code == 200
                continue
            assert answer.status_code == 403
            assert case["told"] in answer.json()["error"]["message"]
            assert answer.headers["x-request-id"]


@pytest.mark.parametrize("around", [" {}", "{} ", "{}\t", "\t {} \t"])
async def test_a_header_is_read_without_the_white_space_around_it(around: str):
    headers = [(b"x-request-id", around.format("mine-7").encode())]
    asked = call(guarded("public", []), "GET", "/", headers=headers)
    await asked.task
    assert (b"x-request-id", b"mine-7") in asked.sent[0]["headers"]
