"""A chat model's own answers, and the drafter that learns from them; with a tokenizer of its own it
reads the same text, and learns the laws it can."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.replay.along import Recording, replay
from benchmarks.support.options import DEMO_TARGET
from cluster.core import token_array
from cluster.draft.vocabulary import load_draft_vocabulary
from cluster.models.fingerprint import folder_tokenizer_hash
from cluster.models.made_for import MadeFor, folder_made_for
from cluster.models.token_bytes import TokenBytes
from cluster.train import chat_answers
from cluster.train.chat_answers import AnswerSettings, ChatModel, draw_shards, read_shards
from cluster.train.chat_drafter import (
    DraftModelLearner,
    Rereading,
    frequent_vocabulary,
    smaller_copy,
)
from cluster.train.chat_heads import HeadLoss, HeadOrder, HeadSettings, evaluate
from cluster.train.generate import GeneratedAnswer
from cluster.train.runs import train_head
from cluster.train.trainer import Budget
from tests.support.draft.author import GREEDY, VOCAB, draft_engine, lm_drafter
from tests.support.errors import config_error

ANSWERS = AnswerSettings(6, max_question_tokens=10, max_answer_tokens=12, follow_up_share=0.5)


@pytest.fixture(scope="module")
def shards(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("answers")
    draw_shards(folder, work, 200, 0, ANSWERS)
    return work


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
    for one, other in zip(read_shards(tmp_path), read_shards(shards), strict=True):
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
    endless = dataclasses.replace(ANSWERS, system_prompt="a long story " * 999)
    with config_error("no question is answered"):
        draw_shards(folder, tmp_path / "endless", 1, 0, endless)
    with config_error(r"system prompt 'Write letters\.', not ''"):
        draw_shards(folder, tmp_path, 1, 0, ANSWERS)


def test_a_model_without_a_chat_template_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch):
    plain = chat_answers.load_pretrained_tokenizer(folder)
    plain.chat_template = None
    with config_error("no chat template"):
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
    expected[[0, 1]] = 0.0  # special ones
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
    with config_error("choose 1 to 3"):
        smaller_copy(network, reduced, 4)
    assert smaller_copy(network, reduced, 2).config.num_hidden_layers == 2


def test_the_loss_is_least_where_the_drafter_has_the_targets_law(
    network: PreTrainedModel, shards: Path
):
    answers = read_shards(shards)[:1]
    reduced = frequent_vocabulary(answers, network, VOCAB, "")
    batch = HeadOrder(answers, reduced, 3).batch(answers[0])
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


# Of another tokenizer.

SETTINGS = HeadSettings(
    depth=2, num_answer_tokens=200, answers=ANSWERS, num_layers=2, tokenizer=str(DEMO_TARGET)
)


@pytest.fixture(scope="module")
def reading(folder: Path, network: PreTrainedModel) -> Rereading:
    return Rereading(folder, DEMO_TARGET, network)


def answer_of(target: TokenBytes, prompt: str, text: str) -> GeneratedAnswer:
    """An answer with the target's law on itself and on a token after it."""
    written = np.array(target.encode(text), np.int32)
    candidates = np.stack([written, (written + 1) % len(target.bytes_of)], axis=1)
    log_probs = np.log(np.tile(np.float16([0.75, 0.25]), (len(written), 1)))
    ids = np.array(target.encode(prompt), np.int32)
    return GeneratedAnswer(ids, written, candidates, log_probs.astype(np.float16))


@pytest.mark.parametrize(
    "text", ["for each in names:\n    print(each)", "naïve 漢字 🙂🙂 end", "\r\n\t"]
)
def test_the_text_is_the_same_and_known_laws_are_the_targets(
    folder: Path, reading: Rereading, text: str
):
    target, drafter = TokenBytes.load(folder), reading.drafter
    answer = answer_of(target, f"Say {text}", text)
    found = reading(answer)
    assert found.prompt.tolist() == drafter.encode(f"Say {text}")
    assert drafter.decode(found.token_ids.tolist()) == text.encode()
    assert len(found.token_ids) == len(found.candidates) == len(found.log_probs)

    known, num_known, written = np.isfinite(found.log_probs), 0, b""
    starts = {target.decode(answer.token_ids[:each]): each for each in range(len(answer.token_ids))}
    for row, token_id in enumerate(found.token_ids.tolist()):
        for place in np.flatnonzero(known[row]):
            law = answer.candidates[starts[written]]
            same = drafter.bytes_of[found.candidates[row, place]]
            assert same == target.bytes_of[law[place]]
            num_known += 1
        written += drafter.bytes_of[token_id]
    shared = set(drafter.bytes_of)
    lone = [each for each in answer.token_ids.tolist() if target.bytes_of[each] in shared]
    assert num_known >= len(lone) > 0


def test_the_first_weights_are_the_targets_where_tokens_are_the_same(
    folder: Path, network: PreTrainedModel, reading: Rereading
):
    renamed = reading.renamed(network)
    assert renamed.config.vocab_size == len(reading.drafter.bytes_of)
    ours, theirs = renamed.get_output_embeddings().weight, network.get_output_embeddings().weight
    assert torch.isfinite(ours).all()
    (letter,), (draft_letter,) = TokenBytes.load(folder).encode("e"), reading.drafter.encode("e")
    torch.testing.assert_close(ours[draft_letter], theirs[letter])
    torch.testing.assert_close(
        renamed.get_input_embeddings().weight[draft_letter],
        network.get_input_embeddings().weight[letter],
    )
    assert len(network.get_input_embeddings().weight) != len(reading.drafter.bytes_of), "unchanged"


def test_training_gives_an_ordinary_model_with_the_other_tokenizer(
    folder: Path, network: PreTrainedModel, reading: Rereading, tmp_path: Path
):
    out = tmp_path / "out"
    trained = train_head("drafter", str(folder), tmp_path / "work", out, SETTINGS, Budget(steps=30))
    assert folder_tokenizer_hash(out) == folder_tokenizer_hash(DEMO_TARGET)
    assert load_draft_vocabulary(out) is None
    assert folder_made_for(out).name
    saved = AutoModelForCausalLM.from_pretrained(out)
    assert saved.config.vocab_size == len(reading.drafter.bytes_of)
    assert saved.config.num_hidden_layers == 2
    assert TokenBytes.load(out).ends == reading.drafter.ends, "not the target's ids"

    draw_shards(folder, tmp_path / "work" / "answers", 1, 0, ANSWERS)
    held_out = list(map(reading, read_shards(tmp_path / "work" / "answers")[::20]))
    vocabulary = reading.vocabulary
    untrained = smaller_copy(reading.renamed(network), vocabulary, 2)
    before = evaluate(DraftModelLearner(untrained, vocabulary), vocabulary, held_out)
    assert trained.loss_nats[0] < before.loss_nats[0]
