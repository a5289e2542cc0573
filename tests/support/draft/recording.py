"""A recorder driven by hand: random texts of several tenants, with trees that partly come true."""

import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from cluster.core import SamplingParams, TokenArray, token_array
from cluster.draft.base import DrafterContext
from cluster.draft.options import RecorderOptions
from cluster.draft.recorded import Origin, RecordedAnswer, read_folder
from cluster.draft.recorder import RecorderDrafter
from tests.support.clock import wait_until
from tests.support.draft.step_rows import step_rows

PER_TENANT = 100  # ids of the vocabulary that one tenant's texts are made of
ORIGIN = Origin("model", "tokenizer", 8 * PER_TENANT)
STOP = 7
K = 4


def law(words: tuple[int, ...]) -> TokenArray:
    """The most probable ids behind these words, of their tenant."""
    first = words[0] - words[0] % PER_TENANT
    random = np.random.default_rng(zlib.crc32(str(words).encode()))
    return token_array(random.integers(8, PER_TENANT, K) + first)


@dataclass(slots=True)
class Text:
    """One text and what a recorder should have of it."""

    tenant: int
    tokens: list[int]
    prompt: list[int]


class World:
    """Texts whose every id is of its tenant's own range."""

    def __init__(self, folder: Path, seed: int = 0, **options: Any) -> None:
        self.random = np.random.default_rng(seed)
        self.texts = {}
        host = SimpleNamespace(
            model_hash=ORIGIN.model_hash,
            token_ids=lambda name: token_array(self.texts[name].tokens),
        )
        context = DrafterContext(
            "recorder", 8, 8, ORIGIN.vocab_size, ORIGIN.tokenizer_hash, target=host
        )
        given = {"tenants": "all", "share": 1.0, "keep": "disk", "folder": str(folder), **options}
        self.recorder = RecorderDrafter(context, RecorderOptions(**given))

    def open(self, name: str, tenant: int = 0, prompt_len: int = 5) -> None:
        prompt = self._ids(tenant, prompt_len).tolist()
        self.texts[name] = Text(tenant, prompt.copy(), prompt)

    def _ids(self, tenant: int, count: int) -> TokenArray:
        return token_array(self.random.integers(8, PER_TENANT, count) + tenant * PER_TENANT)

    def step(self, name: str, num_nodes: int = 6, **changes: Any) -> None:
        """A step of a text, of which the recorder reads: a random tree and a random path in it."""
        text = self.texts[name]
        parents = [int(self.random.integers(-1, node)) for node in range(num_nodes)]
        nodes = self._ids(text.tenant, num_nodes)
        path = []
        for node, parent in enumerate(parents):
            if parent == (path[-1] if path else -1) and self.random.random() < 0.5:
                path.append(node)
        behind = {-1: tuple(text.tokens)}
        for node, parent in enumerate(parents):
            behind[node] = (*behind[parent], int(nodes[node]))
        laws = np.stack([law(words) for words in behind.values()])
        next_token = int(changes.pop("next_token", self._ids(text.tenant, 1)[0]))
        tenant = bytes([text.tenant]) * 16 if text.tenant else b""
        rows = step_rows(
            [text.tokens[-1], *nodes],
            laws,
            parents,
            -np.sort(self.random.random((len(laws), K))),
            request_id=name,
            tenant=tenant,
            first_position=len(text.tokens) - 1,
            path=token_array(path),
            next_token=next_token,
            params=SamplingParams(temperature=0.5, stop_token_ids=(STOP,)),
        )
        # The cache holds what was accepted; the token behind it has no row yet.
        text.tokens += nodes[path].tolist()
        self.recorder.read([replace(rows, **changes)])
        text.tokens.append(next_token)

    def close(self, *names: str) -> None:
        """These end; all that was recorded is written, and the bounds hold."""
        self.recorder.release(names)
        self.recorder.keeper.close(60.0)


def answers_in(folder: Path, count: int, origin: Origin) -> list[RecordedAnswer]:
    """Those of a folder, as soon as there are so many: a thread writes them."""
    wait_until(lambda: len(list(folder.rglob("*.npz"))) >= count)
    return read_folder(folder, origin)
