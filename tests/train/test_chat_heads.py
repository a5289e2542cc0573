"""Heads learn from recorded rows: what training computes is what serving will."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from cluster.draft.heads.checkpoint import HeadTarget
from cluster.draft.heads.eagle3 import Eagle3Head
from cluster.draft.heads.load import load_draft_head
from cluster.draft.vocabulary import load_draft_vocabulary, written_vocabulary
from cluster.errors import ConfigError
from cluster.models.made_for import MadeFor, folder_made_for
from cluster.train import chat_heads, heads
from cluster.train.chat_answers import AnswerSettings, draw_shards, read_shards
from cluster.train.chat_heads import (
    HeadBatch,
    HeadOrder,
    HeadSettings,
    evaluate,
)
from cluster.train.eagle3 import Eagle3Learner, new_head
from cluster.train.generate import GeneratedAnswer
from cluster.train.heads import MedusaLearner, new_heads, train_head
from cluster.train.trainer import Budget, TrainSettings
from tests.support.choices import by_day
from tests.support.draft.heads import ByRows

MADE_FOR = MadeFor("target", "0123")
VOCAB, TAPS = 288, (2, 1, 0, 3)
ANSWERS = AnswerSettings(
    6, max_question_tokens=10, max_answer_tokens=12, follow_up_share=0.5, taps=TAPS
)
SETTINGS = HeadSettings(
    depth=3, vocab_size=150, num_answer_tokens=200, answers=ANSWERS, exit_layer=2
)
IDS = torch.arange(0, VOCAB, 2)


@pytest.fixture(scope="module")
def answers(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[GeneratedAnswer]:
    work = tmp_path_factory.mktemp("answers")
    draw_shards(folder, work, 200, 0, ANSWERS)
    return read_shards(work)


def order_of(answers: list[GeneratedAnswer]) -> HeadOrder:
    written = written_vocabulary(IDS.numpy(), VOCAB)
    assert written is not None
    return HeadOrder(answers, written, 0)


def head_target(network: PreTrainedModel) -> HeadTarget:
    config = network.config
    ends = {
        "embedding": network.get_input_embeddings().weight.detach(),
        "output": network.get_output_embeddings().weight.detach(),
    }
    return HeadTarget(config.hidden_size, VOCAB, config.num_hidden_layers, ends.__getitem__)


def drafted_one_by_one(head: Eagle3Head, batch: HeadBatch, row: int, depth: int) -> torch.Tensor:
    """The outputs of a chain behind token row + 1, row by row: [depth, hidden]."""
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []

    def attend(
        layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        keys.append(key)
        values.append(value)
        shared = query.shape[1] // key.shape[1]
        past = torch.cat(keys).repeat_interleave(shared, 1).float()  # [past, heads, dim]
        scores = torch.einsum("qhd,khd->hqk", query, past) / query.shape[-1] ** 0.5
        weighed = torch.cat(values).repeat_interleave(shared, 1)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), weighed)

    tokens, states = batch.token_ids[0], batch.states[0]
    found: list[torch.Tensor] = []
    hidden = torch.zeros(0)
    for position in range(row + depth):
        if position <= row:
            hidden = head.fuse(states[position : position + 1, :3].flatten(1).float())
        token, place = tokens[position + 1 : position + 2], torch.tensor([position])
        output = head(token, hidden, place, ByRows(attend))
        hidden = head.handed_on(output)
        if position >= row:
            found.append(output[0])
    return torch.stack(found)


def test_recorded_rows_are_the_hidden_states_of_the_target(
    network: PreTrainedModel, answers: list[GeneratedAnswer]
):
    for answer in answers[:5]:
        text = np.concatenate([answer.prompt, answer.token_ids])[:-1]
        with torch.no_grad():
            states = network.model(
                torch.from_numpy(text).long()[None], output_hidden_states=True
            ).hidden_states
        expected = torch.stack([states[tap][0] for tap in TAPS], dim=1)
        assert answer.states is not None
        found = torch.from_numpy(np.array(answer.states)).view(torch.bfloat16)
        torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-2)


@torch.no_grad()
@pytest.mark.parametrize("first", [0, 4])
def test_training_sees_the_chains_that_serving_drafts(
    network: PreTrainedModel, answers: list[GeneratedAnswer], first: int
):
    head = new_head(network, TAPS[:3], IDS).eval()
    for parameter in head.parameters():
        parameter += 0.05 * torch.randn(parameter.shape)
    learner = Eagle3Learner(head, 3, (0, 1, 2))
    longest = max(answers, key=lambda each: len(each.prompt))
    batch = order_of(answers).batch(longest)
    drafts = learner.drafts(batch, first)
    num_tokens = batch.token_ids.shape[1]
    assert [each.shape[1] for each in drafts] == [num_tokens - 1 - first - d for d in range(3)]
    for row in (first, first + 3, num_tokens - 5):
        expected = drafted_one_by_one(head, batch, row, 3)
        for depth in range(3):
            torch.testing.assert_close(
                drafts[depth][0, row - first], expected[depth], rtol=1e-4, atol=1e-4
            )


def test_the_law_stands_where_the_token_that_it_drew_was_read_last(
    answers: list[GeneratedAnswer],
):
    answer = next(each for each in answers if len(each.token_ids) > 5)
    batch = order_of(answers).batch(answer)
    start = len(answer.prompt) - 1
    assert batch.is_known[0].nonzero()[:, 0].tolist() == list(
        range(start, start + len(answer.token_ids))
    )
    law = np.exp(answer.log_probs.astype(np.float32))
    inside = answer.candidates % 2 == 0
    np.testing.assert_allclose(batch.probs[0, start:-1].numpy(), law * inside, rtol=1e-6)
    ids = IDS[batch.candidates[0, start:-1]].numpy()
    assert (ids[inside] == answer.candidates[inside]).all()


def test_what_is_saved_is_what_was_trained(
    network: PreTrainedModel, answers: list[GeneratedAnswer], tmp_path: Path
):
    target = head_target(network)
    eagle = Eagle3Learner(new_head(network, TAPS[:3], IDS), 2, (0, 1, 2))
    eagle.save(tmp_path / "eagle", MADE_FOR)
    loaded = load_draft_head(tmp_path / "eagle", target)
    assert isinstance(loaded, Eagle3Head)
    assert (loaded.spec.taps, loaded.token_map.tolist()) == (TAPS[:3], IDS.tolist())
    for name, tensor in eagle.head.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], tensor, rtol=8e-3, atol=1e-3)
    assert "embed_tokens.weight" not in load_file(tmp_path / "eagle" / "model.safetensors")
    assert folder_made_for(tmp_path / "eagle") == MADE_FOR

    medusa = MedusaLearner(network, new_heads(network, 3), IDS, 3, 3)
    with torch.no_grad():
        for parameter in medusa.head.parameters():
            if parameter.requires_grad:
                parameter.normal_()
    medusa.save(tmp_path / "medusa", MADE_FOR)
    found = load_draft_head(tmp_path / "medusa", target)
    assert folder_made_for(tmp_path / "medusa") == MADE_FOR
    batch = order_of(answers).batch(answers[0])
    rows = batch.tapped(3)[0].float()
    expected = [medusa.logits(each[0]) for each in medusa.drafts(batch, 0)]
    logits = found(rows)[..., IDS]
    for depth, each in enumerate(expected):
        torch.testing.assert_close(logits[: len(each), depth], each, rtol=3e-2, atol=3e-1)


@pytest.mark.parametrize("kind", by_day(["eagle3"], ["drafter", "eagle3", "medusa", "early-exit"]))
def test_training_lowers_the_loss_and_resumes_to_the_bit(
    folder: Path,
    network: PreTrainedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
):
    budget, target = Budget(steps=24), folder.as_posix()
    whole = train_head(kind, target, tmp_path / "a", tmp_path / "one", SETTINGS, budget)
    held_out = read_shards(tmp_path / "a" / "answers")[::20]
    vocabulary = load_draft_vocabulary(tmp_path / "a" / kind)
    taps = () if kind == "drafter" else TAPS
    untrained = heads.new_learner(kind, network, vocabulary, taps, SETTINGS)
    untrained.depth = SETTINGS.depth
    before = evaluate(untrained, vocabulary, held_out)
    assert whole.num_answers == before.num_answers == len(held_out)
    assert len(whole.loss_nats) == 3, "chains are measured, even where one draft is learnt"
    assert sum(whole.loss_nats) < sum(before.loss_nats)
    assert 0.0 < whole.coverage < 1.0

    read = HeadOrder.read

    def interrupted(order: HeadOrder, first: int, count: int) -> HeadBatch:
        if first >= 30:  # of four a step
            raise KeyboardInterrupt
        return read(order, first, count)

    monkeypatch.setattr(chat_heads, "TrainSettings", partial(TrainSettings, checkpoint_every_s=0.0))
    with monkeypatch.context() as patched:
        patched.setattr(HeadOrder, "read", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train_head(kind, target, tmp_path / "b", tmp_path / "two", SETTINGS, budget)
    train_head(kind, target, tmp_path / "b", tmp_path / "two", SETTINGS, budget)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_answers_without_hidden_rows_are_refused(
    network: PreTrainedModel, answers: list[GeneratedAnswer]
):
    learner = MedusaLearner(network, new_heads(network, 1), IDS, 3, 1)
    plain = GeneratedAnswer(*(getattr(answers[0], name) for name in GeneratedAnswer.__slots__[:4]))
    with pytest.raises(ConfigError, match="draw them anew"):
        learner.drafts(order_of([plain]).batch(plain), 0)


def test_layers_that_the_target_does_not_have_are_refused_before_it_answers(
    folder: Path, tmp_path: Path
):
    settings = replace(SETTINGS, num_layers=99)
    with pytest.raises(ConfigError, match="--layers 99: the target has 3; choose 1 to 3"):
        train_head("drafter", str(folder), tmp_path, tmp_path / "x", settings, Budget(steps=1))
    assert not list(tmp_path.iterdir())
