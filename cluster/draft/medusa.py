"""The Medusa drafter: heads on the target's last hidden row, one a position ahead, in one pass.

No head sees what the others draft, so the candidates of a position are the same behind every path,
and a tree is their product: its nodes are taken best first by the product of their shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from cluster.core import Commit, DraftTask, Observation, Proposal, SamplingParams
from cluster.draft.base import DrafterContext
from cluster.draft.bounded import Bounded
from cluster.draft.candidates import RankedRows, RowContext, rank_rows
from cluster.draft.committed_text import RequestTable, common_len
from cluster.draft.head_options import MedusaOptions
from cluster.draft.heads.load import load_head_of, made_ready, target_shape
from cluster.draft.heads.medusa import MedusaHead
from cluster.draft.inside import StepRows, StepWants, host_of
from cluster.draft.live_tree import ROOT, LiveTree
from cluster.draft.sharpness import Sharpness, conditionals
from cluster.draft.tree_request import TreeRequest, learn_draws
from cluster.draft.vocabulary import written_vocabulary
from cluster.made_for import folder_made_for
from cluster.models.resolve import resolve_head

_NO_LIMIT = 1 << 62


class MedusaDrafter:
    """See `Drafter` and `StepReader`.  It drafts from the rows of the last step alone."""

    def __init__(self, context: DrafterContext, options: MedusaOptions) -> None:
        host = host_of(context.target, context.name, "medusa")
        folder = resolve_head(options.model)
        self.made_for = folder_made_for(folder)
        head = load_head_of(MedusaHead, folder, target_shape(host), host.weight)
        self._vocabulary, order = written_vocabulary(head.token_map.numpy(), host.vocab_size)
        self._head = made_ready(head, host)
        self._dtype = torch.float32 if host.device.type == "cpu" else host.dtype
        self._order = None if order is None else torch.from_numpy(order).to(host.device)
        self.wants = StepWants((-1,))
        self._rows: dict[str, tuple[int, torch.Tensor]] = {}
        self._options = options
        self._name = context.name
        self._max_nodes = context.max_nodes
        self._requests: RequestTable[TreeRequest] = RequestTable(context.max_requests, self._opened)
        # By head: those further ahead are less sure.
        self._sharpness: Bounded[list[Sharpness]] = Bounded(self._fits)
        self._warm_up(host.device)

    @torch.inference_mode()
    def _warm_up(self, device: torch.device) -> None:
        """Draft once for nobody: first calls take longer than all that follow."""
        size = self._head.spec.hidden_size
        logits = self._head(torch.zeros(1, size, dtype=self._dtype, device=device)).float()
        request = TreeRequest(0, 1, "", SamplingParams(temperature=1.0, seed=0))
        request.text.append(np.zeros(2, np.int32))
        self._proposal(request, 1, logits[0].nan_to_num())

    def _fits(self) -> list[Sharpness]:
        return [Sharpness() for _ in range(self._head.spec.num_heads)]

    def _opened(self, commit: Commit) -> TreeRequest:
        return TreeRequest(
            commit.generation, commit.prompt_len, commit.task, commit.params or SamplingParams(),
            request_id=commit.request_id, tenant=commit.tenant,
        )  # fmt: skip

    def read(self, rows: Sequence[StepRows]) -> None:
        """See `StepReader`: of each text the last row is kept, until the next step."""
        self._rows = {
            each.request_id: (
                each.first_position + len(each.text_rows),
                each.taps[int(each.text_rows[-1]), 0],
            )
            for each in rows
            if each.taps is not None and each.next_token is not None
        }

    def observe(self, commits: Sequence[Commit]) -> Sequence[Observation]:
        """See `Drafter.observe`."""
        return [self._observe(commit) for commit in commits]

    def _observe(self, commit: Commit) -> Observation:
        request = self._requests.admit(commit)
        if request is None:
            return self._requests.declined(commit)
        loss: float | None = None
        if request.renewed:
            request.renewed = False
            request.tree = None
        if not request.text.ends_with(commit.token_ids, commit.base_len):
            kept = common_len(request.text, commit)
            request.cut(kept)
            request.text.append(commit.token_ids[kept - commit.base_len :])
            loss = self._learn(request)
            request.tree = None
        return Observation(commit.request_id, commit.generation, len(request.text), loss)

    def _learn(self, request: TreeRequest) -> float | None:
        tree = request.tree
        if tree is None:
            return None
        token_ids = request.text.token_ids[request.root_len :].tolist()
        return learn_draws(self._fits_of(request), tree, tree.walk(token_ids), token_ids)

    def _fits_of(self, request: TreeRequest) -> list[Sharpness]:
        return self._sharpness.of((request.task, request.params.temperature == 0.0))

    @torch.inference_mode()
    def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Proposal]:
        """See `Drafter.propose`.  The trees are complete after one pass."""
        wanted: list[tuple[TreeRequest, int]] = []
        for task in tasks:
            request = self._requests.get(task.request_id, task.generation)
            if request is None or request.tree is not None or task.max_nodes < 1:
                continue
            length, _ = self._rows.get(task.request_id, (0, None))
            if length == len(request.text) - 1 and request.can_use_drafts:
                wanted.append((request, min(task.max_nodes, self._max_nodes)))
        if not wanted:
            return []
        hidden = torch.stack([self._rows[request.request_id][1] for request, _ in wanted])
        logits = self._head(hidden.to(self._dtype)).float()  # [requests, heads, draft_vocab]
        if self._order is not None:
            logits = logits[:, :, self._order]
        is_sound = torch.isfinite(logits.sum(dim=(1, 2))).tolist()
        return [
            self._proposal(request, max_nodes, rows)
            for (request, max_nodes), rows, is_finite in zip(wanted, logits, is_sound, strict=True)
            if is_finite
        ]

    def _proposal(self, request: TreeRequest, max_nodes: int, logits: torch.Tensor) -> Proposal:
        """The best of the product of all heads.  logits: float32[heads, draft_vocab]."""
        options, least = self._options, self._options.min_survival
        request.tree, request.root_len = LiveTree(), len(request.text)
        root, num_heads = request.row_context(ROOT), len(logits)
        contexts: list[RowContext] = [
            replace(root, position=root.position + ahead) for ahead in range(num_heads)
        ]
        ranked = rank_rows(logits, contexts, options.num_candidates, self._vocabulary)
        fits = self._fits_of(request)
        shares = conditionals(
            ranked.scores,
            np.array([fit.tau for fit in fits]),
            np.array([fit.coverage for fit in fits]),
        )
        self._expand(request, request.tree, ROOT, ranked, shares)
        for _ in range(max_nodes):
            if request.tree.best_leaf_survival() < least:
                break
            self._expand(request, request.tree, request.tree.pop_leaf(), ranked, shares)
        proposal = request.proposal(max_nodes, least, self._name)
        return replace(proposal, is_complete=True)

    def _expand(
        self, request: TreeRequest, tree: LiveTree, node: int, ranked: RankedRows,
        shares: npt.NDArray[np.float64],
    ) -> None:  # fmt: skip
        depth = tree.depths[node]
        if depth == len(shares):
            return
        count = self._options.num_children
        children = zip(
            ranked.token_ids[depth, :count].tolist(), shares[depth, :count].tolist(), strict=True
        )
        request.expand(node, ranked.row(depth), list(children), _NO_LIMIT)

    def release(self, request_ids: Sequence[str]) -> None:
        """See `Drafter.release`."""
        for request_id in request_ids:
            self._requests.pop(request_id)
