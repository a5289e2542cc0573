"""Processes are killed while they serve a stream: the text is the one it would have been."""

import contextlib
import os
import signal
from collections.abc import Callable

import pytest
from ray.exceptions import RayActorError
from ray.serve.exceptions import DeploymentUnavailableError

from tests.deployments.conftest import Served, wait_until
from tests.support.choices import by_day

ALL = ("drafter-lookup", "drafter-lm", "drafter-ngram")

BODY = {
    "prompt": "abc abc abc abc",
    "max_tokens": 600,
    "temperature": 0.7,
    "seed": 12,
    "ignore_eos": True,
}


def streamed(served: Served, disturb: Callable[[], None], after: int = 20) -> str:
    """The text of one stream; `disturb` is called once so many chunks have come."""
    texts = []
    for chunk in served.api.read("/v1/completions", **BODY):
        texts.append(chunk["choices"][0]["text"])
        if len(texts) == after:
            disturb()
    return "".join(texts)


@pytest.fixture(scope="module")
def undisturbed(served: Served) -> str:
    return streamed(served, lambda: None)


def kill_while_streaming(served: Served, *deployments: str) -> str:
    """The text of a stream in whose middle the deployments' processes are killed; returns once
    others have taken their places, so that the next test finds them."""
    killed = [pid for name in deployments for pid in served.pids(name)]

    def kill() -> None:
        for pid in killed:
            os.kill(pid, signal.SIGKILL)

    def back() -> bool:
        with contextlib.suppress(DeploymentUnavailableError, RayActorError):
            found = [pid for name in deployments for pid in served.pids(name)]
            return len(found) == len(killed) and not set(found) & set(killed)
        return False

    text = streamed(served, kill)
    wait_until(back)
    return text


def accepted(served: Served) -> float:
    """Draft tokens accepted so far, whoever drafted them: who is in time is a matter of chance."""
    return served.metric("drafthouse_accepted_draft_tokens_total")


@pytest.mark.parametrize(
    "drafters",
    by_day([ALL[:1]], [ALL[:1], ALL]),
)
def test_killed_drafters_cost_only_speed_and_come_back(
    served: Served, undisturbed: str, drafters: tuple[str, ...]
):
    assert kill_while_streaming(served, *drafters) == undisturbed
    wait_until(lambda: set(served.health()["drafters"].values()) == {1})
    before = accepted(served)

    def speculates() -> bool:
        streamed(served, lambda: None)
        return accepted(served) > before

    wait_until(speculates)


@pytest.mark.parametrize("deployment", ["target", "coordinator"])
def test_a_killed_worker_costs_a_pause_and_not_the_text(
    served: Served, undisturbed: str, deployment: str
):
    assert kill_while_streaming(served, deployment) == undisturbed
    wait_until(lambda: served.health()["status"] == "ok")
    wait_until(lambda: set(served.health()["drafters"].values()) == {1})
