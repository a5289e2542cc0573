"""What the host takes for a step beside the forward: the real engine, verifier and draws.

The forward is `load.NullModel`'s, by graphs that run again what they recorded; that time is taken
off.  It is the processor's time, so that others on the machine count little.  It needs Triton's
interpreter, on which the model attends while the engine is made.

    TRITON_INTERPRET=1 python -m tests.support.gpu.host     ms of a step, the fastest of 160
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from cluster.core import EMPTY_TREE, SamplingParams, TokenTree
from cluster.engine.graphs.forward import LOGIT_ROWS
from cluster.worker.verifier import Verifier
from tests.support.checkpoints import tiny_checkpoint
from tests.support.engine.captures import Recorder
from tests.support.gpu.load import VOCAB_SIZE, null_engine, text_behind
from tests.support.worker.rounds import Session

_CONTEXT_LEN = 1024
_NUM_STEPS, _WARM_UP = 200, 40


class Timed(Recorder):
    """A capture that knows how long its replays took.  total_s: since that was last set to 0."""

    total_s = 0.0

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        replay = super().__call__(run)

        def timed() -> None:
            began_s = time.thread_time()
            replay()
            self.total_s += time.thread_time() - began_s

        return timed


def tree_around(text: list[int], length: int, num_nodes: int) -> TokenTree:
    """The tokens that follow, each behind a wrong one: what is accepted has to move."""
    ids, parents, node = list[int](), list[int](), -1
    for token in text[length : length + 4]:
        ids += [(token + 1) % VOCAB_SIZE, token]
        parents += [node, node]
        node = len(ids) - 1
    return TokenTree.of(ids[:num_nodes], parents[:num_nodes])


def host_ms(folder: Path, num_texts: int, num_nodes: int, *, ahead: bool = False) -> float:
    """Of a step of so many texts of 1,024 tokens and more, each with a tree of so many nodes.

    ahead: steps run ahead, and a GPU waits for what is beyond a forward's time alone."""
    timed, params = Timed(), SamplingParams(temperature=0.0, max_tokens=10_000)
    engine = null_engine(folder, timed, num_pages=8192, page_size=16)
    verifier = Verifier(engine)
    length = _CONTEXT_LEN + 6 * _NUM_STEPS
    truth = {str(name): text_behind([name], length) for name in range(num_texts)}
    sessions = {name: Session(name, text[:_CONTEXT_LEN], params) for name, text in truth.items()}
    idle, times_s = [*sessions], list[float]()
    while len(times_s) < _NUM_STEPS:
        asked = []
        for name in idle:
            length = len(sessions[name].record.tokens)
            # Once all prompts have been read.
            is_drafted = len(idle) == num_texts and length > _CONTEXT_LEN
            tree = tree_around(truth[name], length, num_nodes) if is_drafted else EMPTY_TREE
            asked.append(sessions[name].item(tree))
        timed.total_s, began_s = 0.0, time.thread_time()
        verifier.submit(asked)
        texts = [session.record for session in sessions.values()] * ahead
        verdicts = verifier.step(texts).verdicts
        took_s = time.thread_time() - began_s - timed.total_s
        if len(verdicts) == num_texts and (len(asked) == num_texts or ahead):
            times_s.append(took_s)
        begun = {text.id for text in verifier.ahead}
        idle = [each.request_id for each in verdicts if each.request_id not in begun]
        for verdict in verdicts:
            sessions[verdict.request_id].take(verdict)
    return 1e3 * min(times_s[_WARM_UP:])


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = tiny_checkpoint("llama", Path(name))
        for num_texts in (1, 8, 32):
            # As many as a graph's rows with logits let there be.
            for num_nodes in (0, min(8, LOGIT_ROWS // num_texts - 1)):
                took = host_ms(folder, num_texts, num_nodes)
                sys.stdout.write(f"{num_texts} texts with {num_nodes} nodes: {took:.2f} ms\n")
            took = host_ms(folder, num_texts, 0, ahead=True)
            sys.stdout.write(f"{num_texts} texts ahead: {took:.2f} ms\n")


if __name__ == "__main__":
    main()
