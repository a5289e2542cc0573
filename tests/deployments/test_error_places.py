"""Whatever is wrong at one place of a body, the error names that place, on every endpoint."""

import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

from cluster.errors import RequestError
from deployments.ingress.api.contract import PostEndpoint
from tests.deployments.test_contract import parse
from tests.deployments.test_tools import SERVED
from tests.deployments.test_wrong_fields import BODIES, ENDPOINTS

WHOLE = {ENDPOINTS[path]: body for path, body in BODIES["whole"].items()}
WRONG: tuple[Any, ...] = (5, -1, True, "x", "", [], {}, [5], [""], [{}], {"type": "x"}, 1e300, None)
HALF = "\ud83d"  # of a surrogate pair: JSON can escape it, and UTF-8 cannot have it
# What is said and not rendered, whatever it is.
UNREAD = {"input[0].summary", "messages[1].content[0].thinking"}
# A field that only makes sense with another one may be named for it.
TOGETHER = {("tools", "tool_choice"), ("logprobs", "top_logprobs"), ("messages", "prompt")}


def places(value: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Every path in a body, with the object or list that has it, and its key there."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        name = f"{path}[{key}]" if isinstance(value, list) else f"{path}.{key}".lstrip(".")
        yield name, value, key
        if isinstance(inner, dict | list):
            yield from places(inner, name)


def top(path: str) -> str:
    return path.partition(".")[0].partition("[")[0]


def is_near(param: str, path: str) -> bool:
    """Whether one is within the other, or a sibling of it in the same object."""
    around = path.rpartition(".")[0]
    return (
        param.startswith(path)
        or path.startswith(param)
        or bool(around and param.startswith(around))
        or (top(path), top(param)) in TOGETHER
    )


def answers(endpoint: PostEndpoint, *wrong: Any) -> Iterator[tuple[str, RequestError | None]]:
    """What each wrong value at each place is answered with; None where it is taken."""
    for number, (path, *_) in enumerate(places(WHOLE[endpoint])):
        for value in wrong:
            body = json.loads(json.dumps(WHOLE[endpoint]))  # nothing of it is there twice
            _, holder, key = list(places(body))[number]
            holder[key] = value
            try:
                parse(endpoint, body, SERVED)
            except RequestError as error:
                yield path, error
            else:
                yield path, None


EACH = pytest.mark.parametrize("endpoint", WHOLE, ids=lambda endpoint: endpoint.path)


@EACH
def test_an_error_names_the_place_that_is_wrong(endpoint: PostEndpoint):
    """For some value of each place exactly that, or the list of texts that it is in, or what an
    object lacks: the name of a function."""
    parse(endpoint, WHOLE[endpoint], SERVED)
    named: dict[str, set[str]] = defaultdict(set)
    for path, error in answers(endpoint, *WRONG):
        if error is not None:
            param = error.param or ""
            assert is_near(param, path), (path, error.message)
            assert error.message.startswith(f"{param}: ")
            named[path].add(param)
    assert len(named) > 25
    for path, params in named.items():
        owner = path.rpartition("[")[0] if path.endswith("]") else f"{path}.name"
        assert params & {path, owner}, path
