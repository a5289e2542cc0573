"""The rows of a step: what is verified of texts and beam searches, and what drafters read of it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from cluster.core import EMPTY_TOKENS, EMPTY_TREE, TokenArray, TokenLogprob, TokenTree
from cluster.draft.base import params_beside_rows
from cluster.draft.inside import WANTS_NOTHING, StepRows, StepWants
from cluster.engine.beam_search import BeamRun
from cluster.engine.draw.sampled_text import NO_LOGITS, SampledText
from cluster.engine.taps import Taps
from cluster.engine.work import Output, Verdict
from cluster.grammar.text import GrammarHook
from cluster.spec.logprobs import token_logprobs
from cluster.spec.transfer import sent
from cluster.worker.texts import TargetText

_NO_OUTPUT = Output("")


class TargetSequence(SampledText):
    """One text, its draws, and its work in the engine.

    num_misses: of this work, in the engine's cache.  search: the beam search, if the text is one.
    output, verdict: of the present step, if it answers the work.
    """

    def __init__(
        self,
        text: TargetText,
        vocab_size: int,
        device: torch.device,
        hook: GrammarHook | None = None,
        adapter: int = 0,
    ) -> None:
        """adapter: as in `Work`."""
        opened = text.opened
        told = text.tokens, opened.prompt_len, text.params, vocab_size, device, hook
        super().__init__(*told, is_audit=opened.is_audit)
        self.text = text
        self.adapter = adapter
        self.num_misses = 0
        self.search: BeamRun | None = None
        self.forget_step()

    def forget_step(self) -> None:
        """Keep nothing of the present step: its rows take memory."""
        self.output, self.logits = _NO_OUTPUT, NO_LOGITS
        self.verdict: Verdict | None = None

    def begin(self, tree: TokenTree) -> None:
        super().begin(tree)
        self.num_misses = 0

    @property
    def num_tokens(self) -> int:
        """Of the verdict."""
        return 0 if self.verdict is None else len(self.verdict.token_ids)


def rows_of_step(
    wants: StepWants, taps: Taps | None, sequences: Iterable[TargetSequence]
) -> list[StepRows]:
    """Return the rows of one step, before its verdicts become text.

    sequences: all; those without a verdict may have had a chunk of their prompts in the step.
    Audits are left out: they write a text a second time, as a tenant of their own, and nobody is to
    learn from that.
    """
    if wants == WANTS_NOTHING:
        return []
    found = [_rows(wants, taps, each) for each in sequences if not each.text.opened.is_audit]
    return [rows for rows in found if rows is not None]


def _rows(wants: StepWants, taps: Taps | None, sequence: TargetSequence) -> StepRows | None:
    """Return the rows of one sequence, None if it has none to tell."""
    text, opened, tree = sequence.text, sequence.text.opened, sequence.tree
    tapped = None if taps is None else taps.of(text.id)
    first, num_context = len(text.tokens) - 1, 1
    if tapped is not None:
        first, num_context = tapped[0].first_position, tapped[0].num_context
    verdict = sequence.verdict
    if verdict is None:
        if tapped is None or not num_context or sequence.search is not None:
            return None
        tree = EMPTY_TREE
    return StepRows(
        text.id,
        opened.generation,
        opened.task,
        opened.tenant,
        first,
        np.concatenate((text.tokens.since(first, first + num_context), tree.token_ids)),
        num_context,
        tree.parents,
        EMPTY_TOKENS if verdict is None else verdict.path,
        None if verdict is None else int(verdict.token_ids[-1]),
        None if tapped is None else tapped[1],
        sequence.output.top if wants.num_top else None,
        params_beside_rows(text.params),
        opened.adapter,
    )


def logprobs_of(
    sequence: TargetSequence, path: TokenArray, token_ids: TokenArray
) -> tuple[TokenLogprob, ...]:
    """Return those of the tokens of a step, where the sequence asks for some."""
    num_top = sequence.params.logprobs
    if num_top is None:
        return ()
    logits = sequence.logits
    rows = sent(np.concatenate(([0], path + 1)).astype(np.int64), logits.device)
    return token_logprobs(logits[rows], token_ids, num_top)
