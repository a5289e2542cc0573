"""A draft model with fewer tokens than the target drafts exactly those that it has."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from cluster.draft.vocabulary import FILE_NAME, DraftVocabulary, load_draft_vocabulary
from cluster.engine.cpu import kernels
from cluster.errors import ConfigError
from cluster.models.made_for import MadeFor
from cluster.train.chat_drafter import DraftModelLearner, smaller_copy
from tests.support.choices import by_day
from tests.support.draft.author import (
    GREEDY,
    Author,
    draft_engine,
    lm_drafter,
    target_text,
    write,
)

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
    DraftModelLearner(smaller, reduced, "float32").save(folder, MadeFor())
    return whole, folder


@pytest.mark.parametrize("way", ["in steps", "natively"])
@pytest.mark.parametrize("name", by_day(["temperature 0.8", "top-k", "penalties"], LAWS))
def test_the_next_token_is_drafted_exactly_where_the_draft_vocabulary_has_it(
    folders: tuple[Path, Path], name: str, way: str
):
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


def test_a_stop_token_is_no_draft_in_either_vocabulary(folders: tuple[Path, Path]):
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


def test_the_file_holds_offsets_as_the_public_format_does(tmp_path: Path):
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


def test_broken_files_are_refused(tmp_path: Path):
    (tmp_path / FILE_NAME).write_bytes(b"no tensors")
    with pytest.raises(ConfigError, match=FILE_NAME):
        load_draft_vocabulary(tmp_path)
    good = vocabulary()
    for target_ids, draft_ids, complaint in (
        (INSIDE - VOCAB, good.draft_ids, "or some below 0"),
        (INSIDE + VOCAB, good.draft_ids, "beyond the target's"),
        (INSIDE, good.draft_ids + 1, "outside the draft vocabulary"),
        (INSIDE, np.zeros(VOCAB, np.int32), "read as another one"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            DraftVocabulary(target_ids, draft_ids)
