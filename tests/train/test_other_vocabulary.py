"""A drafter with a tokenizer of its own reads the same text, and learns the laws it can."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.support.options import DEMO_TARGET
from cluster.draft.vocabulary import load_draft_vocabulary
from cluster.models.fingerprint import folder_tokenizer_hash
from cluster.models.made_for import folder_made_for
from cluster.models.token_bytes import TokenBytes
from cluster.train.chat_answers import AnswerSettings, draw_shards, read_shards
from cluster.train.chat_drafter import DraftModelLearner, Rereading, smaller_copy
from cluster.train.chat_heads import HeadSettings, evaluate
from cluster.train.generate import GeneratedAnswer
from cluster.train.heads import train_head
from cluster.train.trainer import Budget

ANSWERS = AnswerSettings(6, max_question_tokens=10, max_answer_tokens=12, follow_up_share=0.5)
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
    target = folder.as_posix()
    out = tmp_path / "out"
    trained = train_head("drafter", target, tmp_path / "work", out, SETTINGS, Budget(steps=30))
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
