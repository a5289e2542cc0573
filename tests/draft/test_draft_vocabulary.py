"""A draft model with fewer tokens than the target drafts exactly those that it has."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from cluster.config.schema import Config, CoordinatorConfig, DrafterConfig
from cluster.core import SamplingParams
from cluster.draft.base import DrafterContext
from cluster.draft.candidates import RowContext, rank_rows
from cluster.draft.lm import LMDrafter
from cluster.draft.lm_options import LMOptions
from cluster.draft.vocabulary import FILE_NAME, DraftVocabulary, load_draft_vocabulary
from cluster.engine.cpu import kernels
from cluster.errors import ConfigError
from cluster.local import LLM
from cluster.spec.noise import gumbel
from cluster.train.chat_drafter import save_drafter, smaller_copy
from tests.support.draft.author import (
    GREEDY,
    Author,
    draft_engine,
    lm_drafter,
    target_text,
    write,
)
from tests.support.local_models import PROMPTS, target

VOCAB = 288
# Every fourth token is outside; the end of the text is inside.
INSIDE = np.array([token for token in range(VOCAB) if token % 4 != 3], np.int32)
PROMPT = np.random.default_rng(7).integers(4, VOCAB, 21).tolist()
LAWS = {
    "greedy": GREEDY,
    "temperature 0.8": dataclasses.replace(GREEDY, temperature=0.8, seed=11, stream=2),
    "top-k": dataclasses.replace(GREEDY, temperature=1.0, seed=3, top_k=VOCAB),
    "bias": dataclasses.replace(
        GREEDY, temperature=0.9, seed=4, logit_bias=((17, 4.0), (19, 4.0), (30, -100.0))
    ),
    "penalties": dataclasses.replace(GREEDY, frequency_penalty=0.3, repetition_penalty=1.2),
}


def vocabulary() -> DraftVocabulary:
    read = np.searchsorted(INSIDE, np.arange(VOCAB)).clip(0, len(INSIDE) - 1).astype(np.int32)
    return DraftVocabulary(INSIDE, read)


@pytest.fixture(scope="module")
def folders(
    checkpoint_factory: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """A target that reads an outside token as the drafter does, and its copy with fewer tokens.

    So whatever the text is, the two give the inside tokens the same logits.
    """
    plain = checkpoint_factory("qwen3")
    whole = tmp_path_factory.mktemp("whole") / "target"
    shutil.copytree(plain, whole)
    network = AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32)
    reduced = vocabulary()
    with torch.no_grad():
        embedding = network.get_input_embeddings().weight
        embedding.copy_(embedding[torch.from_numpy(INSIDE[reduced.draft_ids]).long()])
    network.save_pretrained(whole)
    folder = tmp_path_factory.mktemp("reduced") / "drafter"
    smaller = smaller_copy(network, reduced, network.config.num_hidden_layers)
    save_drafter(smaller, reduced, folder, "float32")
    return whole, folder


@pytest.mark.parametrize("way", ["in steps", "natively"])
@pytest.mark.parametrize("name", LAWS)
def test_the_next_token_is_drafted_exactly_where_the_draft_vocabulary_has_it(
    folders: tuple[Path, Path], name: str, way: str
) -> None:
    params = dataclasses.replace(LAWS[name], max_tokens=60)
    text = target_text(draft_engine(folders[0]), PROMPT, params, 50).tolist()
    drafter = lm_drafter(
        draft_engine(folders[1]), num_candidates=len(INSIDE), num_children=1, min_survival=1e-9
    )
    if way == "in steps":
        drafter._rules = None
    elif kernels.load() is None:
        pytest.skip("there is no C++ compiler")
    else:
        assert drafter._rules is not None
    author = Author(PROMPT, params)
    proposal = write(drafter, author, [])
    drafted = []
    for token in text:
        drafted.append(int(proposal.tree.token_ids[0]) == token)
        proposal = write(drafter, author, [token])
    assert drafted == np.isin(text, INSIDE).tolist()
    assert {True, False} <= set(drafted)


def test_a_chain_of_right_drafts_is_followed_without_a_forward_pass(
    folders: tuple[Path, Path],
) -> None:
    params = dataclasses.replace(GREEDY, temperature=0.9, seed=8)
    text = target_text(draft_engine(folders[0]), PROMPT, params, 40).tolist()
    drafter = lm_drafter(draft_engine(folders[1]), num_candidates=len(INSIDE), num_children=1)
    author = Author(PROMPT, params)
    write(drafter, author, [])
    for token in text:
        write(drafter, author, [token])
    # A token outside is never in the tree, though the token that it is read as may be.
    assert drafter.root_hits.total() == len(text)
    assert drafter.root_hits[True] == int(np.isin(text, INSIDE).sum())


def test_a_stop_token_is_no_draft_in_either_vocabulary(folders: tuple[Path, Path]) -> None:
    """Stop tokens are the target's ids; as draft ids they would be other tokens."""
    text = target_text(draft_engine(folders[0]), PROMPT, GREEDY, 40).tolist()
    stop = next(token for token in text if token in INSIDE)
    params = dataclasses.replace(GREEDY, stop_token_ids=(stop,))
    for native in (True, False):
        drafter = lm_drafter(draft_engine(folders[1]), num_candidates=16)
        if not native:
            drafter._rules = None
        author = Author(PROMPT, params)
        write(drafter, author, [])
        for token in text[: text.index(stop)]:
            proposal = write(drafter, author, [token])
            if proposal is not None:
                assert stop not in proposal.tree.token_ids


def test_noise_and_results_are_those_of_the_targets_tokens() -> None:
    reduced = vocabulary()
    logits = torch.randn(3, len(INSIDE), generator=torch.Generator().manual_seed(0))
    params = SamplingParams(temperature=0.7, seed=9, stream=1)
    contexts = [RowContext(params, position) for position in range(3)]
    ranked = rank_rows(logits, contexts, len(INSIDE), reduced)
    for position in range(3):
        row = ranked.row(position)
        order = np.argsort(row.token_ids)
        assert row.token_ids[order].tolist() == INSIDE.tolist()
        noise = gumbel(params.noise_key, position, INSIDE, params.stream)
        expected = logits[position].double().numpy() / 0.7 + noise
        assert row.scores[order] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_served_text_is_the_same_with_and_without_the_drafter(
    folders: tuple[Path, Path], temperature: float
) -> None:
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=24)
    whole, reduced = folders
    engine = {"model": str(reduced), "dtype": "float32", "device": "cpu", "threads": 1}
    drafter = DrafterConfig("lm", {"engine": engine})
    budget = CoordinatorConfig(budget="fixed", max_draft_tokens=4)
    with LLM(Config(target=target(whole))) as llm:
        plain = [each.token_ids for each in llm.generate(PROMPTS, params, ignore_eos=True)]
    with LLM(Config(target=target(whole), drafters={"lm": drafter}, coordinator=budget)) as llm:
        drafted = llm.generate(PROMPTS, params, ignore_eos=True)
    assert [each.token_ids for each in drafted] == plain
    assert sum(each.stats.num_accepted_draft_tokens for each in drafted) > 0


def test_the_file_holds_offsets_as_the_public_format_does(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    mine = dataclasses.replace(vocabulary(), tokenizer_hash="abc")
    mine.save(tmp_path)
    arrays = load_file(tmp_path / FILE_NAME)
    assert (np.arange(len(INSIDE)) + arrays["d2t"] == INSIDE).all()
    found = load_draft_vocabulary(tmp_path)
    assert found.tokenizer_hash == "abc"
    assert (found.target_ids == mine.target_ids).all()
    assert (found.draft_ids == mine.draft_ids).all()
    assert load_draft_vocabulary(tmp_path / "elsewhere") is None


def test_broken_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"no tensors")
    with pytest.raises(ConfigError, match=FILE_NAME):
        load_draft_vocabulary(tmp_path)
    good = vocabulary()
    for target_ids, draft_ids, complaint in (
        (INSIDE[::-1].copy(), good.draft_ids, "do not ascend"),
        (INSIDE + VOCAB, good.draft_ids, "beyond the target's"),
        (INSIDE, good.draft_ids + 1, "outside the draft vocabulary"),
        (INSIDE, np.zeros(VOCAB, np.int32), "read as another one"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            DraftVocabulary(target_ids, draft_ids)


def test_a_vocabulary_of_another_target_or_model_is_refused(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    engine = draft_engine(folders[1])
    assert LMDrafter(DrafterContext("lm", 16, 8), LMOptions(), engine).vocab_size == VOCAB
    with pytest.raises(ConfigError, match=f"has {VOCAB} tokens, the target's {VOCAB + 1}"):
        LMDrafter(DrafterContext("lm", 16, 8, vocab_size=VOCAB + 1), LMOptions(), engine)
    marked = shutil.copytree(folders[1], tmp_path / "marked")
    dataclasses.replace(vocabulary(), tokenizer_hash="ours").save(marked)
    context, engine = DrafterContext("lm", 16, 8, tokenizer_hash="theirs"), draft_engine(marked)
    with pytest.raises(ConfigError, match="has hash ours, the target's theirs"):
        LMDrafter(context, LMOptions(), engine)
    mixed = shutil.copytree(folders[0], tmp_path / "mixed")
    vocabulary().save(mixed)
    engine = draft_engine(mixed)
    with pytest.raises(ConfigError, match="different models"):
        LMDrafter(DrafterContext("lm", 16, 8), LMOptions(), engine)
