"""A draft model whose tokenizer is another than the target's drafts with what both have."""

from pathlib import Path
from typing import Any

import pytest

from cluster.config.schema import EngineConfig
from cluster.core import Proposal
from cluster.draft.base import DrafterContext
from cluster.draft.lm import LMDrafter
from cluster.draft.options import LMOptions
from cluster.engine.cpu import kernels
from cluster.engine.engine import Engine
from cluster.errors import ConfigError
from tests.draft.test_draft_vocabulary import LAWS
from tests.support.checkpoints import byte_tokenizer
from tests.support.choices import by_day
from tests.support.draft.author import GREEDY, Author, grow, lm_drafter, target_text, write
from tests.support.draft.other_vocabulary import other_copy
from tests.support.engine.integrity import check_integrity

VOCAB = 288
PAIRS = range(260, VOCAB)  # the tokens of two letters
PROMPT = byte_tokenizer().encode("an other vocabulary 🙂 reads this\n")


def drafter_of(
    folder: Path, target: Path, engine: dict[str, Any] | None = None, **options: Any
) -> LMDrafter:
    settings = {"dtype": "float32", "device": "cpu", "num_pages": 256, "page_size": 8, "threads": 1}
    own = EngineConfig(model=str(folder), **{**settings, **(engine or {})})
    context = DrafterContext("lm", 16, 8, VOCAB, target_model=str(target))
    return LMDrafter(context, LMOptions(engine=own, **options))


def follow(drafter: LMDrafter, text: list[int], params: Any) -> list[Proposal | None]:
    """The proposals along a text, token by token."""
    author = Author(PROMPT, params)
    return [write(drafter, author, []), *(write(drafter, author, [token]) for token in text)]


def first_drafts(proposal: Proposal) -> list[int]:
    """The tokens that are drafted right behind the text."""
    found: list[int] = proposal.tree.token_ids[proposal.tree.parents < 0].tolist()
    return found


@pytest.mark.parametrize("way", ["in steps", "natively"])
@pytest.mark.parametrize("name", by_day(["temperature 0.8", "bias"], LAWS))
def test_tokens_in_another_order_are_drafted_as_if_they_were_the_targets(
    name: str, way: str, exact_engine: Engine, llama_folder: Path, tmp_path: Path
):
    if way == "natively" and kernels.load() is None:
        pytest.skip("there is no C++ compiler")
    params = LAWS[name]
    own = lm_drafter(exact_engine)
    other = drafter_of(other_copy(llama_folder, tmp_path / "other"), llama_folder)
    assert other.engine.num_columns == VOCAB
    for drafter in (own, other):
        drafter._rules = drafter._rules if way == "natively" else None
    text = target_text(exact_engine, PROMPT, params, 30).tolist()
    for mine, theirs in zip(follow(own, text, params), follow(other, text, params), strict=True):
        assert mine is not None
        assert theirs is not None
        # Native growth stops between passes, so how far it got differs; a root's children do not.
        assert first_drafts(mine) == first_drafts(theirs)


def test_the_text_is_followed_where_the_model_reads_tokens_as_several(
    exact_engine: Engine, llama_folder: Path, tmp_path: Path
):
    """Whatever it reads of, rolls back into, or loses, each tree stands on what it should."""
    folder = other_copy(llama_folder, tmp_path / "other", left_out=PAIRS)
    drafter = drafter_of(folder, llama_folder)
    text = target_text(exact_engine, PROMPT, GREEDY, 40).tolist()
    text = [token for pair in zip(text, list(PAIRS) * 2, strict=False) for token in pair][:40]
    proposals = follow(drafter, text, GREEDY)
    request = drafter._requests.find("a")
    assert len(request.read.log) > len(request.text), "pairs are read as two"
    for place in (len(request.text) - 3, len(PROMPT) + 1):
        author = Author(PROMPT)
        author.tokens = [*PROMPT, *text][:place]
        drafter.observe([author.commit([PAIRS[0], 40])])
        again = grow(drafter, author)["a"]
        fresh = drafter_of(folder, llama_folder)
        other = Author(author.tokens)
        fresh.observe([other.opening()])
        expected = grow(fresh, other)["a"]
        assert first_drafts(again) == first_drafts(expected)
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
    own = EngineConfig(model=str(folder), device="cpu", num_pages=64, **engine)
    context = DrafterContext(
        "lm", 16, 8, VOCAB, exact_engine.tokenizer_hash, target_model=str(llama_folder)
    )
    with pytest.raises(ConfigError, match=complaint):
        LMDrafter(context, LMOptions(engine=own, **options))
