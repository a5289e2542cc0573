"""The least step loop that can drive a verifier: each text has one item per step."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cluster.core import EMPTY_TREE, SamplingParams, TokenTree, token_array
from cluster.engine.work import Verdict
from cluster.rpc.messages import Open
from cluster.worker.texts import TargetText
from cluster.worker.verifier import Verifier
from tests.support.spec.trees import random_tree

# (tokens so far) -> a tree that continues them
Drafter = Callable[[Sequence[int]], TokenTree]


def no_drafts(tokens: Sequence[int]) -> TokenTree:
    return EMPTY_TREE


def random_drafts(seed: int, vocab_size: int) -> Drafter:
    generator = np.random.default_rng(seed)
    return lambda tokens: random_tree(generator, vocab_size, 8)


def chain_of_the_truth(text: Sequence[int]) -> Drafter:
    """Knows the text: every draft is right."""
    return lambda tokens: TokenTree.chain(list(text[len(tokens) : len(tokens) + 5]))


def half_right(text: Sequence[int], seed: int, vocab_size: int) -> Drafter:
    """A tree around the true text: right nodes, wrong siblings, and wrong turns further down."""
    generator = np.random.default_rng(seed)

    def propose(tokens: Sequence[int]) -> TokenTree:
        node, ids, parents = -1, [], []
        for token in text[len(tokens) : len(tokens) + int(generator.integers(0, 5))]:
            wrong = int(generator.integers(0, vocab_size))
            if wrong != token:
                ids.append(wrong)
                parents.append(node)
            if generator.random() < 0.15:
                break
            ids.append(int(token))
            parents.append(node)
            node = len(ids) - 1
        return TokenTree.of(ids, parents)

    return propose


def drafters_around(text: Sequence[int], vocab_size: int, num_seeds: int = 1) -> list[Drafter]:
    """What any text must survive: right drafts, half right ones and random ones."""
    return [
        chain_of_the_truth(text),
        *(half_right(text, seed, vocab_size) for seed in range(num_seeds)),
        *(random_drafts(seed, vocab_size) for seed in range(num_seeds)),
    ]


class Session:
    """One text, and what the verifier has said of it.  written: its output so far."""

    def __init__(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        generation: int = 0,
        written: Sequence[int] = (),
        adapter: str = "",
    ) -> None:
        self.request_id = request_id
        tokens, max_len = token_array([*prompt, *written]), len(prompt) + params.max_tokens
        told = request_id, generation, tokens, 0, len(prompt), params, max_len
        self.record = TargetText(request_id, Open(*told, "", adapter=adapter))
        self.verdicts: list[Verdict] = []
        self.num_misses = 0

    def change(self, **fields: Any) -> None:
        """Be another one than was opened."""
        self.record.opened = replace(self.record.opened, **fields)

    @property
    def tokens(self) -> list[int]:
        return self.record.tokens.token_ids.tolist()

    @property
    def output(self) -> list[int]:
        return self.tokens[self.record.opened.prompt_len :]

    def item(self, tree: TokenTree = EMPTY_TREE) -> tuple[TargetText, TokenTree]:
        return self.record, tree

    def take(self, verdict: Verdict) -> None:
        assert verdict.context_len == len(self.record.tokens)
        assert len(verdict.token_ids) == len(verdict.path) + 1
        self.record.tokens.append(verdict.token_ids)
        assert self.record.held_len == len(self.record.tokens) - 1
        self.verdicts.append(verdict)


def decode_all(
    verifier: Verifier,
    sessions: Sequence[Session],
    drafters: Sequence[Drafter],
    num_tokens: int,
    *,
    release: bool = False,
) -> None:
    """Rounds over all sessions together until each has num_tokens output tokens or more.

    release: forget each one at the target as soon as it has.
    """
    by_id = {session.request_id: session for session in sessions}
    waiting: set[str] = set()
    while any(len(session.output) < num_tokens for session in sessions):
        items = [
            session.item(drafter(session.tokens))
            for session, drafter in zip(sessions, drafters, strict=True)
            if len(session.output) < num_tokens and session.request_id not in waiting
        ]
        waiting |= {record.id for record, _ in items}
        assert verifier.submit(items) == {}
        frame = verifier.step()
        assert frame.refused == {}
        for name in frame.missed:
            by_id[name].num_misses += 1
        for verdict in frame.verdicts:
            waiting.discard(verdict.request_id)
            session = by_id[verdict.request_id]
            session.take(verdict)
            if release and len(session.output) >= num_tokens:
                verifier.release([session.request_id])


def until_stop(text: list[int], params: SamplingParams) -> list[int]:
    """The text without its stop token, and what is behind it."""
    for place, token in enumerate(text):
        if token in params.stop_token_ids and place >= params.min_tokens:
            return text[:place]
    return text


def decode(
    verifier: Verifier,
    prompt: Sequence[int],
    params: SamplingParams,
    drafter: Drafter = no_drafts,
    num_tokens: int = 20,
) -> list[int]:
    """One request from start to end: its first num_tokens output tokens."""
    session = Session("decode", prompt, params)
    decode_all(verifier, [session], [drafter], num_tokens)
    verifier.release(["decode"])
    return session.output[:num_tokens]
