"""A trained early exit: it begins as the untrained one, learns, and is served as it was trained."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from cluster.core import SamplingParams, token_array
from cluster.draft.heads.checkpoint import HeadTarget
from cluster.draft.heads.exit import ExitHead
from cluster.draft.heads.load import load_draft_head
from cluster.draft.vocabulary import DraftVocabulary
from cluster.errors import ConfigError
from cluster.models.made_for import MadeFor, folder_made_for
from cluster.train.chat_answers import AnswerSettings, draw_shards, read_shards
from cluster.train.chat_heads import HeadOrder
from cluster.train.heads import ExitLearner, new_exit
from tests.draft.test_own_layers import recorded
from tests.support.draft.heads import random_medusa
from tests.support.draft.inside import Inside, config_of
from tests.support.engine.driver import prompt
from tests.support.engine.parts import plain
from tests.support.worker.rounds import Session

GREEDY = SamplingParams(temperature=0.0, max_tokens=256)
VOCAB, EXIT = 288, 2
ANSWERS = AnswerSettings(6, max_question_tokens=10, max_answer_tokens=12, follow_up_share=0.5)


def random_exit(folder: Path, network: PreTrainedModel, exit_layer: int = EXIT) -> Path:
    head = new_exit(network, exit_layer)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in head.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter += 0.3 * noise / (parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else 1)
    learner = ExitLearner(network, head, torch.arange(VOCAB), 0)
    learner.save(folder, MadeFor("target", "0123"))
    return folder


def loaded(folder: Path, network: PreTrainedModel) -> ExitHead:
    config = network.config
    sizes = config.hidden_size, config.vocab_size, config.num_hidden_layers
    head = load_draft_head(folder, HeadTarget(*sizes, lambda name: torch.empty(0)))
    assert isinstance(head, ExitHead)
    return head


def test_it_begins_as_the_untrained_exit_and_drafts_from_the_rows_of_drafts(
    folder: Path, network: PreTrainedModel, tmp_path: Path
):
    """Behind right drafts the rows are the text's: depth d is depth 0, d tokens later."""
    draw_shards(folder, tmp_path, 60, 0, replace(ANSWERS, taps=(EXIT,)))
    answers = read_shards(tmp_path)
    ids = np.arange(VOCAB, dtype=np.int32)
    batch = HeadOrder(answers, DraftVocabulary(ids, ids), 0).batch(answers[0])
    head = new_exit(network, EXIT)
    learner = ExitLearner(network, head, torch.from_numpy(ids).long(), 0, depth=3)
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
    assert inside.drafter.made_for == folder_made_for(exit_folder) == MadeFor("target", "0123")
    inside.drafter._rules = None
    rows = recorded(inside)
    session = Session("a", prompt(15).tolist(), GREEDY)
    inside.decode([session], 8)
    assert len(rows) > 10
    head, cap = (
        loaded(exit_folder, network),
        network.config.final_logit_softcapping if (architecture == "gemma2") else None,
    )
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
    tokens = session.tokens[:15]
    for _ in range(len(session.tokens) - 15):
        tokens.append(int(plain(folder, [0, 1, 2], token_array(tokens)).argmax()))
    assert session.tokens == tokens


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
    with pytest.raises(ConfigError, match=said):
        loaded(tmp_path, network)


def test_options_that_contradict_the_folder_are_refused(
    folder: Path, network: PreTrainedModel, tmp_path: Path
):
    exit_folder = random_exit(tmp_path / "exit", network)
    with pytest.raises(ConfigError, match=r"exit_layer: 1 is not the 2 that"):
        Inside(config_of(folder, "early_exit", exit_folder, options={"exit_layer": 1}))
    medusa = random_medusa(tmp_path / "medusa", folder)
    with pytest.raises(ConfigError, match=r"holds no early exit; it is read by .* medusa"):
        Inside(config_of(folder, "early_exit", medusa))
    with pytest.raises(ConfigError, match="exit layer 3: the target has 3 layers"):
        new_exit(network, 3)
