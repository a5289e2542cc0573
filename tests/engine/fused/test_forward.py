"""Models whose layers are fused for GPUs say what transformers' modules say; the others stay.

Attention is the reference's here: the interpreter takes long for each of its programs.  The tests
of graphs have both.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from cluster.engine.engine import Engine
from cluster.engine.first_layers import FirstLayers, part_of
from cluster.engine.fused import forward
from cluster.engine.loading.model import load_model
from cluster.engine.work import Work
from cluster.spec.token_log import prefix_hash
from tests.support.choices import by_day
from tests.support.engine.adapters import merged_oracle, write_adapter
from tests.support.engine.checked import oracle_of
from tests.support.engine.driver import PAGE_SIZE, TREE, Factory, check_rows, prompt, rows, run
from tests.support.engine.interpreter import interpreted
from tests.support.engine.parts import plain
from tests.support.engine.taps import TapLog
from tests.support.engine.tiny import tiny

pytestmark = interpreted
BIASES = {"attention_bias": True, "mlp_bias": True}
FEW = {"num_hidden_layers": 2}
LLAMA = [("llama", {**BIASES, "tie_word_embeddings": True, "head_dim": 64})]
SERVED = [
    ("llama", {}),
    *LLAMA,
    ("mistral-sliding", {}),
    ("phi3", {}),
    ("qwen2", {"num_key_value_heads": 1}),
    ("qwen3", {"head_dim": 128}),
]


def engine_of(folder: Path, **settings: Any) -> Engine:
    own = {"page_size": PAGE_SIZE, "max_batch_tokens": 16, **settings}
    config = tiny(folder, own, attention="triton")
    return Engine(replace(config, attention="sdpa"), load_model(config))


def is_fused(engine: Engine) -> bool:
    return engine.model.fused is not None and not engine.model.fused.failure


@pytest.mark.parametrize(("architecture", "fields"), by_day(LLAMA, SERVED), ids=str)
def test_chunks_trees_and_taps_are_the_modules_own(
    architecture: str,
    fields: dict[str, Any],
    checkpoint_factory: Factory,
    monkeypatch: pytest.MonkeyPatch,
):
    folder = checkpoint_factory(architecture, **fields, **FEW)
    engine = engine_of(folder)
    assert is_fused(engine)

    monkeypatch.setattr(engine.model.module, "forward", None)
    oracle, text = oracle_of(folder), prompt(33)
    check_rows(run(engine, Work("b", 0, text, TREE)), oracle, text, TREE)
    log = TapLog(engine, (1, 0, -1), oracle)
    check_rows(log.run(Work("a", 0, text, TREE, tenant=b"another")), oracle, text, TREE)
    assert len(log.chunks) == 3
    log.check("a", text, TREE)


@pytest.mark.parametrize(
    ("architecture", "fields"),
    [
        ("gemma2", {}),
        ("granite", {}),
        ("olmo2", {}),
        ("glm4-moe", {}),
        ("smollm3", {}),  # one layer does not rotate
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}}),
    ],
    ids=str,
)
def test_other_models_keep_their_forward(
    architecture: str, fields: dict[str, Any], checkpoint_factory: Factory
):
    config = tiny(checkpoint_factory(architecture, **fields), {}, attention="triton")
    assert load_model(config).fused is None


@pytest.mark.parametrize(
    ("name", "fault"),
    [("add_norm", "wrong"), ("rotate", "wrong"), ("silu_product", "wrong"), ("rotate", "fails")],
)
def test_kernels_that_are_wrong_or_fail_are_given_up_at_load(
    name: str, fault: str, checkpoint_factory: Factory, monkeypatch: pytest.MonkeyPatch
):
    kernel = getattr(forward, name)

    def faulty(*arguments: Any) -> Any:
        if fault == "fails":
            raise RuntimeError("no compiler")
        return kernel(*arguments) * 2

    monkeypatch.setattr(forward, name, faulty)
    folder = checkpoint_factory("qwen3", num_hidden_layers=1)
    engine = engine_of(folder)
    assert not is_fused(engine)
    (reason,) = engine.forward.fallbacks
    assert ("logits are off by" if fault == "wrong" else "no compiler") in reason
    output = run(engine, Work("a", 0, prompt(20), TREE))
    check_rows(output, oracle_of(folder), prompt(20), TREE)


def test_no_weight_is_there_twice(checkpoint_factory: Factory):
    folder = checkpoint_factory("llama", **BIASES, tie_word_embeddings=True)
    own = load_model(tiny(folder, {}, attention="triton"))
    parameters = dict(own.module.named_parameters())
    storages = {each.untyped_storage().data_ptr(): each for each in parameters.values()}
    held = sum(each.untyped_storage().nbytes() for each in storages.values())
    assert held == sum(each.nbytes for each in parameters.values())
    layer, parts = own.fused._layers[0], own.module.model.layers[0]
    for joined, parameter in [
        (layer.qkv.weight, parts.self_attn.v_proj.weight),
        (layer.qkv.bias, parts.self_attn.k_proj.bias),
        (layer.gate_up.weight, parts.mlp.up_proj.weight),
        (layer.out.weight, parts.self_attn.o_proj.weight),
    ]:
        assert joined.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr()


def test_layers_that_draft_for_all_are_fused_as_all_are(
    checkpoint_factory: Factory, monkeypatch: pytest.MonkeyPatch
):
    """On pages of their own, and the first ones on those of the whole model."""
    folder, text = checkpoint_factory("qwen3", num_hidden_layers=3), prompt(7)
    expected = [plain(folder, layers, text) for layers in ((0, 2), (0,))]
    whole = engine_of(folder)
    run(whole, Work("a", 0, text[:-1]))
    part = Engine(whole.config, part_of(whole.model, (0, 2)))
    assert is_fused(part)
    monkeypatch.setattr(type(whole.model.module), "forward", None)
    found = [rows(run(part, Work("a", 0, text)))]
    first = FirstLayers(whole, part_of(whole.model, range(1)))
    assert first.prepare("a", len(text), 1)
    first.submit(Work("a", 0, text, prefix_hash=prefix_hash(())))
    found += [rows(output) for output in first.step()]
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own[0], other, atol=2e-5, rtol=2e-5)


def test_texts_with_adapters_take_the_module_and_others_do_not(
    checkpoint_factory: Factory, tmp_path: Path
):
    folder = checkpoint_factory("llama", num_hidden_layers=1)
    adapter = write_adapter(folder, tmp_path / "one")
    engine = engine_of(folder, adapters={"one": str(adapter)})
    assert is_fused(engine)
    for number, oracle in enumerate((oracle_of(folder), merged_oracle(folder, adapter))):
        output = run(engine, Work(str(number), 0, prompt(20), TREE, adapter=number))
        check_rows(output, oracle, prompt(20), TREE)


def test_what_asks_for_the_reference_is_not_fused(checkpoint_factory: Factory):
    folder = checkpoint_factory("llama", num_hidden_layers=1)
    assert load_model(tiny(folder, {}, attention="sdpa")).fused is None
