"""A server of streamed answers, whose tokens have the drafters that proposed them."""

import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import httpx

from tests.support.deployments.api import Json


class Terminal(io.StringIO):
    """Where a command writes, as if people read it."""

    def isatty(self) -> bool:
        return True


Answer = tuple[Sequence[tuple[str, list[str]]], Json]
Answering = Callable[[Json], Answer]
REFUSED = "refuse"


@dataclass
class DraftingServer:
    """answering: gives the tokens and the last event.  bodies, headers: all that was asked."""

    answering: Answering
    owner: str = "drafthouse"
    has_template: bool = True
    bodies: list[Json] = field(default_factory=list)
    headers: list[httpx.Headers] = field(default_factory=list)

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            card = {"id": "the-model", "owned_by": self.owner}
            return httpx.Response(200, json={"data": [card]})
        is_chat = request.url.path == "/v1/chat/completions"
        if is_chat and not self.has_template:
            return _refused("the model has no chat template; use the completions endpoint")
        body = json.loads(request.content)
        self.bodies.append(body)
        self.headers.append(request.headers)
        if is_chat and body["messages"][-1]["content"] == REFUSED:
            return _refused("not this")
        tokens, last = self.answering(body)
        events = [{"choices": [{"delta": {"role": "assistant"}}]}]
        for text, drafters in tokens:
            choice = {"delta": {"content": text}} if is_chat else {"text": text}
            if body.get("return_draft_sources"):
                choice["draft_sources"] = [{"bytes": list(text.encode()), "drafters": drafters}]
            events.append({"choices": [choice]})
        events.append({"choices": [{"delta": {}, "finish_reason": "stop"}], **last})
        lines = (f"data: {json.dumps(event)}\n\n" for event in events)
        return httpx.Response(200, text="".join(lines) + "data: [DONE]\n\n")


def _refused(message: str) -> httpx.Response:
    return httpx.Response(400, json={"error": {"message": message}})
