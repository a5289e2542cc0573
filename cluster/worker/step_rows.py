"""The rows of a step: what is verified of texts and beam searches, and what drafters read of it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from cluster.core import EMPTY_TOKENS, EMPTY_TREE, TokenArray, TokenLogprob, TokenTree, Verdict
from cluster.draft.base import params_beside_rows
from cluster.draft.inside import WANTS_NOTHING, StepRows, StepWants
from cluster.engine.beam_search import BeamRun
from cluster.engine.draw.batch import NO_LOGITS, SampledText, adjusted, no_law
from cluster.engine.taps import Taps
from cluster.engine.work import Output
from cluster.plan.texts import Text
from cluster.requests.fields import NO_LAWS, Laws
from cluster.spec.logprobs import token_logprobs
from cluster.spec.native.trees import Seen
from cluster.spec.penalties import LogitsHook
from cluster.spec.rejection import walk_in_turn
from cluster.spec.sampling import RowLaws, scale, survivors
from cluster.spec.transfer import sent
from cluster.spec.tree import Floats, children
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
        hook: LogitsHook | None = None,
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


# The nodes that a step verifies for a text that is not coupled to its drafts.
#
# Such a text follows what was verified, so only these nodes are scored, and all trees that were
# not verified would be judged by a text that somebody else has shaped.


def laws_of_verified(text: Text, tree: TokenTree) -> Laws:
    """Note that a step verifies these nodes, and return the laws that they were drawn from.

    There is none where nodes of several drafters are merged, nor for siblings of which others than
    the last are missing: these count as chosen, which is exact too.
    """
    if len(tree) == 0 or len(text.held) != 1:
        return NO_LAWS
    ((name, held),) = text.held.items()
    places = _places(tree, held.tree)
    if places is None:
        return NO_LAWS
    length = len(text.tokens)
    text.seen.append(Seen(name, text.group, length, tree, held.survival[places]))
    if not held.laws:
        return NO_LAWS
    laws = {}
    drawn = children(held.tree.parents)
    for parent, own in enumerate(children(tree.parents), start=-1):
        at = places[parent] if parent >= 0 else -1
        known = [places[node] for node in own]
        if own and at in held.laws and known == drawn[at + 1][: len(own)]:
            laws[parent] = held.laws[at]
    return laws


def _places(part: TokenTree, whole: TokenTree) -> list[int] | None:
    """Return where the nodes of a part stand in the whole tree; None = it is no part of it."""
    edges = zip(whole.parents.tolist(), whole.token_ids.tolist(), strict=True)
    known = {edge: node for node, edge in enumerate(edges)}
    places: list[int] = []
    for parent, token in zip(part.parents.tolist(), part.token_ids.tolist(), strict=True):
        place = known.get((places[parent] if parent >= 0 else -1, token))
        if place is None:
            return None
        places.append(place)
    return places


# Accepts the drafts of one sequence by the textbook's laws, from the rows of a step.


def walk_by_ratio(sequence: TargetSequence) -> tuple[TokenArray, TokenArray]:
    """Return (path, token_ids) as `cluster.spec.tree.walk_draws` does.

    Only the rows that the walk comes to are made probabilities.  Raises WorkerError for broken
    logits, and what the sequence's own hook raises.
    """
    logits = adjusted(sequence)
    if sequence.failure is not None:
        raise sequence.failure
    params, text = sequence.params, sequence.text
    # A grammar cuts nodes off by what they are, so they all count as chosen, cut off or not.
    drawn = text.laws if sequence.hook is None else NO_LAWS
    laws = RowLaws.of([params], logits.device)
    temperature = np.float32(laws.temperature.item())

    def law_of(node: int) -> Floats:
        row = logits[node + 1 : node + 2]  # [1, vocab]
        if sequence.truncated:
            scaled = scale(row, row.amax(dim=1), laws.temperature)
            cutoffs = survivors(scaled, laws).cutoffs
            row = row.masked_fill(scaled < cutoffs.unsqueeze(1), -torch.inf)
        # One row is too little for several threads to share: waiting for each other they take
        # longer than numpy does alone.
        values = row[0].cpu().numpy()
        maximum = values.max()
        if not np.isfinite(maximum):
            raise no_law(len(text.tokens))
        weights = np.exp((values - maximum) / temperature)
        return np.asarray(weights / weights.sum(dtype=np.float64), dtype=np.float64)

    key = (sequence.seed, params.stream, text.output_len)
    return walk_in_turn(sequence.tree, drawn, law_of, key)


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
