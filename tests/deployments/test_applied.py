"""`drafthouse apply`: which keys a server takes while it serves, and who is told."""

from typing import Any

import pytest

from cluster.config.file import load
from deployments.applied import live_document
from deployments.supervisor import announce, announced, short_lived_folder
from tests.conftest import Run
from tests.deployments.conftest import free_port
from tests.support.errors import config_error

FILE, POOL = "configs/tiny.yaml", "configs/pool.yaml"


def told(*settings: str, file: str = FILE) -> dict[str, Any]:
    """What each deployment is told, without those that are told nothing."""
    document = live_document(load(file).document, load(file, settings))
    for own, former in zip(document["applications"], load(file).document["applications"], strict=1):
        assert own["args"] == former["args"], "what a process was started with stays"
    return {
        each["name"]: each["user_config"]
        for application in document["applications"]
        for each in application["deployments"]
        if each["user_config"]
    }


def test_a_key_of_the_arguments_is_told_to_all_who_read_it():
    assert told("ingress.max_choices=2") == {"ingress": {"ingress": {"max_choices": 2}}}
    assert told("api.heartbeat_s=9.0") == {"ingress": {"api": {"heartbeat_s": 9.0}}}, (
        "a new section"
    )
    section = {"coordinator": {"max_draft_tokens": 3}}
    assert told("coordinator.max_draft_tokens=3") == dict.fromkeys(
        ("ingress", "coordinator", "target"), section
    )
    assert told() == {}, "what is as at the start is said by an empty user_config"


def test_options_of_a_drafter_are_told_to_the_process_that_it_is_in():
    options = {"drafters": {"suffix": {"options": {"min_ngram": 3}}}}
    assert told("drafters.suffix.options.min_ngram=3", file="configs/local.yaml") == {
        "target": options
    }
    found = told("drafters.ngram.max_nodes=7", file=POOL)
    assert found == {"drafter-ngram": {"max_nodes": 7}}


def test_a_section_of_a_user_config_that_is_empty_is_told_more():
    wanted = load(FILE, ["coordinator.max_draft_tokens=3"])
    entry = {"name": "target", "user_config": {"coordinator": None}}
    wanted.document["applications"][0]["deployments"] = [entry]
    document = live_document(load(FILE).document, wanted)
    target = document["applications"][0]["deployments"][0]
    assert target["user_config"] == {"coordinator": {"max_draft_tokens": 3}}


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ("target.engine.threads=3", "target.engine.threads"),
        ("http.port=8123", "http.port"),
        ("model_name=other", "model_name"),
    ],
)
def test_a_key_that_is_read_once_is_refused_by_its_name(setting: str, key: str):
    with config_error(f"{key}: what was served before is kept"):
        live_document(load(FILE).document, load(FILE, [setting]))


def test_a_key_that_is_no_more_in_the_file_is_refused():
    served = load(FILE, ["ingress.max_choices=2"])
    with config_error(r"ingress\.max_choices: what was served before is kept"):
        live_document(served.document, load(FILE))
    constant = "coordinator.draft_length.kind=constant"
    served = load(FILE, [constant, "coordinator.draft_length.num_tokens=2"])
    with config_error("a key that is left out now"):
        live_document(served.document, load(FILE, [constant]))


def test_a_server_is_found_by_its_port_as_long_as_it_runs(
    run: Run,
):
    port = free_port()
    with short_lived_folder() as folder:
        announce(folder, port, address="a", token=None, document={})
        assert (folder / "served.json").stat().st_mode & 0o077 == 0
        assert announced(port)["address"] == "a"
    said = run("apply", FILE, "--set", f"http.port={port}", status=2)
    assert f"no `drafthouse serve` of yours listens at port {port}" in said
