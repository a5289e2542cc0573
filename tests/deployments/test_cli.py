"""The command line as a user meets it: a process, its output, its exit code, what it leaves."""

import importlib.metadata
import json
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import yaml

from cluster.client import Client, GenerateRequest, SamplingOptions
from cluster.rpc import conversations as talk
from cluster.spec.native import trees
from deployments.cli import main
from deployments.placement import why_not
from tests.conftest import Run, python
from tests.deployments.conftest import DEADLINE_S
from tests.support.choices import by_day, by_night
from tests.support.deployments.api import MODEL, Api, Json
from tests.support.deployments.command import Command, on_free_ports, ports, running, write_config
from tests.support.deployments.listening import listening

NAMED = ["configs/local.yaml", "--set=target.engine.model=a/b"]


@pytest.fixture
def config_file(long_folder: Path, tmp_path: Path) -> Path:
    return write_config(long_folder, tmp_path)


@pytest.fixture
def command(config_file: Path, tmp_path: Path) -> Iterator[Command]:
    command = Command(tmp_path, str(config_file))
    yield command
    command.end()


@pytest.fixture(scope="module")
def shared_file(long_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(long_folder, tmp_path_factory.mktemp("shared"))


@pytest.fixture(scope="module")
def shared(shared_file: Path) -> Iterator[Command]:
    """One server for the tests that leave it as it is, the last of which stops it."""
    command = Command(shared_file.parent, str(shared_file))
    command.wait_for("Drafthouse is ready:")
    yield command
    command.end()


def test_serve_says_one_line_and_what_to_type_next(shared: Command, shared_file: Path):
    http, own_grpc, dashboard = ports(shared_file)
    assert shared.stdout.read_text().partition("; target on cpu: attention ")[0] == (
        f"Drafthouse is ready: http://127.0.0.1:{http}/v1 (OpenAI HTTP), "
        f"127.0.0.1:{own_grpc} (gRPC), http://127.0.0.1:{dashboard} (dashboard)"
    )
    shared.wait_for(" try http")
    lines = shared.stderr.read_text().splitlines()
    (request,) = (line for line in lines if line.startswith("  curl "))
    question = lines[lines.index(request) + 1]
    program, url, _, header, _, body = shlex.split(request)
    name, _, value = header.partition(": ")
    assert program == "curl"
    answer = httpx.post(url, content=body, headers={name: value}, timeout=DEADLINE_S)
    assert answer.status_code == 200, answer.text
    arguments = shlex.split(question, comments=True)
    assert arguments[0] == "drafthouse"
    assert main([*arguments[1:], "--max-tokens", "8"]) == 0
    shared.wait_for(": request id=")


def test_a_file_that_is_applied_changes_the_server_and_replaces_no_process(
    shared: Command, shared_file: Path, tmp_path: Path
):
    http, _, _ = ports(shared_file)
    before = replicas(shared)
    assert before

    def applied(setting: str) -> subprocess.CompletedProcess[str]:
        document = yaml.safe_load(shared_file.read_text())
        section, _, key = setting.partition(".")
        document["applications"][0]["args"][section] = {key: 1}
        changed = tmp_path / "changed.yaml"
        changed.write_text(yaml.safe_dump(document))
        return python("-m", "deployments.cli", "apply", changed, RAY_AUTH_MODE="token")

    def status() -> int:
        api = Api(f"http://127.0.0.1:{http}")
        return api.post("/v1/completions", prompt="x", max_tokens=1, n=2).status_code

    assert status() == 200
    found = applied("ingress.max_choices")
    assert (found.returncode, found.stdout) == (
        0,
        f"{tmp_path / 'changed.yaml'} is applied, and nothing restarts\n",
    ), found.stderr
    assert status() == 400
    found = applied("ingress.shutdown_grace_s")
    assert found.returncode == 2
    assert "ingress.shutdown_grace_s: what was served before is kept" in found.stderr
    assert replicas(shared) == before


def replicas(command: Command) -> set[int]:
    """The processes of the deployments."""
    titles = {pid: Path(f"/proc/{pid}/cmdline") for pid in command.family()}
    return {pid for pid, file in titles.items() if "ServeReplica" in file.read_text("utf-8")}


def test_what_serve_starts_is_reached_from_this_machine_and_with_a_token_only(
    shared: Command, shared_file: Path
):
    _, own_grpc, dashboard_port = ports(shared_file)
    open_sockets = [one for one in listening(shared.family()) if not one.is_on_loopback]
    # Ray gives every replica of Serve a server on all interfaces, which asks for Ray's token.
    assert all(one.command.startswith("ray::ServeReplica") for one in open_sockets), open_sockets
    assert len({one.pid for one in open_sockets}) == len(open_sockets) > 0
    for one in open_sockets:
        error = refused(one.port, "/ray.serve.ASGIService/HandleRequest")
        assert error.code() is grpc.StatusCode.UNAUTHENTICATED
    dashboard = f"http://127.0.0.1:{dashboard_port}/api/jobs/"
    assert httpx.get(dashboard, timeout=60).status_code == 401
    assert httpx.post(dashboard, json={"entrypoint": "true"}, timeout=60).status_code == 401
    told = re.search(r"asks for a token; it is in (\S+)", shared.stderr.read_text())
    file = Path(told.group(1))
    assert file.stat().st_mode & 0o077 == 0
    headers = {"Authorization": f"Bearer {file.read_text()}"}
    assert httpx.get(dashboard, headers=headers, timeout=60).status_code == 200
    with Client(f"127.0.0.1:{own_grpc}") as client:
        sampling = SamplingOptions(max_tokens=4)
        request = GenerateRequest(model=MODEL, text="x", sampling=sampling)
        assert client.complete(request).usage.completion_tokens > 0


def test_no_part_says_what_it_is_to_who_has_no_token(shared: Command):
    refusals = [
        refused(one.port, f"/{service.name}/Describe").details()
        for one in listening(shared.family())
        if "ServeReplica" in one.command
        for service in (talk.TARGET, talk.DRAFTER, talk.COORDINATOR)
    ]
    for key in ("target", "coordinator"):
        assert sum(f"drafthouse-token came with the call; {key} asks" in one for one in refusals)


def refused(port: int, method: str) -> Any:
    """The error of a call without a token."""
    with (
        grpc.insecure_channel(f"127.0.0.1:{port}") as channel,
        pytest.raises(grpc.RpcError) as raised,
    ):
        channel.unary_unary(method)(b"", timeout=60)
    return raised.value


def test_a_server_that_was_stopped_leaves_nothing_behind_and_none_of_rays_own_words(
    shared: Command, shared_file: Path
):
    shared.wait_for("with drafts and without")
    shared.check_end("the first")
    (line,) = shared.stdout.read_text().splitlines()
    assert line.startswith("Drafthouse is ready: ")
    assert shared.said_by_others() == []
    assert all(why_not("127.0.0.1", port) is None for port in ports(shared_file))


@pytest.mark.parametrize("phase", ["loading: ", *by_day((), ("starting Ray", "starting Serve"))])
def test_an_interrupt_during_start_up_ends_it_at_once_and_leaves_nothing_behind(
    command: Command, phase: str
):
    command.wait_for(phase)
    family, folder = command.family(), command.temporary_folder()
    command.process.send_signal(signal.SIGINT)
    assert command.process.wait(5.0) == 0
    assert not [pid for pid in family if running(pid)]
    assert not folder.exists()
    assert command.stdout.read_text() == ""


@by_night
def test_without_its_model_the_demonstration_is_the_embedded_one(tmp_path: Path):
    """All that it logs is JSON, until all its processes are signalled and after it."""
    sections = on_free_ports()
    words = as_options(sections)
    command = Command(tmp_path, "--log-format=json", *words, **without_a_model(tmp_path))
    try:
        command.wait_for("Drafthouse is ready:")
        lines = [json.loads(line) for line in command.stderr.read_text().splitlines()]
        (told,) = (line for line in lines if "cannot be" in line["message"])
        assert told["logger"] == "drafthouse"
        assert told["message"] == (
            "smollm2-135m-instruct cannot be had here, so configs/tiny.yaml is served "
            "instead; `drafthouse fetch smollm2-135m-instruct` says why"
        )
        (ready,) = command.stdout.read_text().splitlines()
        assert json.loads(ready)["message"].startswith("Drafthouse is ready:")
        url = f"http://127.0.0.1:{sections['http']['port']}/v1"
        models = httpx.get(f"{url}/models", timeout=60)
        assert models.json()["data"][0]["id"] == "drafthouse-demo"
        body = {"model": "drafthouse-demo", "prompt": "x", "max_tokens": 4, "stream": True}
        httpx.post(f"{url}/completions", json=body, headers={"X-Request-Id": "mine"}, timeout=60)
        command.wait_for('"request_id": "mine"')
        command.check_end("every process")
        lines = [json.loads(line) for line in command.stderr.read_text().splitlines()]
        (line,) = (line for line in lines if line.get("request_id") == "mine")
        assert line["logger"] == "deployments.ingress.tracing"
        assert (line["id"], line["output_tokens"]) == ("cmpl-mine", 4)
    finally:
        command.end()


@pytest.mark.parametrize("named", by_day(NAMED[:1], NAMED))
def test_a_model_that_was_named_is_not_replaced(tmp_path: Path, named: str):
    command = Command(tmp_path, named, *as_options(on_free_ports()), **without_a_model(tmp_path))
    assert command.process.wait(DEADLINE_S) == 2
    *_, last = command.stderr.read_text().splitlines()
    assert last.startswith("drafthouse: configs/local.yaml: target.engine.model: ")
    assert ("PIP_FIND_LINKS=" if named.startswith("configs") else "HF_ENDPOINT") in last


def as_options(sections: Json) -> list[str]:
    return [f"--set={face}={section}" for face, section in sections.items()]


def without_a_model(folder: Path) -> dict[str, str]:
    """An environment with an empty cache and no network to fill it from."""
    return {
        "DRAFTHOUSE_MODELS": str(folder / "models"),
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": "",
        "PIP_CONFIG_FILE": "/dev/null",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_CACHE": str(folder / "hub"),
    }


def test_check_says_what_is_shared_and_what_is_refused(
    config_file: Path, run: Run, monkeypatch: pytest.MonkeyPatch
):
    plan = run("check", config_file, "--set", "coordinator.replicas=2")
    assert "the 2 coordinators share 64 running and 256 queued requests" in plan
    monkeypatch.setattr(trees, "is_available", lambda: False)
    assert "drafter lookup is refused: drafts need native code" in run("check", config_file)


def test_the_version_is_the_installed_one(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"drafthouse {importlib.metadata.version('drafthouse')}\n"


def test_checking_needs_neither_ray_nor_torch():
    program = (
        "import sys; from deployments.cli import main; "
        "models = ('target.engine', 'drafters.lm.options.engine'); "
        "words = (('--set', f'{each}.model=nobody/known') for each in models); "
        "main(['check', 'configs/two-node.yaml', *(word for pair in words for word in pair)]); "
        "sys.exit(len({'torch', 'ray'} & set(sys.modules)))"
    )
    found = python("-c", program)
    assert found.returncode == 0, found.stderr
