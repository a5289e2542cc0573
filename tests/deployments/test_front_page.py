"""Who opens the server's address learns what it is, which model it serves, and where."""

from html.parser import HTMLParser

import httpx
import pytest
from starlette.testclient import TestClient

from cluster.config.doors import UiConfig
from cluster.config.schema import Config
from deployments.ingress.api.pages import ENDPOINTS, PAGES
from deployments.ingress.http import create_app
from deployments.ingress.wording import UNSERVED, reason_of
from tests.support.deployments.stage import toys_ingress

NAME = "tiny & <small>"
BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"


@pytest.fixture(scope="module")
def http() -> httpx.Client:
    config = Config(model_name=NAME, ui=UiConfig(enabled=False))
    return TestClient(create_app(toys_ingress(config)), base_url="http://localhost")


class Read(HTMLParser):
    """links: of the page.  text: as a browser shows it."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""
        self.links = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value for name, value in attrs if name == "href" and value]

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("path", ["/", "/docs"])
@pytest.mark.parametrize("accept", ["*/*", "application/json", "text/html;q=0, */*"])
def test_programs_read_ten_lines_of_text(http: httpx.Client, path: str, accept: str):
    answer = http.get(path, headers={"Accept": accept})
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert len(answer.text.splitlines()) == 10
    assert f"Model: {NAME}\n" in answer.text
    assert all(f"POST {endpoint.path} " in answer.text for endpoint in ENDPOINTS)
    assert http.head(path).status_code == 200


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_browsers_read_the_same_with_links_that_lead_somewhere(http: httpx.Client, path: str):
    answer = http.get(path, headers={"Accept": BROWSER})
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["vary"] == "Accept"
    read = Read()
    read.feed(answer.text)
    assert f"Model: {NAME}" in read.text
    assert all(f"POST {endpoint.path}" in read.text for endpoint in ENDPOINTS)
    assert {"/v1/models", "/health", "/openapi.json"} <= set(read.links)
    assert all(http.get(link).status_code != 404 for link in read.links)


@pytest.mark.parametrize("path", [f"/v1{path}" for path in UNSERVED] + ["/v2/rerank", "/score"])
@pytest.mark.parametrize("below", ["", "/a/b"])
def test_what_other_servers_have_is_refused_with_what_this_one_does(
    http: httpx.Client, path: str, below: str
):
    answer = http.post(f"{path}{below}", json={"model": NAME, "input": "x"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (404, "not_found_error")
    what, remedy = UNSERVED["/" + path.split("/", 2)[2] if path[:2] == "/v" else path]
    assert error["message"] == f"{path}{below}: {what}: not served here; {remedy}"


def test_no_path_that_is_served_is_among_them(http: httpx.Client):
    served = {endpoint.path for endpoint in ENDPOINTS} | {page.path for page in PAGES}
    assert [path for path in served if reason_of(path)] == []
    assert reason_of("/v1/embeddingsx") == ""


def test_a_wrong_path_is_told_where_to_look(http: httpx.Client):
    answer = http.get("/v2")
    assert answer.status_code == 404
    assert "see /" in answer.json()["error"]["message"]
