"""The files of the page: small, as they were vendored, and sent with a strict policy."""

import gzip
import hashlib

import httpx
import pytest

from cluster.config.doors import HttpConfig, UiConfig
from deployments.page.routes import STATIC
from docs.tools.vendor import ROOT, packages

MAX_COMPRESSED_BYTES = 120_000
MAX_MODULE_LINES = 250
BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'"
)


def test_all_of_it_is_small():
    files = [path for path in STATIC.rglob("*") if path.is_file() and path.suffix != ".LICENSE"]
    assert sum(len(gzip.compress(path.read_bytes())) for path in files) <= MAX_COMPRESSED_BYTES
    for path in STATIC.glob("*.js"):
        assert len(path.read_bytes().splitlines()) <= MAX_MODULE_LINES, path


def test_vendored_files_are_those_of_the_list():
    listed = {to: digest for each in packages() for to, digest in each.files.values()}
    for to, digest in listed.items():
        body = (ROOT / to).read_bytes()
        body = gzip.decompress(body) if to.endswith(".gz") else body
        assert hashlib.sha256(body).hexdigest() == digest, to
    folder = ROOT / "deployments/page/static/vendor"
    assert {str(path.relative_to(ROOT)) for path in folder.iterdir()} <= set(listed)
    assert all(each.licence and each.integrity.startswith("sha512-") for each in packages())


@pytest.mark.parametrize("path", ["/", "/ui/static/app.js", "/ui/static/vendor/purify.js"])
def test_every_file_comes_with_the_policy(http: httpx.Client, path: str):
    answer = http.get(path, headers={"Accept": BROWSER})
    assert answer.status_code == 200
    assert answer.headers["content-security-policy"] == POLICY
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["content-encoding"] == "gzip"
    again = http.get(path, headers={"Accept": BROWSER, "If-None-Match": answer.headers["etag"]})
    assert again.status_code == 304
    plain = http.get(path, headers={"Accept": BROWSER, "Accept-Encoding": "identity"})
    assert plain.content == answer.content


def test_programs_and_the_docs_get_what_they_got(http: httpx.Client):
    assert http.get("/").headers["content-type"].startswith("text/plain")
    docs = http.get("/docs", headers={"Accept": BROWSER})
    assert "POST /v1/chat/completions" in docs.text


@pytest.mark.parametrize("path", ["nothing.js", "../routes.py", "..%2froutes.py", "vendor", ""])
def test_no_other_file_is_sent(http: httpx.Client, path: str):
    assert http.get(f"/ui/static/{path}").status_code == 404


@pytest.mark.parametrize(
    ("where", "enabled", "expected"),
    [
        (HttpConfig(), "auto", True),
        (HttpConfig(host="::1"), "auto", True),
        (HttpConfig(host="0.0.0.0"), "auto", False),
        (HttpConfig(host="0.0.0.0"), True, True),
        (HttpConfig(), False, False),
    ],
)
def test_it_is_there_on_loopback_or_where_it_is_wanted(
    where: HttpConfig, enabled: bool | str, expected: bool
):
    assert UiConfig(enabled=enabled).is_served(where) is expected
