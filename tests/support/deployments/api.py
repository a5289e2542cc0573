"""What tests ask of the HTTP API at an address."""

import json
from collections.abc import Iterator
from typing import Any

import httpx

from cluster.records import frozen

MODEL = "tiny"
Json = dict[str, Any]  # an object


def events(text: str) -> list[Json]:
    """What the events of a stream say."""
    lines = [line for line in text.splitlines() if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@frozen
class Api:
    """url: without a slash."""

    url: str

    def post(self, path: str, **body: Any) -> httpx.Response:
        # Without the certificates of the world, which take longer to read than most answers.
        asked = {"model": MODEL, **body}
        return httpx.post(f"{self.url}{path}", json=asked, timeout=120, verify=False)

    def ask(self, path: str, **body: Any) -> Json:
        """The whole answer."""
        answer = self.post(path, **body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def complete(self, **body: Any) -> Json:
        """The first choice of a completion."""
        return self.ask("/v1/completions", **body)["choices"][0]

    def stream(self, path: str, **body: Any) -> list[Json]:
        answer = self.post(path, **{**body, "stream": True})
        assert answer.status_code == 200, answer.text
        assert answer.text.endswith("data: [DONE]\n\n") or "completions" not in path
        return events(answer.text)

    def read(self, path: str, headers: dict[str, str] | None = None, **body: Any) -> Iterator[Json]:
        """The events of a stream as they come, none of which may be an error."""
        asked, url = {"model": MODEL, **body, "stream": True}, f"{self.url}{path}"
        with httpx.stream(
            "POST", url, json=asked, headers=headers, timeout=120, verify=False
        ) as answer:
            for line in answer.iter_lines():
                for event in events(line):
                    assert "error" not in event, event
                    yield event

    def refusal(self, path: str, **body: Any) -> Json:
        """The error of a body that is refused."""
        answer = self.post(path, **body)
        assert answer.status_code in (400, 404), answer.text
        return answer.json()["error"]
