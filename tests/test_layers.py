"""What import-linter reads from the sources, seen once more in a running interpreter."""

import ast
import json
import platform
import re
import shutil
import sys
from collections.abc import Sequence
from graphlib import TopologicalSorter
from itertools import chain
from pathlib import Path

import grimp
import pytest

from tests.conftest import REPOSITORY, said_by
from tests.draft.test_registry import REQUIRED
from tests.support.choices import by_day

HOUSE = ("cluster", "deployments")
INCLUDE = re.compile(r'^#include "(.+)"', re.MULTILINE)
# A second way to read headers.
WIDER = [["-march=sapphirerapids"]] if platform.machine() == "x86_64" else []
# What computes with a model, and what reads and writes text.
COMPUTING = ("torch", "transformers", "scipy", "triton", "accelerate", "sympy", "gguf")
SPEAKING = ("tokenizers", "jinja2", "huggingface_hub")
TORCHLESS, SILENT = ("torch", "ray", "transformers"), ("ray", "grpc")
IMPORT_IN_TURN = """
import importlib, json, sys
for name, forbidden in json.loads(sys.argv[1]):
    importlib.import_module(name)
    print(*sorted(name + " loads " + each for each in forbidden if each in sys.modules), sep="\\n")
"""


@pytest.mark.parametrize(
    "modules",
    [
        # In turn in one interpreter: what the later ones may load, the earlier ones have not.
        {
            "cluster.config.file": (*TORCHLESS, "grpc"),
            "cluster.draft.registry": (*TORCHLESS, "grpc"),
            "cluster.coordinator.coordinator": (*TORCHLESS, "grpc"),
            "cluster.simulate.fleet": (*TORCHLESS, "grpc"),
            "cluster.engine.engine": SILENT,
            "cluster.worker.target": ("ray",),
            "cluster.worker.draft_worker": ("ray",),
        },
        {
            "cluster.client": TORCHLESS,
            "cluster.rpc.server": TORCHLESS,
            "deployments.cli": (*TORCHLESS, "huggingface_hub"),
            "deployments.serve_command": COMPUTING,
        },
        # The processes that `drafthouse serve` starts, before one loads a model.
        {
            "deployments.drafter": (*COMPUTING, *SPEAKING, "llguidance"),
            "deployments.target": (*COMPUTING, *SPEAKING, "llguidance"),
            "deployments.coordinator": (*COMPUTING, *SPEAKING, "llguidance"),
            "deployments.ingress.deployment": (*COMPUTING, "huggingface_hub"),
        },
    ],
    ids=["what thinks", "what talks", "what is started"],
)
def test_a_module_loads_nothing_that_its_layer_forbids(modules: dict[str, Sequence[str]]):
    said = said_by(sys.executable, "-c", IMPORT_IN_TURN, json.dumps([*modules.items()]))
    assert said.split() == []


IMPORT_AND_SPEAK = """
import sys
from cluster.text.completion import TextStream
from cluster.text.tokenizer import Tokenizer
tokenizer = Tokenizer.load(sys.argv[1])
ids = tokenizer.apply_chat_template([{"role": "user", "content": "a text"}])
TextStream(tokenizer).push(ids)
print(*{"torch", "scipy", "transformers.modeling_utils"}.intersection(sys.modules))
"""
# The options of every kind are checked by the way.
IMPORT_AND_LOOK_UP = f"""
import sys
from cluster.config.schema import Config, DrafterConfig
from cluster.draft.registry import KINDS, check
from cluster.worker.build import load_drafter
for kind in KINDS:
    check("own", DrafterConfig(kind, {REQUIRED}.get(kind, {{}})))
for kind in ("suffix", "ngram_cache", "prompt_lookup"):
    load_drafter(Config(drafters={{"own": DrafterConfig(kind)}}), "own")
print(*{{"torch", "transformers", "scipy", "tokenizers", "ray", "grpc"}}.intersection(sys.modules))
"""


@pytest.mark.parametrize("script", [IMPORT_AND_SPEAK, IMPORT_AND_LOOK_UP], ids=["text", "look-up"])
def test_what_has_no_model_loads_nothing_that_computes_with_one(script: str):
    assert said_by(sys.executable, "-c", script, "models/demo-target").split() == []


@pytest.mark.parametrize("package", ["cluster", "deployments"])
def test_no_modules_import_each_other_in_a_circle(package: str):
    graph = grimp.build_graph(package, cache_dir=None)
    imports = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    TopologicalSorter(imports).prepare()  # raises CycleError, which names the circle
    assert len(imports) > 10


def native_sources() -> list[Path]:
    return [path for suffix in ("*.h", "*.cpp") for path in (REPOSITORY / "cluster").rglob(suffix)]


def test_no_native_sources_include_each_other_in_a_circle():
    includes = {
        path: {(path.parent / name).resolve() for name in INCLUDE.findall(path.read_text("utf-8"))}
        for path in native_sources()
    }
    included = set().union(*includes.values())
    assert included <= includes.keys()
    assert not any(path.suffix == ".cpp" for path in included)
    TopologicalSorter(includes).prepare()
    assert len(included) > 5


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
@pytest.mark.parametrize("options", by_day([[]], [[], *WIDER]))
def test_a_header_needs_nothing_of_whoever_includes_it(options: list[str]):
    """Or a circle would pass through a file that no line names."""
    headers = [path for path in native_sources() if path.suffix == ".h"]
    said_by("g++", "-std=c++17", "-fsyntax-only", *options, "-x", "c++", *headers)


@pytest.mark.parametrize(
    ("folders", "limit"),
    [(("cluster", "deployments", "docs", "k8s"), 350), (("tests", "benchmarks"), 400)],
)
def test_no_file_has_grown_into_two_ideas(folders: Sequence[str], limit: int):
    lengths = {
        path.relative_to(REPOSITORY).as_posix(): len(path.read_text("utf-8").splitlines())
        for folder in folders
        for suffix in ("*.py", "*.cpp", "*.h")
        for path in (REPOSITORY / folder).rglob(suffix)
        if "generated" not in path.parts
    }
    assert len(lengths) > 50
    assert {path: length for path, length in lengths.items() if length > limit} == {}


def test_a_class_name_has_one_meaning():
    """The thin client stands alone, and a native class is named as what it does in Python."""
    found: dict[str, list[str]] = {}
    for path in sorted(chain.from_iterable((REPOSITORY / each).rglob("*.py") for each in HOUSE)):
        if not {"client", "native"} & set(path.parts):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    found.setdefault(node.name, []).append(f"{path}:{node.lineno}")
    assert not {name: places for name, places in found.items() if len(places) > 1}
