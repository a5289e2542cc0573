"""Two applications, and edits of them under streams: no stream is lost, and no target restarts.

The edits are applied as `serve deploy` and KubeRay apply them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from cluster.config.file import ServeFile
from cluster.config.live import COORDINATOR, INGRESS, READ_BY, TARGET, _told
from cluster.config.schema import Config
from cluster.core import token_array
from cluster.records import frozen
from tests.deployments.conftest import Served, arguments, deploy, places, wait_until
from tests.support.choices import by_day, by_night
from tests.support.deployments.api import MODEL
from tests.support.deployments.writers import Writers
from tests.support.engine.adapters import merged_oracle, write_adapter
from tests.support.engine.driver import generate

APPLICATION, POOL = "live", "live-pool"
PROMPT, NUM_ADAPTED = [9, 8, 7, 6, 5] * 8, 16
NUM_GRPC, NUM_HTTP, NUM_TOKENS = by_day(12, 28), 4, 24
OTHERS = (INGRESS, COORDINATOR, TARGET)

EDITS = yaml.safe_load(Path(__file__).with_name("live.yaml").read_text("utf-8"))


@frozen
class Live:
    """The applications, and the file that they were deployed from."""

    served: Served
    document: dict[str, Any]

    def tell(self, **user_configs: Any) -> None:
        """Deploy the file with these user_configs, by deployment."""
        for application in self.document["applications"]:
            is_own = application["name"] == APPLICATION
            named = {each["name"]: each for each in application.get("deployments", [])}
            for name, told in user_configs.items():
                if (name in OTHERS) == is_own:
                    deployment = name if is_own else f"drafter-{name}"
                    named[deployment] = {"name": deployment, "user_config": told}
            application["deployments"] = list(named.values())
        deploy(self.document)

    def refused(self) -> dict[str, str]:
        return self.served.health()["refused"]

    def served_names(self) -> list[str]:
        answer = httpx.get(f"{self.served.http}/v1/models", timeout=60)
        return [card["id"] for card in answer.json()["data"]]

    def drafters(self) -> dict[str, int]:
        return self.served.health()["drafters"]

    def pids(self) -> dict[str, list[int]]:
        """The processes of the target's application."""
        return {name: [each["pid"] for each in places(name, APPLICATION)] for name in OTHERS}

    def status_of(self, **body: Any) -> int:
        asked = {"prompt": "abc", "max_tokens": 2, **body}
        return self.served.api.post("/v1/completions", **asked).status_code

    def text(self, model: str) -> list[int]:
        """The greedy text of a model or an adapter."""
        body = {"model": model, "prompt": PROMPT, "max_tokens": NUM_ADAPTED, "temperature": 0}
        return list(
            self.served.api.complete(**body, ignore_eos=True, return_token_ids=True)["token_ids"]
        )


@pytest.fixture(scope="module")
def live(served: Served, long_folder: Path, long_draft_folder: Path) -> Iterator[Live]:
    from ray import serve

    from deployments.app import begin

    settings = arguments(long_folder, long_draft_folder)
    own = {"kind": "ngram_cache", "placement": {"num_cpus": 0.1}}
    settings |= {
        "drafters": {
            "suffix": {"kind": "suffix", "placement": {"with": "target"}},
            "ngram": {"placement": {"application": POOL}},
        },
    }
    settings["ingress"]["replicas"] = 1
    # The processes of the test find these packages by the folder that it runs in.
    environment = {"env_vars": {"PYTHONPATH": str(Path(__file__).parents[2])}}
    document = {
        "applications": [
            {
                "name": APPLICATION,
                "route_prefix": f"/{APPLICATION}",
                "import_path": "deployments.app:build",
                "args": settings,
                "runtime_env": environment,
            },
            {
                "name": POOL,
                "route_prefix": None,
                "import_path": "deployments.app:build_pool",
                "args": {"drafters": {"ngram": own, "more": own}},
                "runtime_env": environment,
            },
        ]
    }
    http, grpc = (f"127.0.0.1:{settings[face]['port']}" for face in ("http", "grpc"))
    found = Live(replace(served, http=f"http://{http}", grpc=grpc), document)
    # As `drafthouse serve` begins; all that follows, the first change too, replaces no process.
    begin(ServeFile(Path("live.yaml"), document, Config(), {}), is_own=True)
    wait_until(lambda: is_whole(found))
    yield found
    serve.delete(APPLICATION)
    serve.delete(POOL)


def is_whole(live: Live) -> bool:
    try:
        return live.drafters() == {"suffix": 1, "ngram": 1}
    except (httpx.HTTPError, ValueError, KeyError):
        return False


@contextmanager
def undisturbed(live: Live) -> Iterator[Writers]:
    """Texts are written, of which no edit of the block breaks one or replaces the target's
    processes; it begins when each writer has ended a text."""
    before = live.pids()
    writers = Writers([live.served.grpc], [live.served.http], NUM_GRPC, NUM_HTTP, NUM_TOKENS)
    with writers.running():
        writers.wait()
        yield writers
        writers.wait()
    assert not writers.wrong
    assert not writers.errors
    assert live.pids() == before
    assert live.served.metric("drafthouse_failovers_total") == 0


@by_night
def test_streams_survive_every_edit_and_a_wrong_one_leaves_all_as_it_was(
    live: Live, long_folder: Path, tmp_path: Path
):
    assert {known for _, (known, _) in _told(EDITS)} == READ_BY.keys() - {"adapters"}
    adapter = write_adapter(long_folder, tmp_path / "a")
    told = EDITS | {"adapters": {"pirate": str(adapter)}}
    with undisturbed(live) as writers:
        live.tell(**dict.fromkeys(OTHERS, told))
        wait_until(lambda: set(live.served_names()) == {MODEL, "alias", "pirate"})
        wait_until(lambda: live.drafters() == {"suffix": 1, "ngram": 1, "more": 1})
        writers.wait()
        assert live.refused() == {}
        assert live.status_of(n=2) == 200
        assert live.status_of(n=3) == 400, "ingress.max_choices"
        pirate = merged_oracle(long_folder, adapter)
        assert live.text("pirate") == generate(pirate, token_array(PROMPT), NUM_ADAPTED)
        assert live.status_of(speculation={"latency_class": "rush"}) == 200

        wrong = {**told, "coordinator": {"budget": "none"}}
        live.tell(**dict.fromkeys(OTHERS, wrong))
        wait_until(lambda: len(live.refused()) == 3)
        assert live.refused() == {
            f"{name}.user_config": "user_config.coordinator.budget: 'none' is none of: adaptive, "
            "fixed"
            for name in OTHERS
        }
        assert live.status_of(n=3) == 400, "what was told before still holds"
        assert live.status_of(speculation={"latency_class": "rush"}) == 200
        writers.wait()

        live.tell(ingress={}, coordinator={}, target={})
        wait_until(lambda: live.refused() == {} and live.drafters() == {"suffix": 1, "ngram": 1})
        assert live.status_of(n=3) == 200


@by_night
def test_edits_of_the_pool_touch_no_target(live: Live):
    drafting = places("drafter-ngram", POOL)[0]["pid"]
    with undisturbed(live) as writers:
        live.tell(ngram={"kind": "ngram_cash"})
        wait_until(lambda: "drafter-ngram.user_config" in live.refused())
        assert "did you mean ngram_cache?" in live.refused()["drafter-ngram.user_config"]
        wait_until(lambda: is_whole(live))
        live.tell(ngram={"kind": "prompt_lookup", "max_nodes": 8})
        wait_until(lambda: live.refused() == {} and is_whole(live))
        assert [each["pid"] for each in places("drafter-ngram", POOL)] == [drafting]
        writers.wait()

        (pool,) = (each for each in live.document["applications"] if each["name"] == POOL)
        del pool["args"]["drafters"]["more"]
        deploy(live.document)
        wait_until(lambda: is_replaced(drafting) and is_whole(live))


def is_replaced(pid: int) -> bool:
    """True if another process drafts, and no more that one."""
    from ray import serve

    if serve.status().applications[POOL].status != "RUNNING":
        return False
    return pid not in [each["pid"] for each in places("drafter-ngram", POOL)]
