"""The least coordinator that can drive a verifier: one request, one item per step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from cluster.core import EMPTY_TREE, SamplingParams, TokenTree, Verdict, VerifyItem, token_array
from cluster.messages import Refusal
from cluster.spec.token_log import prefix_hash
from cluster.worker.item_check import CacheMiss
from cluster.worker.verifier import Verifier
from tests.support.spec.trees import random_tree

# (tokens so far) -> a tree that continues them
Drafter = Callable[[Sequence[int]], TokenTree]


def no_drafts(tokens: Sequence[int]) -> TokenTree:
    return EMPTY_TREE


def random_drafts(seed: int, vocab_size: int, num_nodes: int = 8) -> Drafter:
    generator = np.random.default_rng(seed)
    return lambda tokens: random_tree(generator, vocab_size, num_nodes)


def chain_of_the_truth(text: Sequence[int], length: int = 5) -> Drafter:
    """Knows the text: every draft is right."""
    return lambda tokens: TokenTree.chain(list(text[len(tokens) : len(tokens) + length]))


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


class Session:
    """The coordinator's copy of one sequence, and what it believes the target holds."""

    def __init__(
        self, request_id: str, prompt: Sequence[int], params: SamplingParams, generation: int = 0
    ) -> None:
        self.request_id = request_id
        self.tokens = [int(token) for token in prompt]
        self.prompt_len = len(prompt)
        self.params = params
        self.generation = generation
        self.base_len = 0
        self.verdicts: list[Verdict] = []
        self.num_misses = 0

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    def item(self, tree: TokenTree = EMPTY_TREE) -> VerifyItem:
        return VerifyItem(
            request_id=self.request_id,
            generation=self.generation,
            base_len=self.base_len,
            prefix_hash=prefix_hash(self.tokens[: self.base_len]),
            delta=token_array(self.tokens[self.base_len :]),
            tree=tree,
            prompt_len=self.prompt_len,
            params=self.params if self.base_len == 0 else None,
        )

    def take(self, answer: Verdict | CacheMiss | Refusal) -> None:
        assert answer.generation == self.generation
        if isinstance(answer, Refusal):
            raise AssertionError(f"{answer.code}: {answer.message}")
        if isinstance(answer, CacheMiss):
            assert answer.have_len <= self.base_len
            self.base_len = answer.have_len
            self.num_misses += 1
            return
        assert answer.context_len == len(self.tokens)
        assert len(answer.token_ids) == len(answer.path) + 1
        self.tokens += answer.token_ids.tolist()
        self.base_len = answer.context_len + len(answer.path)
        self.verdicts.append(answer)


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
        waiting |= {item.request_id for item in items}
        answers = list(verifier.submit(items))
        if verifier.has_pending:
            frame = verifier.step()
            answers += [*frame.verdicts, *frame.misses, *frame.refusals]
        for answer in answers:
            waiting.discard(answer.request_id)
            session = by_id[answer.request_id]
            session.take(answer)
            if release and len(session.output) >= num_tokens:
                verifier.release([session.request_id])


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
