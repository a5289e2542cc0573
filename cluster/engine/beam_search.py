"""Beam search over an engine: the beams are one live tree behind the text that they share.

    run = BeamRun("a", prompt, params, engine.limits)
    engine.submit(run.work())
    ...                               # for its output of each step:
    run.take(output, engine)          # then engine.submit(run.work()), unless run.is_done
    engine.release("a")

A step evaluates the newest token of each beam.  Before it, nodes that no beam continues give up
their slots, and what all beams have in common is committed; so the pages that are held are those
of the texts that are still alive, each shared part once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from cluster.core import (
    EMPTY_TOKENS,
    SamplingParams,
    TokenArray,
    TokenLogprob,
    TokenTree,
    token_array,
)
from cluster.engine.work import EngineLimits, Output, Steps, Verdict, Work
from cluster.errors import RequestError
from cluster.requests.fields import BeamEnd
from cluster.spec.beam_search import Beam, BeamSearch, Hypothesis

# The most tokens of all beams beyond their common prefix: a step handles each pair of them, also on
# the host.
_MAX_LIVE_TOKENS = 4096


class BeamRun:
    """The search of one request.  Not thread-safe; `take` needs the outputs of `work` in turn."""

    def __init__(
        self,
        request_id: str,
        prompt_ids: TokenArray,
        params: SamplingParams,
        limits: EngineLimits,
        tenant: bytes = b"",
        adapter: int = 0,
    ) -> None:
        """prompt_ids: at least one token.  params: with `beams`; their limits, stops and logprobs
        count.  limits: of the engine.  tenant, adapter: as `Work` has them.  Raises RequestError
        for a search that may find no room."""
        spec = params.beams
        assert spec is not None
        _check_room(len(prompt_ids), spec.num_beams, params.max_tokens, limits)
        self.request_id = request_id
        self._search = BeamSearch(spec, params.max_tokens, params.stop_token_ids, params.logprobs)
        self._width = spec.num_beams
        self._num_top = max(self._search.num_candidates, params.logprobs or 0)
        self._tenant = tenant
        self._adapter = adapter
        self._prompt_len = len(prompt_ids)
        # The text that all beams share, and how much of it the engine is believed to hold.
        self._context = token_array(prompt_ids)
        self._cached_len = 0
        # What each beam has beyond it, as one tree: parents before children, the newest token of
        # each beam last.  So many leading nodes hold KV.
        self._nodes: list[Beam] = []
        self._parents: list[int] = []
        self._num_cached = 0

    @property
    def is_done(self) -> bool:
        return self._search.is_done

    @property
    def hypotheses(self) -> list[Hypothesis]:
        """The finished texts, the best first."""
        return self._search.hypotheses

    def verdict(self) -> Verdict:
        """The verdict that ends the finished search; raises RequestError for broken logits."""
        ends: list[BeamEnd] = []
        token_ids: list[int] = []
        logprobs: list[TokenLogprob] = []
        for one in self.hypotheses:
            if not np.isfinite(one.score):
                raise RequestError(
                    "the model's logits have no finite law here; the model or its dtype overflows"
                )
            # A stop token ends a text and is not part of it.
            path = one.beam.lineage()[: -1 if one.is_stopped else None]
            token_ids += [beam.token_id for beam in path]
            logprobs += [beam.chosen for beam in path if beam.chosen is not None]
            end = BeamEnd(len(path), one.is_stopped, float(one.beam.logprob), float(one.score))
            ends.append(end)
        return Verdict(
            self.request_id,
            self._prompt_len,
            EMPTY_TOKENS,
            token_array(token_ids),
            tuple(logprobs),
            beams=tuple(ends),
        )

    def work(self) -> Work:
        """The work that the engine is to evaluate next."""
        delta = self._context[self._cached_len :]
        stop = self._next_stop()
        tree = TokenTree.of([node.token_id for node in self._nodes[:stop]], self._parents[:stop])
        return Work(
            self.request_id,
            self._cached_len,
            delta,
            tree,
            self._num_cached,
            tenant=self._tenant,
            num_top=self._num_top if stop == len(self._nodes) else 0,
            adapter=self._adapter,
        )

    def _next_stop(self) -> int:
        """The node at which the next work stops: behind all of them, but where the cache was lost.

        Then the older ones are evaluated first, few at a time, as they were before."""
        num_older = len(self._nodes) - len(self._search.beams)
        if self._num_cached < num_older:
            return min(self._num_cached + self._width, num_older)
        return len(self._nodes)

    def take(self, output: Output, engine: Steps) -> None:
        """Go on with the engine's answer to `work`; raises its RequestError where it has one."""
        if output.error is not None:
            raise output.error
        if output.have_len is not None:
            self._cached_len = min(output.have_len, len(self._context))
            self._num_cached = 0
            return
        self._num_cached = self._next_stop()
        self._cached_len = len(self._context)
        if output.top is None:
            return  # more of what was lost is to be evaluated
        beams = self._search.beams
        # Where the cache was lost, the shared text has a row too: the first.
        newest = slice(-max(1, len(beams)), None)
        self._search.advance(output.top.token_ids[newest], output.top.logprobs[newest])
        if not self._search.is_done:
            first = len(self._nodes) - len(beams)
            self._grow([first + beam.row if beams else -1 for beam in self._search.beams], engine)

    def _grow(self, parents: Sequence[int], engine: Steps) -> None:
        """Drop the nodes that no beam continues, commit what all share, and add the new tokens.

        parents: the node that each of the search's beams continues, -1 = the context."""
        path, keep = _survivors(self._parents, parents)
        engine.retain(self.request_id, path, keep)
        committed = [self._nodes[node].token_id for node in path]
        self._context = np.concatenate((self._context, token_array(committed)))
        self._cached_len = len(self._context)
        places = {node: index for index, node in enumerate(keep)} | dict.fromkeys([-1, *path], -1)
        self._nodes = [self._nodes[node] for node in keep] + self._search.beams
        self._parents = [places[self._parents[node]] for node in keep]
        self._parents += [places[node] for node in parents]
        self._num_cached = len(keep)


def _check_room(prompt_len: int, num_beams: int, max_tokens: int, limits: EngineLimits) -> None:
    most = num_beams * max_tokens
    if most > _MAX_LIVE_TOKENS:
        raise RequestError(
            f"{num_beams} beams of {max_tokens} tokens are {most}, a search may hold "
            f"{_MAX_LIVE_TOKENS}; send fewer beams (n, best_of) or a smaller max_tokens",
            param="max_tokens",
        )
    error = limits.too_large(prompt_len, most)
    if error is not None:
        raise RequestError(
            f"{num_beams} beams of {max_tokens} tokens behind a prompt of {prompt_len} cannot be "
            f"sure of their place: {error.message}",
            param="max_tokens",
        )


def _survivors(parents: Sequence[int], tips: Sequence[int]) -> tuple[list[int], list[int]]:
    """The nodes that all of `tips` go through, and those that some of them do; ascending.

    tips: nodes, -1 = the context, which nothing is before."""
    counts = Counter[int]()
    for tip in tips:
        node = tip
        while node >= 0:
            counts[node] += 1
            node = parents[node]
    path = sorted(node for node, count in counts.items() if count == len(tips))
    return path, sorted(counts.keys() - set(path))
