"""Workers started by hand as processes of their own, decoding through a coordinator over gRPC."""

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from cluster.config.pem import ROLES, DataPlaneConfig, PartsTlsConfig
from cluster.core import FinishReason, Request, SamplingParams, TokenEvent, token_array
from cluster.errors import WorkerError
from cluster.lead import main as lead_main
from cluster.rpc.channel import connect_coordinator
from cluster.rpc.link import Link
from cluster.rpc.messages import EventFrame, SubmitFrame
from cluster.rpc.trust import trust_of
from cluster.worker.cli import main as worker_main
from tests.conftest import python, serve_file
from tests.support.choices import by_night
from tests.support.local_models import PROMPTS, hf_greedy
from tests.support.rpc.certificates import Authority
from tests.support.rpc.servers import SECRET
from tests.support.worker.rounds import until_stop

READY_TIMEOUT_S = 180.0


@asynccontextmanager
async def process(*arguments: str) -> AsyncIterator[str]:
    """Run `python -m ...`; gives the address of its ready line, checks that it ends in order."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", *arguments, stdout=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(READY_TIMEOUT_S):
            line = (await child.stdout.readline()).decode()
        assert line.startswith("drafthouse "), line
        yield line.rsplit(" ", 1)[1].strip()
        child.send_signal(signal.SIGTERM)
        async with asyncio.timeout(30):
            assert await child.wait() == 0
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


def niceness_of(module: str, config: str) -> int:
    """That of the process of this module that was given this file."""
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended meanwhile
            if {module, config} <= {*place.read_text().split("\0")}:
                return os.getpriority(os.PRIO_PROCESS, int(place.parent.name))
    raise AssertionError(f"no process of {module}")


OWN = {"num_cpus": 0.5}


def configured(
    folder: Path,
    target: Path,
    draft: Path,
    tensor_parallel: int = 2,
    placement: Any = OWN,
    **sections: Any,
) -> str:
    """A file.  placement: of the draft model; the look-up is always in the pool."""
    engine = {"dtype": "float32", "device": "cpu", "num_pages": 128, "max_context_len": 256}
    own = {"model": str(target), "tensor_parallel": tensor_parallel, "threads": 1}
    arguments = {
        "target": {"engine": {**engine, **own}},
        "drafters": {
            "lm": {
                "kind": "lm",
                "placement": placement,
                "options": {"engine": {**engine, "model": str(draft)}},
            },
            "lookup": {"kind": "prompt_lookup", "placement": OWN},
        },
        **sections,
    }
    return str(serve_file(folder, arguments))


async def decode(
    link: Link[SubmitFrame, EventFrame], requests: list[Request]
) -> dict[str, list[TokenEvent]]:
    await link.send(SubmitFrame(tuple(requests)))
    events: dict[str, list[TokenEvent]] = {request.id: [] for request in requests}
    unfinished = len(requests)
    async for frame in link:
        for event in frame.events:
            events[event.request_id].append(event)
            unfinished -= event.finish_reason is not None
        if unfinished == 0:
            break
    return events


def closed(folder: Path) -> DataPlaneConfig:
    """Keys, and certificates by role."""
    (folder / "secret").write_text(SECRET)
    authority = Authority.new()
    for role in ROLES:
        authority.write(folder / role, f"{role}.drafthouse")
    named = [str(folder / "{role}" / f"{name}.pem") for name in ("cert", "key", "ca")]
    return DataPlaneConfig(str(folder / "secret"), PartsTlsConfig(*named))


_LM_ACCEPTED = 'drafthouse_accepted_draft_tokens_total{drafter="lm"'


async def test_hand_started_workers_decode_the_targets_text(
    llama_folder: Path, draft_folder: Path, tmp_path: Path
):
    """A target of two ranks with a model inside, a look-up in the pool, keys and certificates."""
    doors = closed(tmp_path)
    config = configured(
        tmp_path,
        llama_folder,
        draft_folder,
        placement={"with": "target"},
        data_plane=dataclasses.asdict(doors),
        # For so small a target no draft may ever pay; here they are to be verified all the same.
        coordinator={"budget": "fixed", "nice": 5},
    )
    async with AsyncExitStack() as stack:
        target, lookup = await asyncio.gather(
            stack.enter_async_context(process("cluster.worker", "target", config)),
            stack.enter_async_context(process("cluster.worker", "draft", config, "lookup")),
        )
        leading = process(
            "cluster.lead", config, "--target", target, "--drafter", f"lookup={lookup}"
        )
        coordinator = await stack.enter_async_context(leading)
        assert niceness_of("cluster.lead", config) == min(os.nice(0) + 5, 19)
        for address in (target, lookup, coordinator):
            with pytest.raises(WorkerError, match=r"data_plane\.tls"):
                await connect_coordinator(address)
        _, link = await connect_coordinator(coordinator, trust=trust_of(doors, "ingress"))
        params = SamplingParams(temperature=0.0, max_tokens=40, stop_token_ids=(0, 1, 2))
        expected = [until_stop(text, params) for text in hf_greedy(llama_folder, PROMPTS, 40)]
        metrics = ""
        # So small a model may be done with a text before the drafter has read it, above all where
        # other tests take the cores.
        for turn in range(60):
            requests = [
                Request(f"r{turn}-{i}", token_array(p), params) for i, p in enumerate(PROMPTS)
            ]
            events = await decode(link, requests)
            texts = [[t for e in events[r.id] for t in e.token_ids.tolist()] for r in requests]
            assert texts == expected
            assert all(events[r.id][-1].finish_reason is not FinishReason.ERROR for r in requests)
            metrics = (await link.metrics()).decode()
            if _LM_ACCEPTED in metrics:
                break
        await link.close()
    assert _LM_ACCEPTED in metrics


@by_night
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_target_ends_with_a_rank_that_is_lost(
    llama_folder: Path, tmp_path: Path, number: signal.Signals
):
    config = configured(tmp_path, llama_folder, tmp_path)
    command = [sys.executable, "-m", "cluster.worker", "target", config]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as target:
        assert target.stdout.readline().startswith("drafthouse target ready")
        (rank,) = psutil.Process(target.pid).children()
        rank.send_signal(number)
        assert target.wait(READY_TIMEOUT_S) == 1
        assert "rank 1 of the target has" in target.stderr.read()
    psutil.wait_procs([rank], 10.0)
    assert not rank.is_running()


@by_night
def test_a_target_tells_why_a_rank_has_ended(llama_folder: Path, tmp_path: Path):
    """Here its cores are none of the machine's; rank 0 is of the same mind."""
    config = configured(tmp_path, llama_folder, tmp_path)
    cores = "target.placement.cores=[4095]"
    done = python("-m", "cluster.worker", "target", config, "--set", cores)
    assert done.returncode == 2
    assert "cores: 4095 is not one of the cores" in done.stderr


@pytest.mark.parametrize(
    ("main", "arguments", "message"),
    [
        (worker_main, ["target", "absent.yaml"], "absent.yaml: cannot be read"),
        (worker_main, ["draft", "{config}", "absent"], "no drafter is named 'absent'"),
        (
            worker_main,
            ["draft", "{config}", "lm", "--set", "drafters.lm.placement={{with: target}}"],
            "drafter 'lm' runs inside the target",
        ),
        (
            worker_main,
            ["target", "{config}", "--set", "target.engine.dtyp=x"],
            "did you mean dtype",
        ),
        (
            worker_main,
            ["draft", "{config}", "lookup", "--host", "0.0.0.0"],
            "data_plane.secret_file: others reach 0.0.0.0",
        ),
        (
            lead_main,
            ["{config}", "--target", "x:1", "--set", "data_plane.secret_file=absent"],
            "data_plane.secret_file: absent cannot be read",
        ),
        (
            lead_main,
            ["{config}", "--target", "x:1", "--set", "data_plane.tls.cert_file=x"],
            "data_plane.tls.key_file: empty",
        ),
        (lead_main, ["{config}", "--target", "x:1", "--drafter", "lm"], "NAME=HOST:PORT"),
        (lead_main, ["{config}", "--target", "x:1", "--drafter", "no=x:2"], "is named 'no'"),
    ],
)
def test_a_wrong_command_ends_with_code_2_and_says_why(
    main: Callable[[list[str]], int],
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    config = configured(tmp_path, tmp_path / "model", tmp_path / "draft", tensor_parallel=1)
    assert main([part.format(config=config) for part in arguments]) == 2
    assert message in capsys.readouterr().err
