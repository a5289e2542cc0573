"""Shared by the drafters' tests: commits of a text, drafters of tiny models, a target's text."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster.core import Commit, Proposal, SamplingParams, TokenArray, token_array
from cluster.draft.base import Drafter, DrafterContext, DraftTask
from cluster.draft.draft_model import DraftModel
from cluster.draft.lm import LMDrafter
from cluster.draft.options import LMOptions
from cluster.draft.vocabulary import load_draft_vocabulary
from cluster.engine.engine import Engine
from cluster.models.made_for import MadeFor
from cluster.spec.token_log import prefix_hash
from cluster.worker.verifier import Verifier
from tests.support.engine.native import needs_native
from tests.support.engine.tiny import tiny
from tests.support.worker.rounds import Session, decode_all, no_drafts

GREEDY = SamplingParams(temperature=0.0, max_tokens=1000)
VOCAB = 288
PROMPT = np.random.default_rng(7).integers(4, VOCAB, 21).tolist()
# Of drafters that grow natively, and by steps of their engine.
NATIVELY = pytest.mark.parametrize(
    "natively",
    [pytest.param(True, marks=needs_native), False],
    ids=["natively", "in steps"],
)


class Author:
    """Creates one request's text and its commits for a drafter."""

    def __init__(
        self,
        prompt: Sequence[int],
        params: SamplingParams = GREEDY,
        request_id: str = "a",
        task: str = "default",
        max_nodes: int = 16,
        tenant: bytes = b"",
    ) -> None:
        self.tokens = []
        self.generation = 1
        self.request_id = request_id
        self._prompt = list(prompt)
        self._params = params
        self._task = task
        self._max_nodes = max_nodes
        self._tenant = tenant

    def opening(self) -> Commit:
        return self.commit(self._prompt)

    def commit(self, token_ids: Sequence[int]) -> Commit:
        """The commit of these tokens after the text so far."""
        base_len = len(self.tokens)
        self.tokens.extend(token_ids)
        return self.commit_of(base_len)

    def commit_of(self, base_len: int) -> Commit:
        """The commit of everything from base_len on."""
        return Commit(
            self.request_id,
            self.generation,
            base_len,
            prefix_hash(self.tokens[:base_len]),
            token_array(self.tokens[base_len:]),
            len(self._prompt),
            self._max_nodes,
            self._task,
            self._params if base_len == 0 else None,
            self._tenant if base_len == 0 else b"",
        )

    def task(self) -> DraftTask:
        return DraftTask(self.request_id, self.generation, self._max_nodes)


def grow(drafter: Drafter, *authors: Author) -> dict[str, Proposal]:
    """Propose until the drafter has nothing left to grow; the newest proposal per request."""
    newest = {}
    for _ in range(1000):
        proposals = drafter.propose([author.task() for author in authors])
        if not proposals:
            return newest
        newest.update((proposal.request_id, proposal) for proposal in proposals)
    raise AssertionError("the drafter still grows after 1000 slices")


def write(drafter: Drafter, author: Author, token_ids: Sequence[int]) -> Proposal | None:
    """Commit, grow, and return the proposal for the new text."""
    drafter.observe([author.commit(token_ids) if author.tokens else author.opening()])
    return grow(drafter, author).get(author.request_id)


def draft_engine(folder: Path, **settings: Any) -> Engine:
    return Engine.load(tiny(folder, settings, page_size=8, threads=1))


def lm_drafter(
    engine: Engine,
    max_nodes: int = 16,
    max_requests: int = 8,
    *,
    natively: bool = True,
    **options: Any,
) -> LMDrafter:
    """natively: as far as it can; else it grows by steps of its engine."""
    context = DrafterContext("lm", max_nodes, max_requests)
    vocabulary = load_draft_vocabulary(Path(engine.config.model))
    size = engine.num_columns if vocabulary is None else len(vocabulary.draft_ids)
    model = DraftModel(engine, MadeFor(), vocabulary, engine.tokenizer_hash, size)
    drafter = LMDrafter(context, LMOptions(**options), model)
    if not natively:
        drafter._rules = None
    return drafter


def target_text(
    engine: Engine, prompt: Sequence[int] | TokenArray, params: SamplingParams, num_tokens: int
) -> TokenArray:
    """The target's text without drafts, end-of-text tokens included."""
    session = Session("target", prompt, params)
    decode_all(Verifier(engine), [session], [no_drafts], num_tokens, release=True)
    return token_array(session.output)
