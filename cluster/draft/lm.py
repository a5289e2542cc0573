"""The LM drafter: a draft model that grows one tree per request, best first, on our engine.

For each request the engine caches the committed text and the expanded nodes of the tree.  A commit
is followed down the tree.  If it ends at an expanded node, that node becomes the root and its
subtree keeps growing (a hit); otherwise the rest of the commit is prefilled (a miss).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch

from cluster.core import EMPTY_TREE, Commit, Observation, Proposal, TokenArray
from cluster.draft.base import DrafterContext, DraftTask
from cluster.draft.draft_model import DraftModel, load_draft_model
from cluster.draft.live_tree import KEPT_SHARE, LiveTree, Node
from cluster.draft.lm_request import LMRequest
from cluster.draft.options import LMOptions
from cluster.draft.tree_drafter import TreeDrafter
from cluster.engine.cpu.causal_lm import GrowthRules
from cluster.engine.cpu.growth import Growing

log = logging.getLogger(__name__)

# Native growth runs for _SLICE_S seconds before its trees are proposed; a commit interrupts it.
# With more than _SLICE_REQUESTS requests, or trees above _SLICE_NODES nodes, the slice is longer in
# proportion, because proposing them takes longer too.
_SLICE_S = 0.0015
_SLICE_NODES = 32
_SLICE_REQUESTS = 2


class LMDrafter(TreeDrafter[LMRequest]):
    """See `Drafter`.  A slice of growth is one engine step over all requests.

    vocab_size: tokens of the target that it can read.  tokenizer_hash: the target's, "" = unknown.

    During a long prefill, or if new nodes do not change the proposal, `propose` repeats the last
    proposal (an empty tree before the first), which tells the caller that growth continues.
    """

    def __init__(
        self,
        context: DrafterContext,
        options: LMOptions,
        model: DraftModel | None = None,
    ) -> None:
        self._model = model = model or load_draft_model(context, options)
        self.engine, self._vocabulary = model.engine, model.vocabulary
        self.made_for, self.tokenizer_hash = model.made_for, model.tokenizer_hash
        self.vocab_size, self._num_columns = model.vocab_size, model.num_columns
        self._options = options
        longest = self.engine.longest_context
        self._window = min(options.context_window or longest, longest)
        self._is_resident = context.target is not None
        # A request beyond what the engine keeps would wait for a page until another one ends.
        most = min(context.max_requests, self.engine.config.max_running_sequences)
        super().__init__(replace(context, max_requests=most), self._opened)
        self._rules, self._slice_s = self._growth_rules(), _SLICE_S

    @property
    def pages_in_use(self) -> int:
        return self.engine.pages_in_use

    @property
    def pages_total(self) -> int:
        return self.engine.pages_total

    @property
    def _max_rows(self) -> int:
        # The engine needs one more row for the text's last token.
        return max(min(super()._max_rows, self.engine.config.max_batch_tokens - 1), 1)

    def _opened(self, commit: Commit) -> LMRequest:
        request = LMRequest.opened_by(commit)
        request.vocabulary, request.read = self._vocabulary, self._model.read_text()
        request.window = request.longest = self._window
        request.max_context_len = self.engine.max_context_len
        return request

    def observe(self, commits: Sequence[Commit]) -> Sequence[Observation]:
        """See `Drafter.observe`.  Extends texts and re-roots trees; runs no forward pass."""
        if self.engine.grower is not None:
            self.engine.grower.resume()
        return super().observe(commits)

    def _forget_tree(self, request: LMRequest) -> None:
        request.forget_cache(request.cached_len)

    def _advance(self, request: LMRequest, kept_len: int, token_ids: TokenArray) -> None:
        if kept_len < len(request.text):
            request.roll_back(kept_len)
        request.append(token_ids)
        self._catch_up(request)

    def _catch_up(self, request: LMRequest) -> None:
        """Move the tree's root to the end of the text.

        Does nothing while the engine works on the request, because its tree must not change then.
        """
        tree = request.tree
        if tree is None or request.pending is not None or request.root_len == len(request.text):
            return
        num_tokens, path = len(request.text) - request.root_len, self._learn(request)
        hit = len(path) == num_tokens and path[-1].ranking is not None
        path_slots = [node.slot for node in path if node.slot >= 0]
        if self.engine.cached_len(request.request_id) != request.cached_len:
            request.forget_cache(self.engine.cached_len(request.request_id))
        elif hit:
            self.engine.retain(request.request_id, path_slots, tree.reroot(path[-1]))
            request.cached_len += len(path_slots)
            request.root_len = len(request.text)
            request.changed = True
        else:
            if path_slots:
                self.engine.retain(request.request_id, path_slots)
            request.forget_cache(request.cached_len + len(path_slots))

    @torch.inference_mode()
    def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Proposal]:
        """See `Drafter.propose`.

        Trees that a commit re-rooted are proposed at once, without a forward pass; otherwise one
        engine step expands the most likely leaves of all requests.
        """
        asked = self._asked(tasks)
        changed = [entry for entry in asked if entry[0].changed]
        if not changed:
            grown = self._grow_natively(asked)
            self._submit([entry for entry in asked if entry[0] not in grown])
            grown |= self._step()
            for request in grown:
                request.changed = True  # also proposed later if this call does not ask for it
            changed = [entry for entry in asked if entry[0] in grown]
        for request, _ in changed:
            request.changed = False
        return [self._proposal(request, max_nodes) for request, max_nodes in changed]

    def graft(self, trees: Sequence[Proposal]) -> None:
        """See `Grafting`; where the model has a tree of its own, it goes on with that."""
        for tree in trees:
            request = self._requests.get(tree.request_id, tree.generation)
            if request is not None and request.tree is None and tree.base_len == len(request.text):
                request.graft = tree.tree.first(self._max_rows)

    def interrupt(self) -> None:
        """See `Interruptible`: native growth ends after the current forward pass."""
        if self.engine.grower is not None:
            self.engine.grower.interrupt()

    def _grow_natively(self, requests: Sequence[tuple[LMRequest, int]]) -> set[LMRequest]:
        """Run native forward passes for the requests that allow it; returns those that grew."""
        grower, rules = self.engine.grower, self._rules
        if grower is None or rules is None:
            return set()
        able: list[LMRequest] = []
        growing: list[Growing] = []
        for request, num_asked in requests:
            max_slots = self._num_expanded(num_asked)
            least = self._least(request.tree, num_asked)
            if request.can_grow_natively(max_slots, least) and request.is_draftable:
                fit = self._fits_of(request)[0]
                able.append(request)
                num_wanted = num_asked if self._is_resident else 0
                growing.append(request.growing(max_slots, num_wanted, fit.tau, fit.coverage))
        largest = max((len(each.work.tree) for each in growing), default=0)
        length = max(largest / _SLICE_NODES, len(able) / _SLICE_REQUESTS, 1.0)
        rules.max_seconds = self._slice_s * length
        grown: set[LMRequest] = set()
        for request, answer in zip(able, grower.grow(growing, rules), strict=True):
            if answer is not None:
                request.grown(answer)
                grown.add(request)
        return grown

    def _growth_rules(self) -> GrowthRules | None:
        """The rules by which the engine's native code grows trees, None if it cannot."""
        grower, options = self.engine.grower, self._options
        count = min(options.num_candidates, self._num_columns)
        if grower is None or count > grower.max_candidates:
            return None
        return GrowthRules(
            count,
            min(options.num_children, count),
            options.width,
            self._max_rows,
            self._num_columns,
            options.min_survival,
            KEPT_SHARE,
        )

    def _num_expanded(self, num_asked: int) -> int:
        per_node = 1 if self._is_resident else self._options.expanded_per_node
        return min(per_node * num_asked, self._max_nodes)

    def _least(self, tree: LiveTree | None, num_asked: int) -> float:
        """In the pool trees also grow for later commits."""
        least: float = self._options.min_survival
        return super()._least(tree, num_asked) if self._is_resident else least

    def _submit(self, requests: Sequence[tuple[LMRequest, int]]) -> None:
        """Queue the next engine work of each request: its missing text, or its best leaves.

        requests: each with the number of nodes asked for.
        """
        growing: list[tuple[LMRequest, int]] = []
        for request, num_asked in requests:
            if request.pending is not None or request.read.is_behind:
                continue
            if not request.is_draftable:  # so its pages are free for others
                self.engine.release(request.request_id)
                request.forget_cache(0)
            elif request.tree is None:
                self.engine.submit(request.delta_work())
            else:
                growing.append((request, num_asked))
        for request, leaves in self._leaves(growing):
            self.engine.submit(request.leaves_work(leaves))

    def _step(self) -> set[LMRequest]:
        """Run one engine step; returns the requests that it works on, finished or not."""
        if not self.engine.has_pending:
            return set()
        grown = {request for request in self._requests if request.pending is not None}
        outputs = self.engine.step()
        rows: list[tuple[LMRequest, Node]] = []
        logits: list[torch.Tensor] = []
        for output in outputs:
            request = self._requests.find(output.request_id)
            if request is None or request.pending is None:
                continue
            nodes = request.completed(output)
            if output.error is not None:
                log.info(
                    "drafter stopped drafting for a request drafter=%s code=%s",
                    self._name,
                    output.error.code,
                )
            if output.logits is not None and nodes:
                rows.extend((request, node) for node in nodes)
                logits.append(output.logits)
        if rows:
            together = logits[0] if len(logits) == 1 else torch.cat(logits)
            self._expand(rows, together[:, : self._num_columns])
        for request in grown:
            if request.pending is None and len(request.judged):
                request.judged = EMPTY_TREE
                if request.tree is not None:  # the grafts that the model does not hold likely go
                    self.engine.retain(
                        request.request_id, (), request.tree.reroot(request.tree.root)
                    )
            self._catch_up(request)
        return grown

    def release(self, request_ids: Sequence[str]) -> None:
        """See `Drafter.release`."""
        for request_id in request_ids:
            if self._requests.pop(request_id) is not None:
                self.engine.release(request_id)
