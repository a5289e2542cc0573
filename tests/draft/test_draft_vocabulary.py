"""A draft model with fewer tokens than the target drafts exactly those that it has; and one whose
tokenizer is another than the target's drafts with what both have."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from cluster.config.schema import EngineConfig
from cluster.core import Proposal
from cluster.draft.base import DrafterContext
from cluster.draft.lm import LMDrafter
from cluster.draft.options import LMOptions
from cluster.draft.vocabulary import FILE_NAME, DraftVocabulary, load_draft_vocabulary
from cluster.engine.engine import Engine
from cluster.models.made_for import MadeFor
from cluster.train.chat_drafter import DraftModelLearner, smaller_copy
from tests.support.checkpoints import byte_tokenizer
from tests.support.choices import by_day
from tests.support.draft.author import (
    GREEDY,
    NATIVELY,
    PROMPT,
    VOCAB,
    Author,
    draft_engine,
    lm_drafter,
    target_text,
    write,
)
from tests.support.draft.other_vocabulary import other_copy
from tests.support.engine.integrity import check_integrity
from tests.support.errors import config_error

# Every fourth token is outside; the end of the text is inside.
INSIDE = np.array([token for token in range(VOCAB) if token % 4 != 3], np.int32)
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
    DraftModelLearner(smaller, reduced, "float32").save(folder, MadeFor())
    return whole, folder


@NATIVELY
@pytest.mark.parametrize("name", by_day(["temperature 0.8", "top-k", "penalties"], LAWS))
def test_the_next_token_is_drafted_exactly_where_the_draft_vocabulary_has_it(
    folders: tuple[Path, Path], name: str, natively: bool
):
    params = dataclasses.replace(LAWS[name], max_tokens=60)
    text = target_text(draft_engine(folders[0]), PROMPT, params, 50).tolist()
    drafter = lm_drafter(
        draft_engine(folders[1]),
        natively=natively,
        num_candidates=len(INSIDE),
        num_children=1,
        min_survival=1e-9,
    )
    assert natively == (drafter._rules is not None)
    author = Author(PROMPT, params)
    proposal = write(drafter, author, [])
    drafted = []
    for token in text:
        drafted.append(int(proposal.tree.token_ids[0]) == token)
        proposal = write(drafter, author, [token])
    assert drafted == np.isin(text, INSIDE).tolist()
    assert {True, False} <= set(drafted)


def test_a_stop_token_is_no_draft_in_either_vocabulary(folders: tuple[Path, Path]):
    """Stop tokens are the target's ids; as draft ids they would be other tokens."""
    text = target_text(draft_engine(folders[0]), PROMPT, GREEDY, 40).tolist()
    stop = next(token for token in text if token in INSIDE)
    params = dataclasses.replace(GREEDY, stop_token_ids=(stop,))
    for natively in (True, False):
        drafter = lm_drafter(draft_engine(folders[1]), natively=natively, num_candidates=16)
        author = Author(PROMPT, params)
        write(drafter, author, [])
        for token in text[: text.index(stop)]:
            proposal = write(drafter, author, [token])
            if proposal is not None:
                assert stop not in proposal.tree.token_ids


def test_the_file_holds_offsets_as_the_public_format_does(tmp_path: Path):
    mine = dataclasses.replace(vocabulary(), tokenizer_hash="abc")
    mine.save(tmp_path)
    assert (np.arange(len(INSIDE)) + load_file(tmp_path / FILE_NAME)["d2t"] == INSIDE).all()
    found = load_draft_vocabulary(tmp_path)
    assert found.tokenizer_hash == "abc"
    assert (found.target_ids == mine.target_ids).all()
    assert (found.draft_ids == mine.draft_ids).all()
    assert load_draft_vocabulary(tmp_path / "elsewhere") is None


def test_broken_files_are_refused(tmp_path: Path):
    (tmp_path / FILE_NAME).write_bytes(b"no tensors")
    with config_error(FILE_NAME):
        load_draft_vocabulary(tmp_path)
    good = vocabulary()
    for target_ids, draft_ids, complaint in (
        (INSIDE - VOCAB, good.draft_ids, "or some below 0"),
        (INSIDE + VOCAB, good.draft_ids, "beyond the target's"),
        (INSIDE, good.draft_ids + 1, "outside the draft vocabulary"),
        (INSIDE, np.zeros(VOCAB, np.int32), "read as another one"),
    ):
        with config_error(complaint):
            DraftVocabulary(target_ids, draft_ids)


# Of another tokenizer.

PAIRS = range(260, VOCAB)  # the tokens of two letters
SENTENCE = byte_tokenizer().encode("an other vocabulary 🙂 reads this\n")


def drafter_of(
    folder: Path,
    target: Path,
    engine: dict[str, Any] | None = None,
    tokenizer_hash: str = "",
    **options: Any,
) -> LMDrafter:
    settings = {"dtype": "float32", "device": "cpu", "num_pages": 256, "page_size": 8, "threads": 1}
    own = EngineConfig(model=str(folder), **{**settings, **(engine or {})})
    context = DrafterContext("lm", 16, 8, VOCAB, tokenizer_hash, target_model=str(target))
    return LMDrafter(context, LMOptions(engine=own, **options))


def follow(drafter: LMDrafter, text: list[int], params: Any) -> list[Proposal | None]:
    """The proposals along a text, token by token."""
    author = Author(SENTENCE, params)
    return [write(drafter, author, []), *(write(drafter, author, [token]) for token in text)]


def first_drafts(proposal: Proposal) -> list[int]:
    """The tokens that are drafted right behind the text."""
    return proposal.tree.token_ids[proposal.tree.parents < 0].tolist()


@NATIVELY
@pytest.mark.parametrize("name", by_day(["temperature 0.8", "bias"], LAWS))
def test_tokens_in_another_order_are_drafted_as_if_they_were_the_targets(
    name: str, natively: bool, exact_engine: Engine, llama_folder: Path, tmp_path: Path
):
    params = LAWS[name]
    own = lm_drafter(exact_engine, natively=natively)
    other = drafter_of(other_copy(llama_folder, tmp_path / "other"), llama_folder)
    assert other.engine.num_columns == VOCAB
    if not natively:
        other._rules = None
    text = target_text(exact_engine, SENTENCE, params, 30).tolist()
    for mine, theirs in zip(follow(own, text, params), follow(other, text, params), strict=True):
        # Native growth stops between passes, so how far it got differs; a root's children do not.
        assert first_drafts(mine) == first_drafts(theirs)
    own.release(["a"])


def test_the_text_is_followed_where_the_model_reads_tokens_as_several(
    exact_engine: Engine, llama_folder: Path, tmp_path: Path
):
    """Whatever it reads of, rolls back into, or loses, each tree stands on what it should."""
    folder = other_copy(llama_folder, tmp_path / "other", left_out=PAIRS)
    drafter = drafter_of(folder, llama_folder)
    text = target_text(exact_engine, SENTENCE, GREEDY, 40).tolist()
    text = [token for pair in zip(text, list(PAIRS) * 2, strict=False) for token in pair][:40]
    proposals = follow(drafter, text, GREEDY)
    request = drafter._requests.find("a")
    assert len(request.read.log) > len(request.text), "pairs are read as two"
    for place in (len(request.text) - 3, len(SENTENCE) + 1):
        author = Author(SENTENCE)
        author.tokens = [*SENTENCE, *text][:place]
        again = write(drafter, author, [PAIRS[0], 40])
        assert first_drafts(again) == first_drafts(
            write(drafter_of(folder, llama_folder), Author(author.tokens), [])
        )
        assert again.base_len == len(author.tokens)
    drafted = {int(token) for each in proposals if each for token in each.tree.token_ids}
    assert drafted
    assert not drafted & {*PAIRS}
    assert request.cached_len <= len(request.read.log)
    drafter.release(["a"])
    check_integrity(drafter.engine)


def test_a_window_holds_as_many_of_the_models_tokens_as_it_can_read(
    llama_folder: Path, tmp_path: Path
):
    folder = other_copy(llama_folder, tmp_path / "other", left_out=PAIRS)
    drafter = drafter_of(folder, llama_folder, {"max_context_len": 40}, context_window=32)
    author = Author([*PAIRS])  # 28 tokens, twice as many for the model
    for token in range(60):
        proposal = write(drafter, author, [PAIRS[token % 28]] if author.tokens else [])
        assert len(proposal.tree)
        request = drafter._requests.find("a")
        assert 0 < len(request.read.log) <= 32
        assert drafter.engine.cached_len("a") <= 40


@pytest.mark.parametrize(
    ("options", "engine", "complaint"),
    [
        ({"vocabulary": "own"}, {}, "use a draft model with the target's tokenizer"),
        ({}, {"tensor_parallel": 2}, "tensor_parallel"),
    ],
    ids=["own", "ranks"],
)
def test_what_cannot_be_is_refused(
    options: dict[str, Any],
    engine: dict[str, Any],
    complaint: str,
    exact_engine: Engine,
    llama_folder: Path,
    tmp_path: Path,
):
    folder = other_copy(llama_folder, tmp_path / "other")
    with config_error(complaint):
        drafter_of(folder, llama_folder, engine, exact_engine.tokenizer_hash, **options)
