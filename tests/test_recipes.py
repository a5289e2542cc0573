"""What the documents show of a configuration is what its file holds."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

REPOSITORY = Path(__file__).resolve().parents[1]


def test_the_recipe_for_eight_gpus_is_its_file() -> None:
    text = (REPOSITORY / "docs" / "own-model.md").read_text()
    section = text.partition("## Eight GPUs")[2]
    block = re.search(r"```yaml\n(.*?)```", section, re.DOTALL)
    assert block is not None
    file = (REPOSITORY / "configs" / "llama-70b-8xh100.yaml").read_text()
    assert yaml.safe_load(block[1]) == yaml.safe_load(file)
