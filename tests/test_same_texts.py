"""Texts of models in few bits, which are the same on every processor: see docs/exactness.md.

The demonstration's target in three formats, greedy and seeded, with drafts and without: two hundred
texts, structured output and calls of tools among them.
"""

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from cluster.config.schema import Config
from cluster.core import SamplingParams, SpeculationOptions
from cluster.local import LLM
from cluster.models.gguf import convert
from cluster.text.completion import Completion
from tests.support import matrix
from tests.support.choices import by_day
from tests.support.engine.native import needs_native
from tests.support.grammar.specs import FOLDER, SPECS
from tests.support.local_models import PLAIN, ids_of
from tests.support.models.gguf_files import write_gguf

pytestmark = [needs_native, pytest.mark.usefixtures("tireless_residents")]

# Of the texts of each format, on any machine.
_DIGESTS = {"Q4_1": "0cb2422393c3d5a4", "int8": "e4bc20b8bdbe9c0b", "int4": "1efbedbd809b73e5"}
_CHANGED = """The texts of {format} are others than those that were committed.

Was a change of numbers meant (other kernels, weights, noise or prompts)? Then put {found!r} there,
and say in CHANGELOG.md that texts change. Was none? Then something depends on this processor, or on
a library: tests/engine/cpu/test_same_bits.py says which part of a forward does, if it is one."""
_LAWS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=64),
    "seeded": SamplingParams(temperature=0.8, max_tokens=64, seed=5),
}
# Beside those of the plain law: one text of each.
_KINDS = [
    {"grammar": SPECS["json_schema"]},
    {"grammar": SPECS["structural_tag"]},  # a tool's call
    {"repetition_penalty": 1.2},
    {"top_p": 0.9},
    {"min_p": 0.05},
]
_NUM_PLAIN = 12


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target as a file of blocks of four bits, as `drafthouse fetch` keeps one."""
    folder = tmp_path_factory.mktemp("blocks")
    source, made = folder / "source", folder / "model"
    shutil.copytree(FOLDER, source)
    template = json.loads((source / "tokenizer_config.json").read_text())["chat_template"]
    (source / "chat_template.jinja").write_text(template)
    kind = GGMLQuantizationType.Q4_1
    convert(write_gguf(source, folder / "target.gguf", kind=kind), made)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, made)
    return made


def config(folder: Path, **settings: Any) -> Config:
    whole = matrix.config(num_pages=512)
    engine = replace(whole.target.engine, model=str(folder), dtype="auto", **settings)
    return replace(
        whole,
        target=replace(whole.target, engine=engine),
        drafters={name: whole.drafters[name] for name in ("lm", "suffix", "grammar")},
        tasks={},
    )


def prompts() -> list[str]:
    lines = (FOLDER.parent / "heldout.jsonl").read_text().splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    texts = [text for text in texts if len(text) > 100]
    return [text[: 80 + 20 * place] for place, text in enumerate(texts[: _NUM_PLAIN + len(_KINDS)])]


def texts(llm: LLM, speculation: SpeculationOptions | None) -> list[Completion]:
    found: list[Completion] = []
    for law in _LAWS.values():
        laws = [law] * _NUM_PLAIN + [replace(law, **kind) for kind in _KINDS]
        found += llm.generate(prompts(), laws, speculation=speculation)
    return found


def digest(found: Sequence[Completion]) -> str:
    told = hashlib.sha256()
    for one in found:
        told.update(np.array([len(one.token_ids), *one.token_ids], "<i4").tobytes())
    return told.hexdigest()[:16]


@pytest.mark.parametrize("format", by_day(["Q4_1"], [*_DIGESTS]))
def test_texts_are_those_of_every_other_machine(format: str, blocks: Path):
    made = config(blocks) if format == "Q4_1" else config(FOLDER, weights=format)
    with LLM(made) as llm:
        plain, drafted = texts(llm, PLAIN), texts(llm, None)
    assert sum(one.stats.num_accepted_draft_tokens for one in drafted) > 0
    assert ids_of(drafted) == ids_of(plain)
    found = digest(plain)
    assert found == _DIGESTS[format], _CHANGED.format(format=format, found=found)
