"""What can be proved of a GPU without one, in small; `make check-gpu-offline` has the whole."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from tests.support.gpu import collectives, cubins, heads, steps, table
from tests.support.gpu.counting import META, Counting
from tests.support.gpu.models import Attending
from tests.support.gpu.table import Table

LLAMA = "Llama-3.1-8B"
H100 = cubins.Variant(90, Attending.of(LLAMA)[0], 16, trees=True)
needs_versions = pytest.mark.skipif(
    table.versions() != table.read()["versions"], reason="the table is of other versions"
)


def _changes(part: str, found: Table) -> list[str]:
    return list(table.changes({part: found}, table.read()))


@needs_versions
def test_a_step_asks_no_more_of_a_gpu_than_it_did() -> None:
    """And it can be captured: on `meta` nothing can wait for a result."""
    assert _changes("architectures", {LLAMA: steps.of_architecture(LLAMA)}) == []
    assert _changes("draws", steps.draws(num_rows=32, vocab_size=128_256)) == []
    assert _changes("heads", heads.rounds()) == []


@needs_versions
def test_ranks_say_no_more_to_each_other_than_they_did() -> None:
    assert _changes("collectives", {LLAMA: {"TP 2": collectives.of_architecture(LLAMA, 2)}}) == []


@needs_versions
def test_a_kernel_is_compiled_as_it_would_be_served() -> None:
    assert _changes("cubins", cubins.measured([H100])) == []


def test_kernels_that_are_served_by_default_do_not_spill() -> None:
    assert list(cubins.faults(cubins.measured([H100]))) == []
    assert list(cubins.faults(table.read()["cubins"])) == []


def test_a_kernel_without_the_compiler_s_knowledge_of_its_arguments_is_a_fault() -> None:
    first, _ = H100.launches()
    blind = replace(first, attributes={})
    name = f"{blind.name} {H100.name}"
    (fault,) = cubins.faults({name: cubins.counts(blind.compiled(90))})
    assert fault == f"{name}: no loads of 128 bits, or no tensor cores"


def test_what_a_graph_cannot_hold_raises_on_meta() -> None:
    rows = torch.zeros(3, device=META)
    for asked in (lambda: rows.max().item(), lambda: rows.nonzero(), lambda: rows.cpu()):
        with pytest.raises((RuntimeError, NotImplementedError)), Counting():
            asked()


def test_kernels_copies_waits_and_bytes_are_counted() -> None:
    rows, host = torch.zeros(512, 4, device=META), torch.zeros(4)
    with torch.no_grad(), Counting(answer=lambda *_: 7.0) as counting:
        first = rows + 1.0  # 8 KiB
        first = first.view(4, 512) * 2.0  # another, and only then the first is free
        del first
        rows.t().sum().to(torch.bfloat16)
        host.to(META)
        assert rows.max().item() == 7.0
    assert counting.counted() == {"add": 1, "mul": 1, "sum": 1, "_to_copy": 1, "max": 1}
    assert (counting.copies, counting.waits) == (1, 1)
    assert counting.peak_bytes == 2 * 8192


def test_a_number_that_rises_or_has_no_place_is_named() -> None:
    held = {"a": {"registers": 100, "mma": 4}}
    assert list(table.changes(held, held)) == []
    found = {"a": {"registers": 101, "mma": 3}, "b": {"stack": 0}}
    assert list(table.changes(found, held)) == [
        "a: registers: 100 -> 101, which is worse",
        "a: mma: 4 -> 3, which is worse",
        "b: stack: 0, which is not in the table",
    ]
    assert list(table.changes({"a": {"registers": 99}}, held)) == ["a: registers: 100 -> 99"]
