"""Drives an engine the way its users do, and transformers as the oracle beside it."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from cluster.core import EMPTY_TREE, TokenArray, TokenTree, token_array
from cluster.engine.engine import Engine, Output, Work
from cluster.spec.token_log import prefix_hash
from cluster.spec.tree import walk_draws
from tests.support.architectures import BY_TEXT, DEFAULT_VOCAB_SIZE, SLIDING_WINDOW
from tests.support.engine.integrity import check_integrity
from tests.support.engine.tiny import tiny
from tests.support.spec.trees import paths

PAGE_SIZE = 4
TREE = TokenTree.of([5, 6, 7, 8], [-1, 0, 0, -1])
# What the fixture `checkpoint_factory` is.
Factory = Callable[..., Path]


def most_pages(num_rows: int) -> int:
    """Of one sequence in layers with a window, where so many rows are written in a step."""
    return -(-(SLIDING_WINDOW + num_rows) // PAGE_SIZE) + 2


def load_engine(folder: Path, **settings: Any) -> Engine:
    """A float32 CPU engine with small pages, so that tests cross their borders."""
    return Engine.load(tiny(folder, settings, page_size=PAGE_SIZE, max_batch_tokens=64))


def num_cached(engine: Engine) -> int:
    """Pages that only the prefix cache keeps."""
    return sum(pool.num_idle for pool in engine.page_owners.pools)


def load_oracle(folder: Path) -> Any:
    """transformers' own model, with all its parts."""
    kinds = {model_type for model_type, _ in BY_TEXT.values()}
    sees = AutoConfig.from_pretrained(folder).model_type in kinds
    factory = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    return factory.from_pretrained(folder, dtype=torch.float32).eval()


def laws_of(oracle: Any, token_ids: Sequence[int]) -> torch.Tensor:
    """The law of every token but the first."""
    with torch.inference_mode():
        return oracle(torch.tensor([token_ids])).logits[0, :-1].log_softmax(dim=1)


def prompt(length: int, seed: int = 0) -> TokenArray:
    """Deterministic tokens, none of them special."""
    return token_array(np.random.default_rng(seed).integers(4, DEFAULT_VOCAB_SIZE, length))


def alike_prompts(endings: Sequence[int]) -> dict[str, TokenArray]:
    """Of five lengths; those of one length part ways in their last token alone."""
    texts = [prompt(length, seed=length) for length in (2, 9, 22, 37, 50)]
    return {
        f"{len(text)}-{last}": np.append(text[:-1], np.int32(last))
        for last in endings
        for text in texts
    }


def generate(oracle: Any, prompt_ids: TokenArray, num_tokens: int) -> list[int]:
    """transformers' own greedy text; an end-of-text token does not end it."""
    return generate_all(oracle, {"one": prompt_ids}, num_tokens)["one"]


def generate_all(
    oracle: Any, prompts: Mapping[str, TokenArray], num_tokens: int
) -> dict[str, list[int]]:
    """The same of many, those of one length at a time."""
    found: dict[str, list[int]] = {}
    for length in {len(ids) for ids in prompts.values()}:
        own = [name for name, ids in prompts.items() if len(ids) == length]
        ids = torch.from_numpy(np.stack([prompts[name] for name in own])).long()
        output = oracle.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=1,
        )
        found |= zip(own, output[:, length:].tolist(), strict=True)
    return found


def last_logits(oracle: Any, token_ids: Sequence[int] | TokenArray) -> torch.Tensor:
    """float32 [vocab]: the plain forward of one path, its last row."""
    ids = torch.as_tensor(token_ids, dtype=torch.int64)[None]
    with torch.inference_mode():
        return oracle(input_ids=ids, use_cache=False).logits[0, -1].float()


def run(engine: Engine, work: Work) -> Output:
    """Submit one work and step until it is answered."""
    engine.submit(work)
    while engine.has_pending:
        for output in engine.step():
            if output.request_id == work.request_id:
                return output
    raise AssertionError(f"{work.request_id} was never answered")


def rows(output: Output) -> torch.Tensor:
    assert output.logits is not None, output
    return output.logits


def expected_rows(oracle: Any, context: TokenArray, tree: TokenTree = EMPTY_TREE) -> torch.Tensor:
    """What an engine must say after `context` and at the nodes."""
    wanted = [(), *paths(tree)]
    return torch.stack([last_logits(oracle, [*context.tolist(), *path]) for path in wanted])


def check_rows(
    output: Output,
    oracle: Any,
    context: TokenArray,
    tree: TokenTree = EMPTY_TREE,
    bound: float = 2e-5,
) -> None:
    """The rows of an answer are those of plain forwards."""
    expected = expected_rows(oracle, context, tree)
    torch.testing.assert_close(rows(output), expected, atol=bound, rtol=bound)


def random_tree(size: int, generator: np.random.Generator) -> TokenTree:
    """Any shape is equally welcome: each node hangs below a random earlier one or the context."""
    parents = [int(generator.integers(-1, node)) if node else -1 for node in range(size)]
    return TokenTree.of(generator.permutation(DEFAULT_VOCAB_SIZE)[:size].tolist(), parents)


def some_commit(
    tree: TokenTree, is_in: Callable[[float], bool], choose: Callable[[list[int]], int]
) -> tuple[list[int], list[int]]:
    """A path, and a prefix-closed part of what hangs below its end; is_in: by a chance."""
    path = []
    tip = -1
    while is_in(0.6) and (children := np.flatnonzero(tree.parents == tip).tolist()):
        tip = int(choose(children))
        path.append(tip)
    kept = []
    for node, parent in enumerate(tree.parents.tolist()):
        if (parent == tip or parent in kept) and node not in path and is_in(0.8):
            kept.append(node)
    return path, kept


class GreedyDecoder:
    """A target in miniature: decodes many requests at once and resends what the engine lost.

    With `generator` and the expected `texts` every step carries a random tree, of which a random
    part is right; without them it decodes plainly.
    """

    def __init__(
        self,
        engine: Engine,
        prompts: Mapping[str, TokenArray],
        num_tokens: int,
        generator: np.random.Generator | None = None,
        texts: Mapping[str, list[int]] | None = None,
        adapters: Mapping[str, int] | None = None,
    ) -> None:
        self.engine = engine
        self._adapters = adapters or {}
        self.num_tokens = num_tokens
        self.prompts = prompts
        self.num_misses = self.num_accepted = 0
        self.counts = Counter()  # of what its steps have done
        self._tokens = {name: ids.tolist() for name, ids in prompts.items()}
        self._held = dict.fromkeys(prompts, 0)
        self._trees: dict[str, TokenTree] = {}
        self._generator = generator
        self._texts = texts or {}

    def run(self) -> dict[str, list[int]]:
        """The texts; every request is released at its end."""
        for name in self.prompts:
            self.start(name)
        for _ in range(5000):
            if not self.engine.has_pending:
                break
            self.step()
        assert not self.engine.has_pending, "the engine did not finish"
        return {name: self.text(name) for name in self.prompts}

    def step(self) -> None:
        """One step of the engine, for all that have begun."""
        for output in self.engine.step():
            self._answer(output)
        check_integrity(self.engine)
        step = self.engine.last_step
        self.counts.update(
            preempted=step.num_preempted,
            hits=step.num_prefix_hit_tokens,
            chunks=step.num_prefill_rows > 0 and step.num_sequences == 0,
        )

    def text(self, name: str) -> list[int]:
        """So far."""
        return self._text(name)[: self.num_tokens]

    def _text(self, name: str) -> list[int]:
        return self._tokens[name][len(self.prompts[name]) :]

    def start(self, name: str) -> None:
        """Begin with one of the prompts, or go on."""
        tokens, held = self._tokens[name], self._held[name]
        self._trees[name] = self._draft(name)
        self.engine.submit(
            Work(
                name,
                held,
                token_array(tokens[held:]),
                self._trees[name],
                prefix_hash=prefix_hash(tokens[:held]),
                adapter=self._adapters.get(name, 0),
            )
        )

    def _draft(self, name: str) -> TokenTree:
        if self._generator is None:
            return EMPTY_TREE
        tree = random_tree(int(self._generator.integers(0, 7)), self._generator)
        upcoming = iter(self._texts[name][len(self._text(name)) :])
        token_ids, tip = tree.token_ids.copy(), -1
        for node, parent in enumerate(tree.parents.tolist()):
            if parent == tip and self._generator.random() < 0.7:
                token_ids[node], tip = next(upcoming, token_ids[node]), node
        return TokenTree(token_ids, tree.parents)

    def _answer(self, output: Output) -> None:
        name = output.request_id
        if output.have_len is not None:
            self.num_misses += 1
            self._held[name] = output.have_len
            self.start(name)
            return
        draws = rows(output).argmax(dim=1).int().numpy()
        path, emitted = (each.tolist() for each in walk_draws(self._trees[name], draws))
        self.engine.retain(name, path)
        self.num_accepted += len(path)
        self._held[name] = len(self._tokens[name]) + len(path)
        self._tokens[name] += emitted
        if len(self._text(name)) >= self.num_tokens:
            self.engine.release(name)
        else:
            self.start(name)


def check_text(
    engine: Engine,
    oracle: Any,
    prompt_ids: TokenArray,
    num_tokens: int,
    generator: np.random.Generator | None = None,
) -> GreedyDecoder:
    """A greedy text is transformers' own; returns what decoded it."""
    texts = {"a": generate(oracle, prompt_ids, num_tokens)}
    decoder = GreedyDecoder(engine, {"a": prompt_ids}, num_tokens, generator, texts)
    assert decoder.run() == texts
    return decoder


def check_crowd(folder: Path, endings: Sequence[int]) -> None:
    """Greedy texts of many prompts are transformers' own, where drafts are right and wrong, prompts
    are cut, prefixes shared and requests preempted."""
    prompts = alike_prompts(endings)
    texts = generate_all(load_oracle(folder), prompts, 12)
    engine = load_engine(folder, max_batch_tokens=16, num_pages=40)
    decoder = GreedyDecoder(engine, prompts, 12, np.random.default_rng(1), texts)
    assert decoder.run() == texts
    assert decoder.num_accepted >= len(prompts)
    assert decoder.num_misses > 0
    assert all(decoder.counts[each] > 0 for each in ("preempted", "hits", "chunks"))
    assert engine.pages_in_use == 0


def varied_works() -> list[Work]:
    """Chunks, a tree, one row alone (padded to two), and a larger step than any before."""
    generator = np.random.default_rng(5)
    return [
        Work("a", 0, prompt(20), random_tree(7, generator)),
        Work("a", 20, prompt(1)),
        Work("b", 0, prompt(60, seed=2), random_tree(3, generator)),
        Work("a", 21, prompt(2, seed=3), random_tree(30, generator)),
    ]


def check_near(narrow: Engine, wide: Engine) -> None:
    """Their rows differ by what rounding leaves, which a random network multiplies."""
    for work in varied_works():
        found, wanted = rows(run(narrow, work)), rows(run(wide, work))
        error = (found - wanted).norm(dim=1) / wanted.norm(dim=1)
        assert float(error.median()) < 0.05
        assert float(error.max()) < 0.2
