"""Heads learn from recorded rows: what training computes is what serving will.  An early exit
begins as the untrained one, learns, and is served as it was trained."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from cluster.core import token_array
from cluster.draft.heads.checkpoint import HeadTarget
from cluster.draft.heads.eagle3 import Eagle3Head
from cluster.draft.heads.load import load_draft_head
from cluster.draft.vocabulary import DraftVocabulary, load_draft_vocabulary, written_vocabulary
from cluster.models.made_for import MadeFor, folder_made_for
from cluster.train import chat_heads, runs
from cluster.train.chat_answers import AnswerSettings, draw_shards, read_shards
from cluster.train.chat_heads import HeadBatch, HeadOrder, HeadSettings, evaluate
from cluster.train.generate import GeneratedAnswer
from cluster.train.heads import (
    Eagle3Learner,
    ExitLearner,
    MedusaLearner,
    new_exit,
    new_head,
    new_heads,
)
from cluster.train.runs import train_head
from cluster.train.trainer import Budget, TrainSettings
from tests.draft.test_own_layers import greedy_text, recorded
from tests.support.choices import by_day
from tests.support.draft.heads import ByRows, random_medusa
from tests.support.draft.inside import GREEDY, Inside, config_of
from tests.support.draft.plain import attend
from tests.support.engine.driver import prompt
from tests.support.engine.parts import plain
from tests.support.errors import config_error
from tests.support.worker.rounds import Session

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
    return HeadOrder(answers, written_vocabulary(IDS.numpy(), VOCAB), 0)


def head_target(network: PreTrainedModel) -> HeadTarget:
    config = network.config
    ends = {
        "embedding": network.get_input_embeddings().weight.detach(),
        "output": network.get_output_embeddings().weight.detach(),
    }
    return HeadTarget(config.hidden_size, VOCAB, config.num_hidden_layers, ends.__getitem__)


def drafted_one_by_one(head: Eagle3Head, batch: HeadBatch, row: int, depth: int) -> torch.Tensor:
    """The outputs of a chain behind token row + 1, row by row: [depth, hidden]."""
    keys, values = [], []

    def see(layer, query, key, value):
        keys.append(key)
        values.append(value)
        return attend(query, torch.cat(keys), torch.cat(values))

    tokens, states = batch.token_ids[0], batch.states[0]
    found = []
    hidden = torch.zeros(0)
    for position in range(row + depth):
        if position <= row:
            hidden = head.fuse(states[position : position + 1, :3].flatten(1).float())
        token, place = tokens[position + 1 : position + 2], torch.tensor([position])
        output = head(token, hidden, place, ByRows(see))
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
    learner = Eagle3Learner(head, 3)
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
    eagle = Eagle3Learner(new_head(network, TAPS[:3], IDS), 2)
    eagle.save(tmp_path / "eagle", MADE_FOR)
    loaded = load_draft_head(tmp_path / "eagle", target)
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
    untrained = runs.new_learner(kind, network, vocabulary, taps, SETTINGS)
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
    with config_error("draw them anew"):
        learner.drafts(order_of([plain]).batch(plain), 0)


def test_layers_that_the_target_does_not_have_are_refused_before_it_answers(
    folder: Path, tmp_path: Path
):
    settings = replace(SETTINGS, num_layers=99)
    with config_error("--layers 99: the target has 3; choose 1 to 3"):
        train_head("drafter", str(folder), tmp_path, tmp_path / "x", settings, Budget(steps=1))
    assert not list(tmp_path.iterdir())


# Early exits.

EXIT = TAPS[0]


def random_exit(folder: Path, network: PreTrainedModel) -> Path:
    head = new_exit(network, EXIT)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in head.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter += 0.3 * noise / (parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else 1)
    ExitLearner(network, head, torch.arange(VOCAB), 0).save(folder, MADE_FOR)
    return folder


def test_it_begins_as_the_untrained_exit_and_drafts_from_the_rows_of_drafts(
    folder: Path, network: PreTrainedModel, answers: list[GeneratedAnswer]
):
    """Behind right drafts the rows are the text's: depth d is depth 0, d tokens later."""
    ids = np.arange(VOCAB, dtype=np.int32)
    batch = HeadOrder(answers, DraftVocabulary(ids, ids), 0).batch(answers[0])
    learner = ExitLearner(network, new_exit(network, EXIT), torch.arange(VOCAB), 0)
    learner.depth = 3
    with torch.no_grad():
        first, second, third = learner.drafts(batch, 4)
        logits = learner.logits(first[0])
    assert first.shape[1] == batch.token_ids.shape[1] - 1 - 4
    assert torch.equal(first[:, 1:], second)
    assert torch.equal(first[:, 2:], third)
    text = np.concatenate([answers[0].prompt, answers[0].token_ids])[:-1]
    expected = plain(folder, range(EXIT), token_array(text))
    torch.testing.assert_close(logits[len(text) - 6], expected, rtol=3e-2, atol=6e-2)


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_it_is_served_as_it_was_trained(
    architecture: str, checkpoint_factory: Callable[..., Path], tmp_path: Path
):
    """The logits of every drafting row: of the whole vocabulary, by the scaled and translated row
    behind the exit layer and the final norm."""
    folder = checkpoint_factory(architecture)
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    exit_folder = random_exit(tmp_path, network)
    inside = Inside(config_of(folder, "early_exit", exit_folder))
    assert inside.drafter.made_for == folder_made_for(exit_folder) == MADE_FOR
    inside.drafter._rules = None
    rows = recorded(inside)
    session = Session("a", prompt(15).tolist(), GREEDY)
    inside.decode([session], 8)
    assert len(rows) > 10
    head = load_draft_head(exit_folder, head_target(network))
    cap = getattr(network.config, "final_logit_softcapping", None)
    for text, logits in rows[::4]:
        with torch.no_grad():
            states = network.model(
                torch.tensor([text]), output_hidden_states=True, use_cache=False
            ).hidden_states
            hidden = head(network.model.norm(states[EXIT][0, -1]))
            expected = hidden @ network.get_output_embeddings().weight.T
        if cap:
            expected = cap * torch.tanh(expected / cap)
        # Weights are rounded to bfloat16.
        scale = float(expected.abs().max())
        torch.testing.assert_close(logits[: len(expected)], expected, rtol=0, atol=1e-2 * scale)


def test_the_target_keeps_its_own_output_layer(
    folder: Path, network: PreTrainedModel, tmp_path: Path
):
    """The control of all above: drafts by other weights, and the text of the plain model."""
    inside = Inside(config_of(folder, "early_exit", random_exit(tmp_path, network)))
    session = Session("a", prompt(15).tolist(), GREEDY)
    inside.decode([session], 12)
    output = session.tokens[15:]
    assert output == greedy_text(folder, range(3), session.tokens[:15], len(output))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"hidden_size": 7}, "hidden_size is 7, the target's"),
        ({"vocab_size": 7}, "vocab_size is 7, the target's 288"),
        ({"exit_layer": 3}, "exit_layer 3 does not lie between the target's 3 layers"),
        ({"exit_layer": 0}, "exit_layer 0 does not lie between"),
    ],
)
def test_an_exit_of_another_target_is_refused(
    changed: dict[str, Any], said: str, network: PreTrainedModel, tmp_path: Path
):
    path = random_exit(tmp_path, network) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    with config_error(said):
        load_draft_head(tmp_path, head_target(network))


def test_options_that_contradict_the_folder_are_refused(
    folder: Path, network: PreTrainedModel, tmp_path: Path
):
    exit_folder = random_exit(tmp_path / "exit", network)
    with config_error(r"exit_layer: 1 is not the 2 that"):
        Inside(config_of(folder, "early_exit", exit_folder, options={"exit_layer": 1}))
    medusa = random_medusa(tmp_path / "medusa", folder)
    with config_error(r"holds no early exit; it is read by .* medusa"):
        Inside(config_of(folder, "early_exit", medusa))
    with config_error("exit layer 3: the target has 3 layers"):
        new_exit(network, 3)
