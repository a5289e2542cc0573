"""How long a draft model reads at a time beside texts in decoding, on a slow machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from cluster.config.schema import EngineConfig
from cluster.engine.engine import Engine
from cluster.messages import StepReport
from cluster.worker.host import load_target_engine
from cluster.worker.target_parts import TargetParts
from tests.support.draft.inside import config_of
from tests.support.engine.driver import prompt
from tests.support.engine.slowed import SLOW, slow_down
from tests.support.worker.residents import resident_text

# After a chunk of the target's own, which took as long as it may.
CHUNK_S = EngineConfig().max_chunk_s
AFTER_A_CHUNK = StepReport(step_time_s=CHUNK_S, num_prefill_tokens=20)
# As long as texts wait for residents after it, where a plain step takes less.
BOUND_S = 0.05
NUM_ROWS = 330


def test_a_draft_model_reads_a_prompt_in_chunks_that_time_bounds(
    llama_folder: Path, draft_folder: Path
) -> None:
    model = {"model": str(draft_folder), "device": "cpu", "dtype": "float32", "num_pages": 256}
    config = config_of(llama_folder, "lm", options={"engine": model}, max_batch_tokens=512)
    config = replace(config, drafters={"a": config.drafters["head"]})
    target = load_target_engine(config)
    residents = TargetParts(target, config).residents
    (lm,) = residents
    assert isinstance(lm.engine, Engine)
    clock = residents._clock = lm._clock = slow_down(lm.engine, SLOW)
    text = resident_text(prompt(NUM_ROWS).tolist(), name="r")
    waits: list[float] = []
    while not waits or lm.engine.cached_len("r") < NUM_ROWS - 1:
        clock.now += 1000.0  # so long does it rest after its first chunk, which stalls
        began = clock.now
        residents.draft([text], AFTER_A_CHUNK)
        waits.append(clock.now - began)
        assert len(waits) < 100
    # Its engine has measured nothing before the first, which is bounded in rows.
    assert max(waits[1:]) <= BOUND_S + CHUNK_S
    assert sum(waits) > SLOW[1] * NUM_ROWS
    target.close()
