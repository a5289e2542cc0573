"""The benchmark's schemas are varied, the same each time, and usable by both libraries."""

from __future__ import annotations

import json

import jsonschema
import pytest

from benchmarks.spec_bench.schemas import FAMILIES, tasks
from cluster.requests.grammar_spec import GrammarSpec
from tests.support.grammar.backends import BACKENDS, compiler


def test_a_longer_list_begins_with_the_shorter_one() -> None:
    assert tasks(10, 3) == tasks(40, 3)[:10]
    assert tasks(10, 3) != tasks(10, 4)
    found = tasks(500, 1)
    assert {task.family for task in found} == set(FAMILIES)
    assert len({json.dumps(task.schema) for task in found}) > 300


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_family_is_a_schema_that_compiles(backend: str) -> None:
    for task in tasks(3 * len(FAMILIES), 1):
        jsonschema.Draft202012Validator.check_schema(task.schema)
        compiler(backend).compile(GrammarSpec("json_schema", json.dumps(task.schema)))
