"""A chat model's own answers, and the drafter that learns from them."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from benchmarks.replay.along import Recording, replay
from cluster.core import token_array
from cluster.draft.vocabulary import DraftVocabulary
from cluster.errors import ConfigError
from cluster.models.made_for import MadeFor
from cluster.train import chat_answers
from cluster.train.chat_answers import AnswerSettings, ChatModel, draw_shards, read_shards
from cluster.train.chat_drafter import (
    DraftModelLearner,
    frequent_vocabulary,
    smaller_copy,
)
from cluster.train.chat_heads import HeadLoss, HeadOrder
from cluster.train.generate import GeneratedAnswer
from tests.support.draft.author import GREEDY, draft_engine, lm_drafter

VOCAB = 288
ANSWERS = AnswerSettings(6, max_question_tokens=10, max_answer_tokens=12, follow_up_share=0.5)


@pytest.fixture(scope="module")
def shards(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("answers")
    draw_shards(folder, work, 200, 0, ANSWERS)
    return work


def order_of(answers: list[GeneratedAnswer], vocabulary: DraftVocabulary) -> HeadOrder:
    return HeadOrder(answers, vocabulary, 3)


def test_answers_carry_the_law_by_which_the_target_wrote_them(
    network: PreTrainedModel, shards: Path
):
    answers = read_shards(shards)
    assert sum(len(each.token_ids) for each in answers) > 150
    num_greedy = 0
    for answer in answers:
        ids = torch.from_numpy(np.concatenate([answer.prompt, answer.token_ids])).long()
        with torch.no_grad():
            logits = network(ids[None]).logits[0, len(answer.prompt) - 1 : -1].float()
        expected = torch.log_softmax(logits, -1).numpy()
        places = np.arange(len(answer.token_ids))[:, None]
        found = answer.log_probs.astype(np.float32)
        assert expected[places, answer.candidates] == pytest.approx(found, abs=2e-2)
        assert (np.diff(found, axis=1) <= 0).all()
        num_greedy += bool((answer.candidates[:, 0] == answer.token_ids).all())
    assert len(answers) / 4 < num_greedy < len(answers), "about half of them are greedy"


def test_questions_are_the_users_turn_and_some_are_followed_up(shards: Path, folder: Path):
    tokenizer = ChatModel.load(folder, ANSWERS)._tokenizer
    turns = [
        tokenizer.decode(each.prompt).count("<|im_start|>user") for each in read_shards(shards)
    ]
    assert set(turns) == {1, 2}
    prompts = [each.prompt.tobytes() for each in read_shards(shards)]
    assert len(set(prompts)) == len(prompts)


def test_a_continued_run_keeps_its_shards_and_draws_the_ones_that_are_missing(
    folder: Path, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    draw_shards(folder, tmp_path, 1, 0, ANSWERS)
    first = sorted(tmp_path.iterdir())
    assert [path.name for path in first] == ["answers-00000.pt"]
    time = first[0].stat().st_mtime_ns
    draw_shards(folder, tmp_path, 200, 0, ANSWERS)
    assert first[0].stat().st_mtime_ns == time
    same = zip(read_shards(tmp_path), read_shards(shards), strict=True)
    for one, other in same:
        assert one.prompt.tolist() == other.prompt.tolist()
        assert one.token_ids.tolist() == other.token_ids.tolist()
    # What is there needs no model.
    monkeypatch.setattr(chat_answers.ChatModel, "load", None)
    draw_shards(folder, tmp_path, 200, 0, ANSWERS)


def test_answers_depend_on_the_seed_and_not_on_how_prompts_come_into_steps(folder: Path):
    def token_ids(max_batch_tokens: int) -> list[list[int]]:
        engine = draft_engine(folder, max_batch_tokens=max_batch_tokens, prefix_cache=False)
        model = ChatModel(engine, chat_answers.load_pretrained_tokenizer(folder), ANSWERS)
        answers = model.answers(torch.Generator().manual_seed(1))
        return [each.token_ids.tolist() for each in answers]

    assert token_ids(16) == token_ids(256)


def test_a_system_prompt_stands_before_every_question_and_is_kept_with_the_answers(
    folder: Path, tmp_path: Path
):
    settings = dataclasses.replace(ANSWERS, system_prompt="Write letters.")
    draw_shards(folder, tmp_path, 1, 0, settings)
    tokenizer = chat_answers.load_pretrained_tokenizer(folder)
    prompts = [tokenizer.decode(each.prompt) for each in read_shards(tmp_path)]
    assert prompts
    assert all(each.startswith("<|im_start|>system\nWrite letters.<|im_end|>") for each in prompts)
    draw_shards(folder, tmp_path, 1, 0, settings)
    with pytest.raises(ConfigError, match=r"system prompt 'Write letters\.', not ''"):
        draw_shards(folder, tmp_path, 1, 0, ANSWERS)


def test_a_model_without_a_chat_template_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch):
    plain = chat_answers.load_pretrained_tokenizer(folder)
    plain.chat_template = None
    with pytest.raises(ConfigError, match="no chat template"):
        ChatModel(draft_engine(folder), plain, ANSWERS)


def test_the_draft_vocabulary_holds_what_is_written_most(network: PreTrainedModel, shards: Path):
    answers = read_shards(shards)
    reduced = frequent_vocabulary(answers, network, 100, "hash")
    assert len(reduced.target_ids) == 100
    assert reduced.draft_id_of(0) is not None, "the end of a text is always inside"
    expected = np.zeros(VOCAB)
    for answer in answers:
        np.add.at(expected, answer.candidates, np.exp(answer.log_probs.astype(float)))
    inside = np.isin(np.arange(VOCAB), reduced.target_ids)
    special = [0, 1]
    expected[special] = 0.0
    assert expected[inside].sum() > expected[~inside].sum()
    assert np.sort(expected[inside])[2:].min() >= expected[~inside].max() - 1.0


def test_with_all_layers_and_tokens_the_copy_starts_as_the_target(network: PreTrainedModel):
    answer = GeneratedAnswer(
        np.arange(4, 9, dtype=np.int32),
        np.arange(20, 26, dtype=np.int32),
        np.tile(np.arange(VOCAB, dtype=np.int32), (6, 1)),
        np.zeros((6, VOCAB), np.float16),
    )
    reduced = frequent_vocabulary([answer], network, VOCAB, "")
    copy = smaller_copy(network, reduced, network.config.num_hidden_layers)
    ids = torch.arange(4, 40)[None]
    torch.testing.assert_close(copy(ids).logits, network(ids).logits)
    with pytest.raises(ConfigError, match="choose 1 to 3"):
        smaller_copy(network, reduced, 4)
    assert smaller_copy(network, reduced, 2).config.num_hidden_layers == 2


def test_the_loss_is_least_where_the_drafter_has_the_targets_law(
    network: PreTrainedModel, shards: Path
):
    answers = read_shards(shards)[:1]
    reduced = frequent_vocabulary(answers, network, VOCAB, "")
    batch = order_of(answers, reduced).batch(answers[0])
    exact, smaller = (
        HeadLoss(DraftModelLearner(smaller_copy(network, reduced, num_layers), reduced))
        for num_layers in (network.config.num_hidden_layers, 1)
    )
    entropy = -(batch.probs * batch.probs.clamp(min=1e-9).log()).sum() / batch.is_known.sum()
    with torch.no_grad():
        assert exact(batch).item() == pytest.approx(entropy.item(), abs=0.05)
        assert smaller(batch).item() > entropy.item() + 0.1


@pytest.mark.parametrize("weights", ["bfloat16", "int8"])
def test_a_drafter_drafts_alike_however_it_is_written(
    network: PreTrainedModel, shards: Path, tmp_path: Path, weights: str
):
    answers = read_shards(shards)
    reduced = frequent_vocabulary(answers, network, VOCAB, "")
    learner = DraftModelLearner(smaller_copy(network, reduced, 3), reduced, weights)
    learner.save(tmp_path / weights, MadeFor())
    answer = max(answers, key=lambda each: len(each.token_ids))
    params = dataclasses.replace(GREEDY, max_tokens=64)
    recording = Recording(token_array(answer.prompt), token_array(answer.token_ids), params)
    drafted = replay(lm_drafter(draft_engine(tmp_path / weights)), recording, 4)
    assert drafted.num_draft_tokens > 0
    assert (tmp_path / weights / "model.int8.safetensors").exists() == (weights == "int8")
