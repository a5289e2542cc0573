"""Texts without a class are put down to the one whose drafters are right in them, or to none."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks.replay.tasks import BAR, LEAD_OF_BAR, artificial
from cluster.config.schema import Config
from cluster.core import TokenTree, token_array
from cluster.plan.samples import Tally
from cluster.plan.scores import DraftScores
from cluster.plan.task_inference import TaskInference
from cluster.plan.texts import Text
from cluster.spec.acceptance import Seen
from cluster.spec.token_log import TokenLog

CLASSES = ("code", "letters")


def text(task: str, *, is_sampled: bool = False) -> Text:
    return Text("r", (task, is_sampled), TokenLog(token_array([5])))


def fed(inference: TaskInference, own: Text, accepted: int, count: int = 30) -> Text:
    """Enter trees of one drafter, of which so many nodes are right."""
    for _ in range(count):
        inference.learn(own, "lm", accepted)
    return own


def taught(adapter: str = "") -> TaskInference:
    inference = TaskInference(("default", *CLASSES))
    fed(inference, text(f"code{adapter}"), 4)
    fed(inference, text(f"letters{adapter}"), 0)
    return inference


def test_most_texts_are_put_down_to_their_own_class_after_64_tokens() -> None:
    """Artificial profiles: three specialists, each with a lead in its own class."""
    found = artificial(LEAD_OF_BAR, seeds=[0])
    assert found.right >= BAR
    assert found.none_right is not None
    assert found.none_right >= BAR


@pytest.mark.parametrize(("accepted", "task"), [(4, "code"), (0, "letters")])
def test_a_text_without_a_class_gets_the_group_of_the_one_that_it_is_like(
    accepted: int, task: str
) -> None:
    assert fed(taught(), text("default"), accepted, 15).group == ("default", False)
    assert fed(taught(), text("default"), accepted).group == (task, False)
    assert fed(taught(), text("unknown"), accepted).group == (task, False)


def test_a_text_whose_request_named_a_class_keeps_it() -> None:
    assert fed(taught(), text("code"), 0, 200).group == ("code", False)


def test_a_text_that_changes_is_put_down_anew() -> None:
    inference = taught()
    fed(inference, text("default"), 2, 300)
    own = fed(inference, text("default"), 4)
    assert own.group == ("code", False)
    assert fed(inference, own, 0, 60).group == ("letters", False)


def test_a_text_like_those_without_a_class_stays_without() -> None:
    inference = taught()
    for _ in range(20):
        fed(inference, text("default"), 2, 10)
    assert fed(inference, text("default"), 2).group == ("default", False)


def test_laws_and_adapters_are_told_apart() -> None:
    inference = taught("@german")
    assert fed(inference, text("default"), 4).group == ("default", False)
    assert fed(inference, text("default@german"), 4).group == ("code@german", False)
    assert fed(inference, text("default@german", is_sampled=True), 4).group[0] == "default@german"


def test_what_was_learned_outlives_a_restart() -> None:
    inference = TaskInference(CLASSES)
    inference.restore(json.loads(json.dumps(taught().export())))
    assert fed(inference, text("default"), 4).group == ("code", False)
    with pytest.raises(ValueError, match="another form"):
        inference.restore([["", "lm", "code", [1.0]]])


def test_a_drafter_that_learns_is_followed() -> None:
    inference = taught()
    fed(inference, text("code"), 4, 20_000)
    fed(inference, text("code"), 1, 20_000)
    fed(inference, text("letters"), 4, 20_000)
    assert fed(inference, text("default"), 4).group == ("letters", False)


def test_scores_and_a_metric_follow_the_class() -> None:
    scores, samples = DraftScores(tasks=TaskInference(CLASSES)), Tally()
    chain, claimed = TokenTree.chain([1, 1, 1, 1]), np.full(4, 0.9, np.float32)

    def write(task: str, token: int) -> Text:
        own = text(task)
        for _ in range(60):
            own.seen.append(Seen.of("lm", own.group, len(own.tokens), chain, claimed))
            own.tokens.append(token_array([token] * 5))
            scores.score([own])
        scores.score([own], ends=True)
        return own

    write("code", 1)
    write("letters", 9)
    before = scores.acceptance.score("lm", ("code", False)).num_trees
    assert write("default", 1).group == ("code", False)
    assert scores.acceptance.score("lm", ("code", False)).num_trees > before
    scores.record(samples)
    told = {(each.metric, each.labels): each.value for each in samples.take()}
    assert told["drafthouse_inferred_tasks", ("auto:code",)] == 1.0


def test_classes_are_inferred_where_the_configuration_says_so() -> None:
    tasks = {"code": ("lm",)}
    assert TaskInference.of(Config(tasks=tasks)) is None
    inference = TaskInference.of(Config(tasks=tasks, infer_tasks=True))
    assert inference is not None
    assert inference.classes == ("code",)
