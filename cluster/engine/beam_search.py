"""Beam search over an engine: the beams are one live tree behind the text that they share.

    run = BeamRun("a", prompt, spec, max_tokens=50)
    engine.submit(run.work())
    ...                               # for its output of each step:
    run.take(output, engine)          # then engine.submit(run.work()), unless run.is_done
    engine.release("a")

A step evaluates the newest token of each beam, and drafts that continue the beams.  The search goes
on while the laws are known that can matter, so one forward makes as many of its steps as the drafts
cover.  A law is kept while its node may still become a beam.  Then nodes that no beam continues
give up their slots, and what all beams have in common is committed; so the pages that are held are
those of the texts that are still alive, each shared part once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from cluster.core import FloatArray, TokenArray, TokenTree, token_array
from cluster.engine.work import Output, Work
from cluster.requests.beam_spec import BeamSpec
from cluster.spec.beam_guesses import MAX_WORDS, BeamGuesses, Options
from cluster.spec.beam_search import BeamSearch, Hypothesis


class Retaining(Protocol):
    """The part of `cluster.engine.engine.Engine` that a run needs."""

    def retain(self, request_id: str, path: Sequence[int], keep: Sequence[int] = ()) -> None: ...


# The most probable tokens at a place with their log-probabilities, the most probable first.
Law = tuple[TokenArray, FloatArray]


@dataclass(slots=True, eq=False)
class _Node:
    """A token behind the shared text.

    parent: its node, -1 = the shared text.  words: the last ones of the text that ends with it.
    law: after it; None = it is not evaluated yet.  options: the law's first tokens.  guessed: the
    first tokens of what would have been guessed in its place."""

    token_id: int
    parent: int
    words: tuple[int, ...]
    law: Law | None = None
    options: Options = ()
    guessed: Options = ()


class BeamRun:
    """The search of one request.  Not thread-safe; `take` needs the outputs of `work` in turn."""

    def __init__(
        self,
        request_id: str,
        prompt_ids: TokenArray,
        spec: BeamSpec,
        max_tokens: int,
        stop_token_ids: Sequence[int] = (),
        num_logprobs: int | None = None,
        tenant: bytes = b"",
        adapter: int = 0,
    ) -> None:
        """prompt_ids: at least one token.  num_logprobs: as `BeamSearch` has it; tenant, adapter:
        as `Work` has them."""
        self.request_id = request_id
        self._search = BeamSearch(spec, max_tokens, stop_token_ids, num_logprobs)
        self._width = spec.num_beams
        # The tokens beyond the shared text that a place is sure for; drafts count too.
        self._max_nodes = spec.num_beams * max_tokens
        self._num_top = max(self._search.num_candidates, num_logprobs or 0)
        self._tenant = tenant
        self._adapter = adapter
        # The text that all beams share, and how much of it the engine is believed to hold.
        self._context = token_array(prompt_ids)
        self._cached_len = 0
        # What is known beyond it, as one tree: parents before children, nodes with laws before
        # those without.  So many leading nodes hold KV.
        self._nodes: list[_Node] = []
        self._num_cached = 0
        self._places: dict[tuple[int, int], int] = {}  # of nodes, by parent and token
        # The node of each of the search's beams.
        self._tips: list[int] = []
        self.num_guessed = 0  # steps of which all beams would have been guessed
        self._stops = frozenset(stop_token_ids)
        self._guesses = BeamGuesses(self._context)

    @property
    def _words(self) -> tuple[int, ...]:
        """The last words of the shared text."""
        return tuple(self._context[-MAX_WORDS:].tolist())

    @property
    def is_done(self) -> bool:
        return self._search.is_done

    @property
    def num_nodes(self) -> int:
        """Nodes of the live tree."""
        return len(self._nodes)

    @property
    def num_beams(self) -> int:
        """Beams that are alive."""
        return len(self._tips)

    @property
    def num_steps(self) -> int:
        """Steps of the search so far."""
        return self._search.num_steps

    @property
    def hypotheses(self) -> list[Hypothesis]:
        """The finished texts, the best first."""
        return self._search.hypotheses

    def draft(self, num_nodes: int) -> None:
        """Have up to so many nodes evaluated by the next work that may become beams later.

        They are where the search would go on by the laws that it knows, and by guesses of others.
        """
        # A beam whose law is known leaves its row to one more draft; and where the last work has
        # failed, its drafts are still waiting.
        num_waiting = sum(node.law is None for node in self._nodes) - len(self._tips)
        room = min(num_nodes - num_waiting, self._max_nodes - len(self._nodes))
        beams = self._search.beams
        ahead = [(float(beam.logprob), tip) for beam, tip in zip(beams, self._tips, strict=True)]
        for _ in range(self._search.num_left - 1):
            options = [
                (total + logprob, tip, token)
                for total, tip in ahead
                for token, logprob in self._options(self._nodes[tip])
                if token not in self._stops
            ]
            if not options:
                return
            ahead = []
            for total, tip, token in sorted(options, reverse=True)[: self._width]:
                if (tip, token) not in self._places:
                    if room <= 0:
                        return
                    room -= 1
                ahead.append((total, self._place(token, tip)))

    def _options(self, node: _Node) -> Options:
        return self._guesses.law_after(node.words) if node.law is None else node.options

    def _place(self, token_id: int, parent: int) -> int:
        """Return the node of a token behind another one; it is added where there is none."""
        key = parent, token_id
        if key not in self._places:
            words = self._nodes[parent].words if parent >= 0 else self._words
            self._places[key] = len(self._nodes)
            self._nodes.append(_Node(token_id, parent, (*words, token_id)[-MAX_WORDS:]))
        return self._places[key]

    def work(self) -> Work:
        """The work that the engine is to evaluate next."""
        delta = self._context[self._cached_len :]
        stop = self._next_stop()
        nodes = self._nodes[:stop]
        tree = TokenTree.of([node.token_id for node in nodes], [node.parent for node in nodes])
        # The first row is the shared text's last one where that is evaluated.
        rows = enumerate(nodes[self._num_cached :], int(len(delta) > 0))
        wanted = [row for row, node in rows if node.law is None] if self._tips else [0]
        return Work(
            self.request_id,
            self._cached_len,
            delta,
            tree,
            self._num_cached,
            tenant=self._tenant,
            num_top=self._num_top if wanted else 0,
            top_rows=tuple(wanted) or None,
            adapter=self._adapter,
        )

    def _next_stop(self) -> int:
        """The node at which the next work stops: behind all of them, but where the cache was lost.

        Then those with laws are evaluated first, few at a time, as they were before."""
        num_known = sum(node.law is not None for node in self._nodes)
        if self._num_cached < num_known:
            return min(self._num_cached + self._width, num_known)
        return len(self._nodes)

    def take(self, output: Output, engine: Retaining) -> None:
        """Go on with the engine's answer to `work`; raises its RequestError where it has one."""
        if output.error is not None:
            raise output.error
        if output.have_len is not None:
            self._cached_len = min(output.have_len, len(self._context))
            self._num_cached = 0
            return
        found = range(self._num_cached, self._next_stop())
        self._num_cached = found.stop
        self._cached_len = len(self._context)
        if output.top is None:
            return  # more of what was lost is to be evaluated
        known = list(zip(output.top.token_ids, output.top.logprobs, strict=True))
        laws: list[Law | None] = [*known]
        if self._tips:
            new = [self._nodes[node] for node in found if self._nodes[node].law is None]
            for node, law in zip(new, known, strict=True):
                node.law, node.guessed = law, self._guesses.law_after(node.words)[:2]
                node.options = self._guesses.learn(node.words, law)
            laws = [self._nodes[tip].law for tip in self._tips]
        while self._advance(laws) and not self.is_done:
            laws = [self._nodes[tip].law for tip in self._tips]
        if not self.is_done:
            self._settle(engine)

    def _advance(self, laws: Sequence[Law | None]) -> bool:
        """Make one step of the search, unless it needs a law that is not known yet.

        laws: after each beam, or after the prompt."""
        shape = next((law for law in laws if law is not None), None)
        if shape is None:
            return False
        # Of an unknown law it is only known that no log-probability is above 0.
        rows = [law or (np.full_like(shape[0], -1), np.zeros_like(shape[1])) for law in laws]
        unknown = [row for row, law in enumerate(laws) if law is None]
        ids, logprobs = (np.stack(each) for each in zip(*rows, strict=True))
        if not self._search.advance(ids, logprobs, unknown):
            return False
        if self._tips:
            found = ((each, self._nodes[self._tips[each.row]]) for each in self._search.beams)
            self.num_guessed += all(each.token_id in dict(node.guessed) for each, node in found)
        parents = self._tips or [-1]
        self._tips = [self._place(each.token_id, parents[each.row]) for each in self._search.beams]
        return True

    def _settle(self, engine: Retaining) -> None:
        """Drop the nodes that no beam is, was or may become, and commit what all beams share."""
        path, kept = _survivors([node.parent for node in self._nodes], self._tips)
        # The others are beams that have been found just now, behind all nodes before them.
        cached = [node for node in kept if node < self._num_cached]
        engine.retain(self.request_id, path, cached)
        committed = [self._nodes[node].token_id for node in path]
        self._context = np.concatenate((self._context, token_array(committed)))
        self._cached_len = len(self._context)
        self._num_cached = len(cached)
        places = {node: index for index, node in enumerate(kept)} | dict.fromkeys([-1, *path], -1)
        self._nodes = [self._nodes[node] for node in kept]
        for node in self._nodes:
            node.parent = places[node.parent]
        self._places = {(each.parent, each.token_id): at for at, each in enumerate(self._nodes)}
        self._tips = [places[tip] for tip in self._tips]


def _survivors(parents: Sequence[int], tips: Sequence[int]) -> tuple[list[int], list[int]]:
    """The nodes before all of `tips`; and the tips, what is before some of them or behind any.

    parents: by node, -1 = the context.  Both ascending."""
    counts: dict[int, int] = {}
    for tip in tips:
        node = parents[tip]
        while node >= 0:
            counts[node] = counts.get(node, 0) + 1
            node = parents[node]
    path = sorted(node for node, count in counts.items() if count == len(tips))
    kept = (counts.keys() - set(path)) | set(tips)
    behind = set(tips)
    for node, parent in enumerate(parents):
        if parent in behind:
            behind.add(node)
    return path, sorted(kept | behind)
