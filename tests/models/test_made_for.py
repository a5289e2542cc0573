"""Which target a drafter was made for: what its folder says, and what is said of another target."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster import metrics
from cluster.config.schema import Config, DrafterConfig, TargetConfig
from cluster.coordinator.workers import note_foreign
from cluster.local import LLM
from cluster.metrics.recorder import Recorder
from cluster.models.fingerprint import model_hash
from cluster.models.made_for import MadeFor, folder_made_for, read_made_for, write_made_for
from cluster.rpc.messages import WorkerDescription
from tests.support.draft.heads import random_eagle3
from tests.support.engine.driver import Factory
from tests.support.local_models import engine

MODELS = Path(__file__).parents[2] / "models"
ONE, OTHER = MadeFor("org/one", "aa" * 32), MadeFor("one", "bb" * 32)


@pytest.mark.parametrize(
    ("mine", "served", "fits"),
    [
        (ONE, replace(ONE, name="renamed"), True),  # the hash decides, where both have one
        (ONE, OTHER, False),
        (MadeFor("org/One/"), MadeFor("one", "bb"), True),
        (MadeFor("org/one"), MadeFor("two", "bb"), False),
        (MadeFor("", "aa"), MadeFor("two"), True),  # nothing in common that could be compared
        (MadeFor(), OTHER, True),
    ],
)
def test_a_hash_decides_and_else_a_name(mine: MadeFor, served: MadeFor, fits: bool):
    assert mine.fits(served) == fits


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {"made_for": {"name": "a", "model_hash": "b"}, "base_model_name_or_path": "c"},
            ("a", "b"),
        ),
        ({"speculators_config": {"verifier": {"name_or_path": "org/a"}}}, ("org/a", "")),
        ({"base_model_name_or_path": "lmsys/vicuna-7b-v1.3"}, ("lmsys/vicuna-7b-v1.3", "")),
        ({"speculators_config": None, "made_for": "someone"}, ("", "")),
    ],
)
def test_our_note_and_the_published_ones_are_read(
    config: dict[str, Any], expected: tuple[str, str]
):
    assert read_made_for(config) == MadeFor(*expected)


def test_a_note_is_added_to_a_configuration(tmp_path: Path):
    assert folder_made_for(tmp_path) == MadeFor()
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    write_made_for(tmp_path, ONE)
    assert folder_made_for(tmp_path) == ONE
    assert json.loads((tmp_path / "config.json").read_text())["hidden_size"] == 8


@pytest.mark.parametrize("name", ["demo-draft", "demo-draft-code", "demo-draft-prose"])
def test_the_demonstration_drafters_were_made_for_the_demonstration_target(name: str):
    expected = MadeFor("demo-target", model_hash(MODELS / "demo-target"))
    assert folder_made_for(MODELS / name) == expected


def test_every_foreign_drafter_is_told_in_one_line_and_counted(
    caplog: pytest.LogCaptureFixture,
):
    recorder, served = Recorder(), WorkerDescription("t", "target", "two", model_hash="bb" * 32)
    joining = WorkerDescription("d", "drafter", "lm", made_for={"lm": ONE})
    note_foreign(joining, None, recorder)  # no target yet
    note_foreign(replace(joining, made_for={"lm": OTHER}), served, recorder)
    note_foreign(joining, served, recorder)
    assert caplog.messages == [
        "drafter lm was made for org/one (hash aaaaaaaaaaaa), the target is two (hash "
        "bbbbbbbbbbbb): few of its drafts will be accepted; train one for this target, or take the "
        "drafter out"
    ]
    counted = f'{metrics.DRAFTER_FOREIGN.name}_total{{drafter="lm"}} 1.0'
    assert counted in recorder.render().decode()


def test_a_head_for_another_target_drafts_and_is_counted(
    llama_folder: Path, checkpoint_factory: Factory, tmp_path: Path
):
    targets = {"own": llama_folder, "foreign": checkpoint_factory("mistral-sliding")}
    drafters = {}
    for name, target in targets.items():
        head = random_eagle3(tmp_path / name, llama_folder)
        write_made_for(head, MadeFor("some-target", model_hash(target)))
        drafters[name] = DrafterConfig(kind="eagle3", options={"model": str(head)})
    config = Config(target=TargetConfig(engine=engine(llama_folder, 64)), drafters=drafters)
    with LLM(config) as llm:
        (answer,) = llm.generate([[5, 6, 7]])
        rendered = llm.metrics()
    assert answer.token_ids
    counted = metrics.DRAFTER_FOREIGN.name
    assert f'{counted}_total{{drafter="foreign"}} 1.0' in rendered
    assert f'{counted}_total{{drafter="own"}}' not in rendered
