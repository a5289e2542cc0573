"""`serve deploy` of a changed list of adapters: no process restarts and no stream breaks."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.core import token_array
from tests.deployments.conftest import MODEL, Served, arguments, free_port, places, wait_until
from tests.support.engine.adapters import ATTENTION, merged_oracle, write_adapter
from tests.support.engine.driver import generate, load_oracle

APPLICATION = "changing"
PROMPT = [9, 8, 7, 6, 5] * 8
NUM_TOKENS = 16
LONG = 3000
GREEDY: dict[str, Any] = {
    "prompt": PROMPT, "temperature": 0, "ignore_eos": True, "return_token_ids": True,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Changing:
    """The application, and the file that it was deployed from."""

    served: Served
    document: dict[str, Any]
    folders: Mapping[str, Path]

    def deploy(self, **adapters: str) -> None:
        """As `serve deploy` does it.  adapters: names to those in `folders`."""
        from ray.serve.context import _get_global_client
        from ray.serve.schema import ServeDeploySchema

        named = {name: str(self.folders[folder]) for name, folder in adapters.items()}
        application = self.document["applications"][0]
        application["deployments"] = [{"name": "target", "user_config": {"adapters": named}}]
        _get_global_client().deploy_apps(ServeDeploySchema.model_validate(self.document))

    def models(self) -> list[str]:
        answer = httpx.get(f"{self.served.http}/v1/models", timeout=60)
        return [card["id"] for card in answer.json()["data"]] if answer.is_success else []

    def post(self, model: str, max_tokens: int = NUM_TOKENS) -> httpx.Response:
        body = {**GREEDY, "model": model, "max_tokens": max_tokens}
        return httpx.post(f"{self.served.http}/v1/completions", json=body, timeout=120)

    def text(self, model: str, max_tokens: int = NUM_TOKENS) -> list[int]:
        return list(self.post(model, max_tokens).json()["choices"][0]["token_ids"])


@dataclass
class Reading:
    """A stream that is read by a thread of its own."""

    token_ids: list[int] = field(default_factory=list)
    errors: list[Any] = field(default_factory=list)

    def read(self, url: str, model: str) -> None:
        body = {**GREEDY, "model": model, "max_tokens": LONG, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as response:
            for line in response.iter_lines():
                if not line or line == "data: [DONE]":
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    self.errors.append(chunk["error"])
                    return
                self.token_ids += chunk["choices"][0]["token_ids"]


@pytest.fixture(scope="module")
def changing(
    served: Served, long_folder: Path, long_draft_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Changing]:  # fmt: skip
    from ray import serve

    root = tmp_path_factory.mktemp("changes")
    folders = {
        "first": write_adapter(long_folder, root / "first", seed=1),
        "second": write_adapter(long_folder, root / "second", seed=2),
        "third": write_adapter(long_folder, root / "third", ATTENTION, seed=3),
        "misfit": write_adapter(long_folder, root / "misfit", rank=80),
    }
    settings = copy.deepcopy(arguments(long_folder, long_draft_folder))
    settings["drafters"] = {"suffix": settings["drafters"]["suffix"]}
    settings["grpc"] = {"port": free_port()}
    settings["ingress"]["replicas"] = 1
    document = {
        "applications": [
            {
                "name": APPLICATION,
                "route_prefix": f"/{APPLICATION}",
                "import_path": "deployments.app:build",
                "args": settings,
                # The processes of the test find these packages by the folder that it runs in.
                "runtime_env": {"env_vars": {"PYTHONPATH": str(Path(__file__).parents[2])}},
            }
        ]
    }
    found = Changing(replace(served, http=f"{served.proxied}/{APPLICATION}"), document, folders)
    found.deploy(pirate="first")
    wait_until(lambda: found.models() == [MODEL, "pirate"])
    yield found
    serve.delete(APPLICATION)


def test_the_list_changes_under_a_stream(changing: Changing) -> None:
    before = places("target", APPLICATION)
    oracles = {
        name: generate(
            merged_oracle(changing.served.target_folder, folder), token_array(PROMPT), NUM_TOKENS
        )
        for name, folder in changing.folders.items()
        if name != "misfit"
    }
    assert changing.text("pirate") == oracles["first"]
    whole = changing.text("pirate", LONG)

    reading = Reading()
    thread = threading.Thread(target=reading.read, args=(changing.served.http, "pirate"))
    thread.start()
    wait_until(lambda: len(reading.token_ids) > 0)
    changing.deploy(pirate="second", parrot="third")
    wait_until(lambda: changing.models() == [MODEL, "pirate", "parrot"])
    assert changing.text("pirate") == oracles["second"]
    assert changing.text("parrot") == oracles["third"]
    assert thread.is_alive(), "the stream ended before the change: the test shows nothing"
    thread.join()
    assert reading.errors == []
    assert reading.token_ids == whole, "a running text goes on with what it began with"

    changing.deploy(pirate="second", heavy="misfit")
    wait_until(lambda: "target.user_config" in changing.served.health()["refused"])
    reason = changing.served.health()["refused"]["target.user_config"]
    assert "adapter 'heavy' cannot be served" in reason
    assert "has rank 80, the limit is 64" in reason
    assert changing.models() == [MODEL, "pirate", "parrot"], "all is as it was"
    assert changing.text("parrot") == oracles["third"]

    changing.deploy(parrot="third")
    wait_until(lambda: changing.models() == [MODEL, "parrot"])
    answer = changing.post("pirate")
    assert answer.status_code == 404
    assert f"ask for '{MODEL}' or 'parrot'" in answer.json()["error"]["message"]
    assert changing.text("parrot") == oracles["third"]
    plain = generate(load_oracle(changing.served.target_folder), token_array(PROMPT), NUM_TOKENS)
    assert changing.text(MODEL) == plain
    assert "target.user_config" not in changing.served.health()["refused"]
    assert places("target", APPLICATION) == before, "no process was replaced"
