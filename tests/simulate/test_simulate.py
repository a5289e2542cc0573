"""A simulated fleet loses no token, repeats itself, and is what its steps would be."""

import math
import re
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.replay.record import save
from benchmarks.replay.synthetic import texts
from cluster.errors import ConfigError
from cluster.simulate.fleet import Fleet, FleetOutcome, head, rows, verdict
from cluster.simulate.replay import Adaptive, DecodeTimes, Simulation
from cluster.simulate.settings import Scene, Workload, read
from deployments.cli import main
from tests.support.choices import by_day

REPOSITORY = Path(__file__).resolve().parents[2]
_PROGRAM = """
import sys
from deployments.cli import main
status = main(["simulate", sys.argv[1]])
print(*({"ray", "torch"} & set(sys.modules)), file=sys.stderr)
sys.exit(status)
"""

SERVED = {
    "applications": [
        {
            "name": "drafthouse",
            "import_path": "deployments.app:build",
            "args": {
                "target": {"engine": {"model": "none", "max_running_sequences": 16}},
                "drafters": {"lm": {"kind": "lm", "placement": {"num_cpus": 1}}},
                "coordinator": {"max_running_sequences": 256, "max_queued_requests": 8},
            },
        }
    ]
}
SIMULATED = {
    "config": "serve.yaml",
    "recording": "texts.npz",
    "target": {"replicas": 4, "rows": [1, 64, 256, 512], "times_ms": [10, 10.1, 10.8, 20]},
    "drafter": {"price_per_hour": 0.1},
    "load": {"streams": 32},
    "ratios": [0, 1],
    "seconds": 8,
}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recording and a configuration."""
    folder = tmp_path_factory.mktemp("simulate")
    save(folder / "texts.npz", texts(16, 60, agreement=0.8), {})
    served = yaml.safe_dump(SERVED)
    (folder / "serve.yaml").write_text(served, "utf-8")
    (folder / "other.yaml").write_text(served.replace("lm:", "suffix:"), "utf-8")
    return folder


def written(folder: Path, **changes: Any) -> Path:
    """Write the file of a fleet; a change is merged into its section."""
    document = dict(SIMULATED)
    for key, value in changes.items():
        former = document.get(key)
        is_section = isinstance(value, dict) and isinstance(former, dict)
        document[key] = {**former, **value} if is_section else value
    path = folder / "simulate.yaml"
    path.write_text(yaml.safe_dump(document), "utf-8")
    return path


@pytest.fixture(scope="session")
def scene(folder: Path) -> Scene:
    return read(written(folder))


@pytest.fixture(scope="session")
def times(scene: Scene) -> DecodeTimes:
    return DecodeTimes(scene, scene.pool(1.0))


def run(
    scene: Scene, times: DecodeTimes, load: Workload, num_targets: int = 4, seed: int = 0
) -> FleetOutcome:
    target = replace(scene.settings.target, replicas=num_targets)
    settings = replace(scene.settings, target=target, load=load, seconds=20.0, seed=seed)
    return Fleet(replace(scene, settings=settings), times).run()


@pytest.mark.parametrize(
    "load", [Workload(streams=32), Workload(requests_per_s=20.0), Workload(requests_per_s=500.0)]
)
def test_every_text_that_was_asked_for_is_refused_or_open_or_over(
    scene: Scene, times: DecodeTimes, load: Workload
):
    outcome = run(scene, times, load)
    late = [each for each in outcome.ended if each.ended_at >= outcome.from_s]
    # Of the texts that run at either end of the time that counts, only a part is emitted in it.
    num_cut = 2 * 4 * 16 * max(len(text.token_ids) for text in scene.texts)
    emitted = outcome.tokens_per_s * 15.0
    assert emitted == pytest.approx(sum(each.num_tokens for each in late), abs=num_cut)
    num_open = outcome.num_asked - outcome.num_refused - len(outcome.ended)
    assert 0 <= num_open <= 4 * 16 + 8
    assert (outcome.num_refused > 0) == (load.requests_per_s == 500.0)
    assert all(each.asked_at < each.first_at < each.ended_at for each in outcome.ended)


def test_a_seed_repeats_a_run_and_another_one_does_not(scene: Scene, times: DecodeTimes):
    load = Workload(requests_per_s=20.0)
    assert run(scene, times, load) == run(scene, times, load)
    assert run(scene, times, load, seed=1) != run(scene, times, load)


def test_texts_are_as_fast_as_step_by_step(scene: Scene, times: DecodeTimes):
    """The bound is what the aggregation may cost; prompts that are read together cost most."""
    for size in by_day((4,), (1, 4, 16)):
        simulation = Simulation(scene.texts, scene.machine, scene.pool(1.0), size)
        stepwise = simulation.run(Adaptive(scene.machine, scene.pool(1.0)), 8.0)
        found = run(scene, times, Workload(streams=size), num_targets=1).tokens_per_s
        assert found == pytest.approx(stepwise.tokens / stepwise.time_s, rel=0.08), size


def test_more_targets_and_more_drafters_are_never_slower(folder: Path):
    scene = read(written(folder, ratios=[0, 0.25, 1, 4], load={"streams": 64}))
    found = list(rows(scene))
    speeds = [row.outcome.tokens_per_s for row in found]
    assert all(b > 0.97 * a for a, b in pairwise(speeds))
    assert speeds[-1] > 1.2 * speeds[0]
    # Without drafts no target can be faster than its steps.
    most = 4 * 16 / scene.machine.step_s(16, 16)
    assert 0.8 * most < speeds[0] < 1.01 * most
    more = next(rows(read(written(folder, target={"replicas": 16}, load={"streams": 64}))))
    assert more.outcome.tokens_per_s > speeds[0]


def test_a_fleet_that_nobody_asks_has_no_price(folder: Path):
    row = next(rows(read(written(folder, load={"streams": 0, "requests_per_s": 1e-6}))))
    assert (row.outcome.num_asked, row.cost) == (0, math.inf)
    assert "nan" in str(row)


def test_the_price_of_a_million_tokens_is_that_of_the_devices_that_made_them(folder: Path):
    scene = read(written(folder, target={"price_per_hour": 3.6}))
    plain, drafted = found = list(rows(scene))
    assert plain.cost == pytest.approx(4 * 3.6 / 3600 / plain.outcome.tokens_per_s * 1e6)
    assert (plain.num_drafters, drafted.num_drafters) == (0, 4)
    assert drafted.price_per_hour == pytest.approx(4 * (3.6 + 0.1))
    assert "pool: lm" in head(scene)
    assert verdict(found).startswith("cheapest: 1 drafters per target")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"config": ""}, "config: missing; name a file"),
        ({"config": "no.yaml"}, "no.yaml: cannot be read"),
        ({"recording": "no.npz"}, "no.npz cannot be read: No such file or directory; make it with"),
        ({"recording": "serve.yaml"}, "is no recording; make it with"),
        ({"law": "nucleus"}, "law: 'nucleus' is none of: greedy, sampled"),
        ({"load": {"requests_per_s": 2}}, "load: streams is 32 and requests_per_s 2; set one"),
        ({"load": {"streams": 500}}, "load.streams: 500, and serve.yaml lets 264 requests in;"),
        ({"target": {"rows": [1, 64]}}, "target.rows: 2 rows and 4 times_ms are no profile; give"),
        ({"target": {"models": ["ml"]}}, "target.models: 'ml' is no drafter of serve.yaml (did"),
        ({"ratios": []}, "ratios: empty; name at least one"),
        ({"config": "other.yaml"}, "it has the drafters lm, and other.yaml suffix;"),
    ],
)
def test_a_wrong_value_is_named_with_the_remedy(folder: Path, changes: dict[str, Any], told: str):
    path = written(folder, **changes)
    with pytest.raises(ConfigError) as error:
        read(path)
    assert str(error.value).startswith(f"{path}: ")
    assert told in str(error.value)


def test_the_file_on_the_page_is_a_right_one(tmp_path: Path):
    page = (REPOSITORY / "docs" / "simulate.md").read_text("utf-8")
    example = page.partition("```yaml\n")[2].partition("```")[0]
    path = tmp_path / "fleet.yaml"
    path.write_text(re.sub(r"(configs|docs)/", rf"{REPOSITORY}/\1/", example), "utf-8")
    assert read(path).pool(1.0).remote == {"lm", "suffix"}


def test_the_command_prints_a_row_for_each_ratio_and_needs_no_ray(folder: Path):
    path = written(folder)
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(path)], capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    assert lines[0] == "4 targets under 32 streams for 8 s, 8 recorded texts (greedy)"
    assert [line.split()[:2] for line in lines[4:6]] == [["0", "0"], ["1", "4"]]
    assert lines[6].startswith("cheapest: ")
    assert done.stderr.split() == []


def test_the_command_says_on_one_line_what_is_wrong(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["simulate", str(written(folder, seconds=0))]) == 2
    assert capsys.readouterr().err.count("\n") == 1
