"""What can be proved of a GPU without one, in small; `make check-gpu-offline` has the whole."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from cluster.config.schema import EngineConfig
from cluster.engine.attention.delta_rule import delta_rule, pieces_of
from cluster.engine.graphs.forward import may_have_graphs
from cluster.engine.loading.inspection import describe
from cluster.engine.loading.model_config import cached_layers
from cluster.engine.loading.planned import planned
from cluster.engine.schedule.batch import Batch, Share
from tests.support.engine.driver import Factory, load_engine
from tests.support.gpu import collectives, cubins, heads, page, steps, table
from tests.support.gpu.counting import META, Counting
from tests.support.gpu.launches import Launch
from tests.support.gpu.models import CONFIGS, Attending, Between
from tests.support.gpu.table import Table

LLAMA = "Llama-3.1-8B"
H100 = cubins.Variant(90, Attending.of(LLAMA)[0], 16)
# Heads of a true size, so that their tensors are not lost in the allocator's blocks.
WIDE = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
needs_versions = pytest.mark.skipif(
    table.versions() != table.read()["versions"], reason="the table is of other versions"
)


@pytest.fixture(scope="module")
def compiled() -> Table:
    """The counts of a kernel of each kind, for an H100."""
    return cubins.of_variant(H100)


def _changes(part: str, found: Table) -> list[str]:
    return list(table.changes({part: found}, table.read()))


@needs_versions
def test_a_step_asks_no_more_of_a_gpu_than_it_did():
    """And it can be captured: on `meta` nothing can wait for a result."""
    assert _changes("architectures", {LLAMA: steps.of_architecture(LLAMA)}) == []
    draws, moves = steps.draws(num_rows=32, vocab_size=128_256), steps.move()
    assert _changes("draws", draws) == []
    assert _changes("moves", {"accepted nodes": moves}) == []
    assert {each["waits"] for each in draws.values()} == {1}, "for what is drawn"
    assert {each["pageable copies"] for each in (*draws.values(), moves)} == {0}
    assert _changes("heads", heads.rounds()) == []


def test_what_texts_ask_for_beside_a_draw_takes_no_pageable_copies():
    asked = steps.adjusted(num_texts=3, vocab_size=97)
    assert asked["pageable copies"] == 0
    assert asked["copies to the device"] > 30, "something is not asked for"


@pytest.mark.parametrize("name", CONFIGS)
def test_a_reserve_is_what_steps_take_and_at_most_a_tenth_more(name: str):
    own = table.read()["architectures"][name]
    for rows in ("", f", at {steps.MANY} rows"):
        taken = own[f"bytes of all{rows}"]
        for how in ("", " by the configuration"):
            assert taken <= own[f"bytes reserved{how}{rows}"] <= 1.1 * taken


def test_states_that_a_step_gathers_are_counted_and_no_graphs(
    checkpoint_factory: Factory,
):
    """Each text is a token before the end of its first page: its state is gathered, and that behind
    the page written."""
    folder = checkpoint_factory("qwen3.5", **WIDE)
    num_texts, num_own, page_size = 256, 4, 16  # so that states are more than what draws take
    num_rows, length = num_texts * num_own, page_size - 1 + num_own
    engine = EngineConfig(
        model=str(folder),
        max_running_sequences=num_texts,
        max_batch_tokens=num_rows,
        page_size=page_size,
    )
    described = describe(folder, engine)
    layers = cached_layers(described.text_config, torch.float32)
    (spec,) = {each for each in layers if each.state}
    heads, key_dim, value_dim = spec.state or ()
    zeros = np.zeros(num_rows, np.int64)
    positions = np.arange(page_size - 1, length)
    shares = [
        Share(
            first, num_own, length, zeros[:length], positions, zeros[:0], (), next_border=page_size
        )
        for first in range(0, num_rows, num_own)
    ]
    pieces = pieces_of(Batch(shares, zeros, zeros, zeros, zeros), 0, META)
    lines, states = torch.zeros(1, 2 * spec.head_dim), torch.zeros(1, heads, key_dim, value_dim)
    keys = torch.zeros(num_rows, described.text_config.linear_num_key_heads, key_dim)
    values, rows = torch.zeros(num_rows, heads, value_dim), torch.zeros(num_rows, heads)
    given = (each.to(META) for each in (keys, keys, values, rows, rows))
    with torch.inference_mode(), Counting() as counting:
        delta_rule(lines.to(META), states.to(META), pieces, *given)
    sizes = planned(folder, described, engine, is_here=False, logit_rows=3)
    least = 4 * num_texts * spec.state_bytes
    assert least < counting.peak_bytes <= sizes.steps < 1.2 * counting.peak_bytes
    assert sizes.graphs == 0
    assert not may_have_graphs(engine, layers)


@needs_versions
def test_ranks_say_no_more_to_each_other_than_they_did():
    assert _changes("collectives", {LLAMA: {"TP 2": collectives.of_architecture(LLAMA, 2)}}) == []


def test_commands_of_a_step_take_no_collective_of_the_host(
    checkpoint_factory: Factory,
):
    """The one is for the digest of what is to run, which is on the GPUs."""
    found = collectives.of_commands(load_engine(checkpoint_factory("llama")))
    assert found == table.read()["commands of a step"] == {"allreduce_": 1}


@needs_versions
def test_kernels_take_no_more_of_a_processor_than_they_did(compiled: Table):
    assert _changes("cubins", compiled) == []


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_compiled_is_what_the_layers_of_a_model_launch(name: str):
    launched = {_said(each) for each in steps.step_of(name, 2).launched}
    variants = [
        *(cubins.Variant(90, own, 16) for own in Attending.of(name)),
        *(cubins.Variant(90, own) for own in Between.of(name)),
    ]
    assert launched == {_said(each) for variant in variants for each in variant.launches()}


def _said(launch: Launch) -> str:
    """What a compiler is given."""
    return f"{launch.name} {launch.signature} {launch.constants} {launch.attributes}"


def test_kernels_that_are_served_by_default_do_not_spill(compiled: Table):
    assert list(cubins.faults(compiled)) == []
    assert list(cubins.faults(table.read()["cubins"])) == []


def test_what_a_graph_cannot_hold_raises_on_meta():
    rows = torch.zeros(3, device=META)
    for ask in (
        lambda: rows.max().item(),
        lambda: rows.nonzero(),
        lambda: rows.cpu(),
        lambda: rows[rows > 0],
        lambda: rows.index_put_((rows > 0,), torch.zeros(2, device=META)),
    ):
        with pytest.raises((RuntimeError, NotImplementedError)), Counting():
            ask()


def test_kernels_copies_waits_and_bytes_are_counted():
    rows, host = torch.zeros(512, 4, device=META), torch.zeros(4)
    with torch.no_grad(), Counting(answer=lambda *_: 7.0) as counting:
        first = rows + 1.0  # 8 KiB
        first = first.view(4, 512) * 2.0  # another, and only then the first is free
        del first
        rows.t().sum().to(torch.bfloat16)
        host.to(META)
        host.to(META, non_blocking=True)
        torch.tensor([1, 2], device=META)
        assert rows.max().item() == 7.0
    assert counting.counted() == {"add": 1, "mul": 1, "sum": 1, "_to_copy": 1, "max": 1}
    assert (counting.copies, counting.pageable, counting.waits) == (3, 2, 1)
    assert counting.peak_bytes == 2 * 8192


@needs_versions
def test_the_page_says_what_the_table_and_the_refusals_say():
    for path, text in page.files().items():
        assert path.read_text("utf-8") == text, "it is stale; run: make docs"
    other = {"commands of a step": {"allreduce_": 5}}
    assert page.page(table.read() | other) != text
