"""What cannot be served is refused by its configuration, and before any weight loads."""

from pathlib import Path
from typing import Any

import pytest
import transformers
from packaging.version import Version
from transformers.models.auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from cluster.config.schema import EngineConfig
from cluster.engine.loading.inspection import check_servable, context_limit, describe
from cluster.engine.loading.model import load_model
from cluster.engine.loading.model_config import SINCE
from tests.support.errors import config_error

RECURRENT = (
    "MambaConfig",
    "Mamba2Config",
    "FalconMambaConfig",
    "FalconH1Config",
    "JambaConfig",
    "BambaConfig",
    "Zamba2Config",
    "NemotronHConfig",
    "GraniteMoeHybridConfig",
    "RecurrentGemmaConfig",
    "RwkvConfig",
    "xLSTMConfig",
    "MiniMaxConfig",
)


REASONS = {
    **dict.fromkeys(RECURRENT, "recurrent state"),
    "Llama4TextConfig": "chunked_attention, which the engine does not know",
}


@pytest.mark.parametrize(("name", "reason"), REASONS.items())
def test_other_models_are_refused_with_their_reason(name: str, reason: str):
    config = getattr(transformers, name)()

    with config_error(reason) as raised:
        check_servable(config, MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])

    assert config.model_type in raised.value.message
    assert raised.value.param == "model"


def test_a_hybrid_model_is_refused_before_its_weights_are_looked_for(tmp_path: Path):
    transformers.BambaConfig(num_hidden_layers=4).save_pretrained(tmp_path)

    with config_error("linear_attention keep a recurrent state"):
        load_model(EngineConfig(model=str(tmp_path), device="cpu"))


def test_an_architecture_that_came_later_is_refused_with_the_version_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    installed = Version(transformers.__version__)
    for name, since in SINCE.items():
        assert (name in CONFIG_MAPPING) == (installed >= Version(since))
    monkeypatch.setitem(SINCE, "later", "99.1")
    (tmp_path / "config.json").write_text('{"model_type": "later"}')

    with config_error(r"later cannot be served: .* since 99\.1,"):
        describe(tmp_path, EngineConfig(model=str(tmp_path), device="cpu"))


def _gemma(**full_attention: Any) -> Any:
    plain = {"rope_type": "default", "rope_theta": 10_000.0}
    return transformers.Gemma3TextConfig(
        num_hidden_layers=6,
        max_position_embeddings=8192,
        rope_parameters={"sliding_attention": plain, "full_attention": plain | full_attention},
    )


def test_a_rope_of_one_type_of_layer_bounds_the_context():
    factors = {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 2048}
    config = _gemma(**factors)

    assert context_limit(config, 0) == 2048
    assert context_limit(config, 1000) == 1000
    with config_error("dynamic rotary embedding depends on the batch beyond"):
        context_limit(config, 2049)
    assert context_limit(_gemma(), 0) == 8192
    assert context_limit(_gemma(rope_type="linear", factor=8.0), 8192) == 8192


def test_a_rope_inside_a_text_config_bounds_the_context(tmp_path: Path):
    text = _gemma(rope_type="dynamic", factor=2.0, original_max_position_embeddings=512)
    full = transformers.Gemma3Config(text_config=text)
    full.save_pretrained(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)

    assert context_limit(config.get_text_config(decoder=True), 0) == 512


def test_a_scaling_of_the_older_form_bounds_the_context():
    config = transformers.PretrainedConfig(max_position_embeddings=4096)
    config.rope_parameters = None
    config.rope_scaling = {"type": "longrope", "original_max_position_embeddings": 1024}

    assert context_limit(config, 0) == 1024
