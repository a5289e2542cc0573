"""One request of the LM drafter: its text, its state in the engine's cache, and its tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from cluster.core import EMPTY_TREE, TokenArray, TokenTree
from cluster.draft.candidates import are_unprocessed, ranked_draw
from cluster.draft.intersection import ReadText
from cluster.draft.live_tree import LiveTree, Node
from cluster.draft.tree_drafter import TreeRequest
from cluster.draft.vocabulary import DraftVocabulary
from cluster.engine.cpu.growth import Growing, Grown
from cluster.engine.work import Output, Work

# The native code prefills at most this many missing tokens; the engine's scheduler does more.
_MAX_NATIVE_DELTA = 16


def window_start(text_len: int, window: int) -> int:
    """Return where the window of a text begins, a multiple of its half.

    So a window moves once per half window, and equal texts meet in the engine's prefix cache.
    """
    half = max(window // 2, 1)
    return max(-(-(text_len - window) // half), 0) * half


@dataclass(slots=True, eq=False)
class LMRequest(TreeRequest):
    """The state of one request.

    Text and tree consist of the target's tokens.  The engine gets the text from window_start on, as
    `read` has it, and the tree's nodes by `vocabulary` where the model has one of its own.

    window: see `LMOptions.context_window`, but for a text that the model reads in more tokens than
    it has; longest: so many may be read.  cached_len: tokens of `read` that the engine should hold
    in its KV cache.  tree: None while the logits at the end of the text are missing; its root is
    behind the text only while work is pending.  pending: the engine's current work: the text, or
    these leaves of the tree.  changed: the tree was re-rooted, or grew without being asked for, and
    has not been proposed since.  graft: another drafter's tree behind the text, for the next pass
    to judge.  judged: one that is being judged.
    """

    vocabulary: DraftVocabulary | None = None
    read: ReadText = field(init=False)
    window_start: int = 0
    window: int = 0
    longest: int = 0
    cached_len: int = 0
    pending: Literal["text"] | list[Node] | None = None
    changed: bool = False
    graft: TokenTree = EMPTY_TREE
    judged: TokenTree = EMPTY_TREE
    # Lengths of the window's text.  While work is pending: how many tokens have not changed since
    # it was submitted.
    _valid_len: int = 0
    _pending_len: int = 0  # when the work was submitted
    _failed: bool = False  # the engine can never serve this text

    def roll_back(self, length: int) -> None:
        """Cut the text to `length` tokens, fewer than it has."""
        self.text.truncate(length)
        self.graft = EMPTY_TREE
        self._keep_read(max(length - self.window_start, 0))

    def _keep_read(self, length: int) -> None:
        """Cut the window to `length` tokens."""
        self.read.truncate(length)
        self._valid_len = min(self._valid_len, self.read.num_read)
        self._failed = False
        self.forget_cache(min(self.cached_len, len(self.read.log)))

    def append(self, token_ids: TokenArray) -> None:
        """Append tokens to the text, and move the window where it is full."""
        self.text.append(token_ids)
        self.graft = EMPTY_TREE
        self._read_on()
        while len(self.read.log) > self.longest:  # in more tokens than the text has
            self.window = self.window * 3 // 4
            self._read_on()

    def _read_on(self) -> None:
        start = window_start(len(self.text), self.window)
        if start != self.window_start:
            self._keep_read(0)
            self.window_start = start
        self.read.append(self.text.since(start + self.read.num_read))

    def network_len(self, length: int) -> int:
        """See `TreeRequest`."""
        return self.read.len_at(length - self.window_start)

    def forget_cache(self, cached_len: int) -> None:
        """Drop the tree and assume that the engine holds only `cached_len` tokens."""
        self.cached_len = cached_len
        self.tree = None

    @property
    def is_draftable(self) -> bool:
        """True if the model can process the text and a draft could still save a step."""
        return not self._failed and len(self.read.log) > 0 and self.can_use_drafts

    def delta_work(self) -> Work:
        """Work for the text that the engine lacks, and the graft; marks it as pending.

        Contains at least the last token, for the logits after it.  The tokens are copied, because
        the text may be rolled back while the engine reads them.
        """
        text = self.read.log
        base_len = min(self.cached_len, len(text) - 1)
        self.judged, self.graft = self.graft, EMPTY_TREE
        self.pending = "text"
        self._mark_submitted()
        return self._work(base_len, text.token_ids[base_len:].copy(), self.judged)

    def _work(self, base_len: int, delta: TokenArray, tree: TokenTree, num_cached: int = 0) -> Work:
        """Work behind the first tokens of `read`; tree: of the target's tokens."""
        if self.vocabulary is not None:
            tree = TokenTree(self.vocabulary.read(tree.token_ids), tree.parents)
        prefix_hash = self.read.log.hash_at(base_len)
        return Work(self.request_id, base_len, delta, tree, num_cached, prefix_hash, self.tenant)

    def leaves_work(self, leaves: list[Node]) -> Work:
        """Work for the tree with `leaves` (ascending) as new nodes; marks them as pending."""
        num_cached = len(self.live.expanded)
        self.live.assign_slots(leaves)
        self.pending = leaves
        self._mark_submitted()
        nothing, tree = self.text.token_ids[:0], self.live.engine_tree()
        return self._work(self.cached_len, nothing, tree, num_cached)

    def can_grow_natively(self, max_slots: int, min_survival: float) -> bool:
        """True if the native code supports the request's parameters and has something to grow."""
        tree, params = self.tree, self.params
        if self.pending is not None or self.read.is_behind:
            return False
        # The native code shapes trees by what the tokens are.
        if not (are_unprocessed(params) and params.is_coupled):
            return False
        if tree is None:
            num_missing = len(self.read.log) - self.cached_len
            return not len(self.graft) and num_missing <= _MAX_NATIVE_DELTA
        return len(tree.expanded) < max_slots and tree.best_leaf_survival() >= min_survival

    def growing(self, max_slots: int, num_wanted: int, tau: float, coverage: float) -> Growing:
        """Input of the native growth: the tree, or the missing text if there is no tree yet."""
        params, text, vocabulary = self.params, self.read.log, self.vocabulary
        base_len = min(self.cached_len, len(text) - (self.tree is None))
        tree = self.tree or LiveTree()
        stop_token_ids = params.stop_token_ids
        leaves, leaf_survivals = tree.leaves()
        if vocabulary is not None:
            leaves[1] = vocabulary.read(leaves[1])
            written = map(vocabulary.draft_id_of, stop_token_ids)
            stop_token_ids = tuple(each for each in written if each is not None)
        expanded = tree.engine_tree()
        return Growing(
            self._work(base_len, text.token_ids[base_len:], expanded, len(expanded)),
            leaves,
            leaf_survivals,
            len(tree) + 1,
            max_slots,
            num_wanted,
            tree.best_survivals(num_wanted),
            ranked_draw(params, self.next_position, vocabulary),
            tau,
            coverage,
            params.max_tokens,
            params.min_tokens,
            stop_token_ids,
        )

    def grown(self, answer: Output | Grown) -> None:
        """Apply the engine's answer to `growing`."""
        if isinstance(answer, Output):
            self.forget_cache(answer.have_len or 0)
            return
        if self.tree is None:
            self.forget_cache(len(self.read.log))
            self.begin()
        if self.vocabulary is not None:
            written = self.vocabulary.target_ids
            answer = replace(
                answer,
                children=written[answer.children].tolist() if answer.children else [],
                token_ids=written[answer.token_ids].astype(np.int64),
            )
        self.live.adopt(answer)

    def _mark_submitted(self) -> None:
        self._pending_len = self._valid_len = self.read.num_read

    def completed(self, output: Output) -> Sequence[Node]:
        """Apply the engine's answer to the pending work; returns the nodes of its logits."""
        pending, self.pending = self.pending, None
        if output.error is not None:
            self._failed = True
            self.forget_cache(0)
        elif output.have_len is not None:
            self.forget_cache(min(output.have_len, self.read.len_at(self._valid_len)))
        elif pending == "text":
            self.forget_cache(self.read.len_at(self._valid_len))
            if self._valid_len == self._pending_len:
                self.tree, self.root_len = LiveTree(), self.window_start + self._pending_len
                return (self.tree.root, *self.tree.graft(self.judged))
        elif self.tree is not None and isinstance(pending, list):
            return pending
        return ()
