"""What `drafthouse serve` makes of the keys of a Ray Serve config file."""

import contextlib
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from cluster.config.file import ServeFile, load
from cluster.config.schema import Config
from deployments import app, serve_command
from deployments.app import begin, build, logging_options, with_options
from deployments.serve_command import _Signals, _Stop, change, refuse_unserved_keys, state_of
from tests.support.errors import config_error


def file(application: dict[str, Any], **document: Any) -> ServeFile:
    return ServeFile(Path("x.yaml"), {**document, "applications": [application]}, Config(), {})


@pytest.mark.parametrize("key", ["runtime_env", "autoscaling_policy"])
def test_a_key_that_would_have_no_effect_is_refused(key: str):
    refuse_unserved_keys(file({key: {}}))
    with config_error(f"x.yaml: applications.0..{key}: .*serve deploy"):
        refuse_unserved_keys(file({key: {"a": 1}}))


def test_logging_is_as_the_file_wants_it():
    application = {"logging_config": {"log_level": "DEBUG"}}
    wanted = file(application, logging_config={"log_level": "WARNING", "encoding": "JSON"})
    assert not logging_options(file({}), {}).enable_access_log
    assert logging_options(wanted, {}).log_level == "WARNING"
    assert logging_options(wanted, application).log_level == "DEBUG"
    assert logging_options(wanted, application).encoding == "JSON"
    with config_error("logging_config"):
        logging_options(file({}, logging_config={"log_level": "LOUD"}), {})


def test_on_a_ray_that_is_joined_each_process_is_replaced(monkeypatch: pytest.MonkeyPatch):
    """What runs there may be of a former release, though the file is the same."""
    found: list[set[str | None]] = []

    class Client:
        def deploy_applications(self, built: list[Any], **_: Any) -> None:
            found.append(
                {each.version for application in built for each in application.deployments}
            )

    monkeypatch.setattr(app, "_get_global_client", Client)
    # Asked without a Ray, it would join any that runs on this machine, or start one.
    context = SimpleNamespace(runtime_env={})
    monkeypatch.setattr(app.ray, "get_runtime_context", lambda: context)
    served = load("configs/local.yaml")
    for is_own in (True, True, False):
        begin(served, is_own=is_own)
    own, again, joined = found
    assert own == again
    assert None not in own
    assert joined == {None}, "Serve draws a version for each that has none"


def test_what_was_refused_before_a_change_is_none_of_its_own(monkeypatch: pytest.MonkeyPatch):
    for name in ("ray", "_get_global_client", "_wait_until_running", "time"):
        monkeypatch.setattr(serve_command, name, MagicMock())
    refused = {"lm": "no tokenizer", "target.user_config": "no such key"}
    monkeypatch.setattr(serve_command, "_health_of", lambda _: {"refused": refused})
    served = load("configs/local.yaml").document
    assert change("somewhere", served) == ["target.user_config: no such key"]


def test_a_server_that_is_slow_to_say_how_it_is_is_asked_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(serve_command, "_health_of", MagicMock(side_effect=TimeoutError))
    assert state_of("x") == {"status": "nothing (TimeoutError)"}


@contextlib.contextmanager
def former_handlers() -> Iterator[None]:
    """What handles signals after the block is what did before it."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
    former = [signal.getsignal(number) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, former, strict=True):
            signal.signal(number, handler)


def test_a_signal_in_a_finaliser_is_remembered_and_nothing_is_said(
    monkeypatch: pytest.MonkeyPatch,
):
    class Dying:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)

    def watch(signals: _Signals) -> None:
        with signals.interrupt():
            Dying()
            signals.check()

    said = []
    monkeypatch.setattr(sys, "unraisablehook", said.append)
    with former_handlers(), pytest.raises(_Stop):
        watch(_Signals())
    assert said == []


def test_a_stop_that_is_swallowed_is_raised_again():
    def swallow() -> None:
        with contextlib.suppress(_Stop):
            signal.raise_signal(signal.SIGINT)
        time.sleep(30.0)

    with former_handlers(), pytest.raises(_Stop), _Signals().interrupt():
        swallow()


def test_a_signal_that_comes_twice_does_not_interrupt_the_end():
    """Where a whole group is signalled, a process hears it itself and from the one above it."""
    signals, ends = _Signals(), []
    with former_handlers():
        try:
            with signals.interrupt():
                signal.raise_signal(signal.SIGTERM)
        except _Stop:
            signal.raise_signal(signal.SIGTERM)
            ends.append("in order")
    assert ends == ["in order"]
    with pytest.raises(_Stop):
        signals.check()


ARGUMENTS = {"target": {"engine": {"model": "m"}}}


def options_of_coordinator(**given: Any) -> Any:
    """Return what Serve is told of the coordinator."""
    coordinator = build(ARGUMENTS)._bound_deployment.init_args[1]
    return with_options(coordinator._bound_deployment, given)._deployment_config


def test_each_deployment_has_what_the_file_says_of_it():
    assert options_of_coordinator().num_replicas == 1
    assert options_of_coordinator(num_replicas=3).num_replicas == 3
    assert options_of_coordinator(max_surge_percent=100).max_surge_percent == 100
    scaled = options_of_coordinator(autoscaling_config={"min_replicas": 2, "max_replicas": 4})
    assert scaled.autoscaling_config.max_replicas == 4


@pytest.mark.parametrize(
    "given",
    [
        {"max_surge_percent": 101},
        {"autoscaling_config": {"min_replicas": 3, "max_replicas": 2}},
        {"autoscaling_config": {"max_replicas": 2}, "num_replicas": 2},
        {"num_replicas": 0},
    ],
)
def test_what_serve_does_not_take_is_named_with_its_deployment(given: Mapping[str, Any]):
    with config_error(r"deployments\[coordinator\]: Ray Serve does not take"):
        options_of_coordinator(**given)
