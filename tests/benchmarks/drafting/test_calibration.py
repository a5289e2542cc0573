"""How the calibration benchmark evaluates the product's metrics."""

from __future__ import annotations

from benchmarks.drafting.calibration import errors_of, kinds_of, missed, summary
from benchmarks.support.record import ROOT
from cluster.config.file import load

TEXT = """\
# TYPE drafthouse_survival_calibration_error gauge
drafthouse_survival_calibration_error{drafter="lm",task="code",law="greedy"} 0.02
drafthouse_survival_calibration_error{drafter="lm",task="prose",law="greedy"} 0.08
drafthouse_survival_calibration_error{drafter="ngram",task="code",law="greedy"} 0.5
# TYPE drafthouse_draft_tokens_total counter
drafthouse_draft_tokens_total{drafter="lm",task="code"} 300
drafthouse_draft_tokens_total{drafter="lm",task="prose"} 100
"""


def test_tasks_count_by_their_nodes() -> None:
    found = summary(errors_of(TEXT, "lm"))
    assert found == {"error": 0.035, "nodes": 400.0, "by task": {"code": 0.02, "prose": 0.08}}


def test_a_drafter_that_was_never_verified_misses_the_bar() -> None:
    assert summary(errors_of(TEXT, "nobody"))["error"] is None
    report = {
        "lm": {"greedy": summary(errors_of(TEXT, "lm"))},
        "nobody": {"greedy": summary({})},
        "bad": {"t0.8": {"error": 0.051, "nodes": 10.0}},
    }
    assert [line.split(":")[0] for line in missed(report)] == ["nobody, greedy", "bad, t0.8"]


def test_drafters_are_measured_on_their_own_tasks() -> None:
    config = load(ROOT / "configs" / "tiny.yaml").config
    assert kinds_of(config, "code") == ["code", "edit"]
    assert kinds_of(config, "prose") == ["prose"]
    assert set(kinds_of(config, "ngram")) == {"code", "prose", "json", "edit", "chat"}
