"""The house grows only where somebody says why: code is counted by room, and each room has a bound.

Counted are tokens, about seven a line.  Formatting, comments, docstrings, commas and what a
generator writes count nothing, so packing gains nothing.  Whoever makes a room smaller lowers its
bound; whoever raises one writes the reason beside it.
"""

import ast
import io
import subprocess
import tokenize
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LAYOUT = {
    getattr(tokenize, name)
    for name in ["COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER"]
}
BOUNDS = {
    "benchmarks": 44_980,  # steps that run ahead on a card
    "cluster": 6_500,  # compiled ahead for processors; functions in C++ alone; errors as events
    "cluster/client": 2_490,  # calls that the client's own close ends
    "cluster/config": 8_320,  # aliases under --set; drafters that stay with their target
    "cluster/coordinator": 16_500,
    "cluster/draft": 41_180,  # MTP over latents; the host of drafters inside; what `--draft` names
    "cluster/engine": 59_080,  # fused layers; delta rule, latents; steps ahead; draws and verdicts
    "cluster/grammar": 3_750,  # the hook of a text, and the thread that compiles
    "cluster/metrics": 2_300,
    "cluster/models": 8_410,  # blocks of every format as groups; a GGUF file is read once
    "cluster/plan": 10_820,  # a way back for drafts that lost all trust; laws of verified nodes
    "cluster/requests": 690,  # why a request had no drafts
    "cluster/rpc": 10_200,  # the messages that its codecs read
    "cluster/simulate": 5_470,
    "cluster/spec": 16_300,  # what asking is worth; masses alike; trees as bits; statistics in sum
    "cluster/text": 8_580,  # where a text ends, places of tokens; prompts, and what an answer shows
    "cluster/train": 12_870,  # Muon where products of bfloat16 are emulated; noise by prompt
    "cluster/worker": 17_460,  # ranks and parts, by hand and under Ray; plain numbers of residents
    "deployments": 24_460,  # parts get the environment of their command; updates that fail
    "deployments/bench": 2_820,
    "deployments/evaluate": 1_770,
    "deployments/ingress": 36_000,
    "deployments/page": 310,
    "docs": 3_720,  # what generates was in the product
    "k8s": 1_720,
    "models": 3_210,  # the recipe of the demonstration, which was in cluster/train
    "tests": 369_520,  # loops that C++ replaced; proofs of a GPU without one; states and latents
}


def num_tokens(source: str) -> int:
    """Count the tokens of code in a file."""
    said: set[int] = set()  # the lines of docstrings
    for node in ast.walk(ast.parse(source)):
        holder = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, holder) and ast.get_docstring(node):
            first = node.body[0]
            said.update(range(first.lineno, first.end_lineno + 1))
    return sum(
        each.type not in LAYOUT and each.string not in ",()" and each.start[0] not in said
        for each in tokenize.generate_tokens(io.StringIO(source).readline)
    )


def room_of(path: str) -> str:
    """The room of a file: a package of `cluster` or `deployments`, or a folder of the top level."""
    parts = path.split("/")
    depth = 2 if parts[0] in ("cluster", "deployments") and len(parts) > 2 else 1
    return "/".join(parts[:depth])


def counted() -> Counter[str]:
    listed = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("not a checkout")
    found = Counter[str]()
    for path in listed.stdout.split():
        if "/generated/" not in path and (ROOT / path).exists():
            found[room_of(path)] += num_tokens((ROOT / path).read_text("utf-8"))
    return found


def test_every_room_has_a_bound_and_keeps_it():
    counts = counted()
    assert set(counts) == set(BOUNDS)
    grown = [room for room, count in counts.items() if count > BOUNDS[room]]
    assert not grown, "these have grown: make them smaller, or say why beside their bounds"
