"""Recorded texts come back from their file as they were, with the trees that drafters had."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.replay.along import Recording, replay
from benchmarks.replay.record import created, record_trees, save
from cluster.config.schema import Config, DrafterConfig
from cluster.core import SamplingParams, TokenLogprob, token_array
from cluster.draft.base import DrafterContext
from cluster.draft.suffix import SuffixDrafter, SuffixOptions
from cluster.simulate.world import RecordedText, load


@pytest.fixture
def text() -> RecordedText:
    request = Recording(
        token_array([1, 2, 3, 4, 1, 2]),
        token_array([3, 4, 9, 1, 2]),
        SamplingParams(temperature=0.0),
        "copy",
    )
    drafter = SuffixDrafter(DrafterContext("lookup", 32, 4), SuffixOptions())
    trees = record_trees(drafter, request)
    return RecordedText(6, request.output_ids, "copy", False, {"lookup": trees})


def test_a_recording_survives_its_file(text: RecordedText, tmp_path: Path):
    save(tmp_path / "texts.npz", [text], {"model": "none"})
    (read,) = load(tmp_path / "texts.npz")
    assert (read.prompt_len, read.task, read.is_sampled) == (6, "copy", False)
    assert read.token_ids.tolist() == text.token_ids.tolist()
    for position in range(5):
        tree, survival = text.trees["lookup"].at(position)
        again, claimed = read.trees["lookup"].at(position)
        assert again.token_ids.tolist() == tree.token_ids.tolist()
        assert again.parents.tolist() == tree.parents.tolist()
        np.testing.assert_allclose(claimed, survival, rtol=1e-3)


def test_a_drafter_that_reads_what_the_target_thought_likely_reads_it_of_the_texts_rows():
    """It knows 4 behind 3 once the target has been there, and 4 again behind the second 3."""
    likely = [TokenLogprob(-0.1, ((token, -0.1), (8, -3.0))) for token in (3, 4, 5, 3, 4, 5)]
    recorded = Recording(
        token_array([1, 2]),
        token_array([3, 4, 5, 3, 4, 5]),
        SamplingParams(temperature=0.0),
        "copy",
        likely,
    )
    config = Config(drafters={"seen": DrafterConfig("token_recycling")})
    trees = record_trees(created(config, "seen", 32), recorded)
    assert len(trees.at(1)[0]) == 0
    assert trees.at(4)[0].token_ids[0] == 4
    stats = replay(created(config, "seen", 8), recorded, 8)
    assert stats.num_accepted == 1
