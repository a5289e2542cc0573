"""The loop beside its oracle, on texts from a file."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.replay.ensembles import main
from benchmarks.replay.synthetic import KINDS, Leads, specialists
from cluster.simulate.texts import save


def test_recorded_texts_are_played_beside_their_own_specialists(tmp_path: Path) -> None:
    texts, out = tmp_path / "texts.npz", tmp_path / "out.jsonl"
    save(texts, specialists(3, Leads(0.9, 0.1), length=240), {})
    words = ["--texts", str(texts), "--out", str(out), "--machines", "gpu", "--seconds", "4"]
    assert main(words) == 0
    one, four = map(json.loads, out.read_text().splitlines())
    assert (one["texts"], one["num_sequences"], four["num_sequences"]) == ("greedy", 1, 4)
    speeds = one["speeds"]
    # Alone each is right in a third of the texts; the oracle asks the right one in all.
    assert speeds["oracle"]["whole"] > max(speeds[each]["whole"] for each in KINDS)
