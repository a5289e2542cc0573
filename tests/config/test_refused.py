"""Every deviation of a file is refused with its path and the remedy: the cases of refused.yaml."""

import copy
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.config.file import load
from cluster.config.processes import EngineConfig
from cluster.config.schema import AnswersConfig, Config, CoordinatorConfig
from cluster.config.speculation import DraftLengthConfig, DraftLengthOverride, SwitchbackConfig
from cluster.errors import ConfigError
from tests.config.test_applications import DOCUMENT as TWO
from tests.config.test_file import DOCUMENT as FILE

ONE = {"applications": [{"args": {"target": {"engine": {"model": "m"}}}}]}
FILES = {"one": ONE, "two": TWO, "file": yaml.safe_load(FILE)}
CASES = yaml.safe_load(Path(__file__).with_name("refused.yaml").read_text("utf-8"))
GONE = {each["told"].partition(":")[0] for each in CASES if " is gone; " in each["told"]}


def change(node: dict[str, Any], path: str, value: Any) -> None:
    *sections, key = path.split(".")
    for each in sections:
        node = node[each]
    node[key] = value
    if value == "removed":
        del node[key]


def written(case: dict[str, Any]) -> str:
    """The file of a case."""
    if "text" in case:
        return case["text"]
    document = copy.deepcopy(FILES[case.get("in", "one")])
    main, pool = document["applications"][0], document["applications"][-1]
    main["args"] |= case.get("args", {})
    told = [{"name": "target", "user_config": case.get("user_config")}]
    main["deployments"] = case.get("deployments", told)
    for application, changes in ((main, case.get("main", {})), (pool, case.get("pool", {}))):
        for path, value in changes.items():
            change(application, path, value)
    return yaml.safe_dump(document)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["told"])
def test_a_deviation_is_refused_with_its_path_and_the_remedy(tmp_path: Path, case: dict[str, Any]):
    path = tmp_path / "serve.yaml"
    path.write_text(written(case), "utf-8")
    with pytest.raises(ConfigError) as refused:
        load(path, [case["set"]] if "set" in case else ())
    assert refused.value.message.startswith(f"{path}: ")
    for part in case["told"].split(" ... "):
        assert part in refused.value.message
    assert refused.value.param is None or refused.value.param in refused.value.message


@pytest.mark.parametrize(
    "kind",
    [
        Config,
        AnswersConfig,
        CoordinatorConfig,
        EngineConfig,
        SwitchbackConfig,
        DraftLengthConfig,
        DraftLengthOverride,
    ],
)
def test_what_is_gone_is_no_key_of_the_schema_and_says_what_to_do(kind: Any):
    assert not kind.REMOVED.keys() & {field.name for field in fields(kind)}
    for key, remedy in kind.REMOVED.items():
        assert any(case["told"].endswith(f" is gone; {remedy}") for case in CASES), key
