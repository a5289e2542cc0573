"""One rank of a tensor-parallel engine, as a process of its own, for the tests.

    python -m tests.support.engine.rank_process RANK ADDRESS HEAD FOLDER...

taps: rank 0 reads the hidden states of a text in chunks and of a tree, after an adapter that it
alone knows of was refused, and prints a line of JSON: the chunks, the largest relative error, the
refusal.  pace: rank 0, whose clock alone is that of a slow machine, reads a prompt beside a text
and prints a line of JSON: the rows of the prompt in each step, and both texts.  head: rank 0
drafts with HEAD for the first folder's target and prints a line of JSON, the text and the trees.
differ: the ranks are given other settings, and then rank 1 loses what it should hold; both ranks
print the errors.  decode: rank 0 decodes with each model in turn and prints a line of JSON, its
texts; with the first model it measures its steps before.  Then it goes on with the last one until
the group breaks, and prints the error's code.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cluster.config.schema import EngineConfig
from cluster.core import SamplingParams, token_array
from cluster.engine.engine import Engine, Work
from cluster.errors import WorkerError
from tests.support.draft.inside import Inside, config_of
from tests.support.engine.driver import TREE, GreedyDecoder, load_engine, load_oracle, prompt, run
from tests.support.engine.ranks import joined, say
from tests.support.engine.slowed import SLOW, slow_down
from tests.support.engine.taps import TapLog, errors, expected_nodes, expected_taps
from tests.support.worker.rounds import Session

NUM_TOKENS = 16
WORLD_SIZE = 2
# "measured" begins like the text with which an engine measures its steps.
PROMPTS = {
    "short": prompt(5, seed=1),
    "long": prompt(43, seed=2),
    "measured": token_array([*(4 + np.arange(17)), 9, 8, 7]),
}


class Forgetful(Engine):
    """Loses the prefixes of released requests, which no other rank knows of."""

    def release(self, request_id: str) -> None:
        super().release(request_id)
        self.forget_prefixes()


def main() -> None:
    # One of them may load a model for much longer than the other, which waits for it.
    with joined(timeout_s=120) as (rank, words):
        head, *folders = map(Path, words)
        _tap(folders[0], rank)
        _pace(folders[0], rank)
        _draft(folders[0], head, rank)
        _differ(folders[0], rank)
        _decode(folders, rank)


def _decode(folders: list[Path], rank: int) -> None:
    for folder in folders:
        settings = {"tensor_parallel": WORLD_SIZE, "max_batch_tokens": 32, "num_pages": 20}
        engine = load_engine(folder, **settings)
        if rank > 0:
            engine.follow()
            continue
        if folder == folders[0]:
            engine.profile_steps()
        say(json.dumps(GreedyDecoder(engine, PROMPTS, NUM_TOKENS).run()))
        if folder == folders[-1]:
            _decode_until_broken(engine)
        else:
            engine.close()


def _decode_until_broken(engine: Engine) -> None:
    try:
        run(engine, Work("a", 0, prompt(5)))
        while True:
            run(engine, Work("a", 5, token_array([7])))
    except WorkerError as error:
        say(error.code)


def _differ(folder: Path, rank: int) -> None:
    settings = {"tensor_parallel": WORLD_SIZE, "page_size": 4, "num_pages": 64}
    try:
        load_engine(folder, **settings, max_batch_tokens=32 + 32 * rank)
    except WorkerError as error:
        say(error.message)
    config = EngineConfig(model=str(folder), device="cpu", dtype="float32", **settings)
    try:
        if rank > 0:
            Forgetful.load(config).follow()
        else:
            engine = Engine.load(config)
            for name in ("a", "b"):
                run(engine, Work(name, 0, prompt(20)))
                engine.release(name)
    except WorkerError as error:
        say(error.message)


def _tap(folder: Path, rank: int) -> None:
    engine = load_engine(folder, tensor_parallel=WORLD_SIZE, max_batch_tokens=16)
    if rank > 0:
        engine.follow()
        return
    log, oracle = TapLog(engine, (0, 2, -1)), load_oracle(folder)
    text = prompt(41)
    refused = log.run(Work("a", 0, text, adapter=3))
    log.run(Work("a", 0, text, TREE, num_top=2))
    wanted = torch.cat(
        (expected_taps(oracle, text, log.taps), expected_nodes(oracle, text, TREE, log.taps))
    )
    error = errors(torch.cat((log.text("a", 0, 41), log.nodes["a"])), wanted).max()
    say(json.dumps([log.chunks, float(error), refused.error.message]))
    engine.close()


def _pace(folder: Path, rank: int) -> None:
    engine = load_engine(folder, tensor_parallel=WORLD_SIZE)
    if rank > 0:
        engine.follow()
        return
    slow_down(engine, SLOW)
    say(json.dumps(paced(engine)))
    engine.close()


def paced(engine: Engine) -> list[Any]:
    """The rows of a prompt in each step beside a text, and the first tokens of both."""
    decoder = GreedyDecoder(engine, {"text": prompt(4), "read": prompt(300)}, 1000)
    decoder.start("text")
    while len(decoder.text("text")) < 5:
        decoder.step()
    decoder.start("read")
    rows = []
    while not decoder.text("read"):
        decoder.step()
        rows.append(engine.last_step.num_prompt_rows)
    return [rows, *(decoder.text(name)[:5] for name in ("text", "read"))]


def _draft(target: Path, head: Path, rank: int) -> None:
    config = config_of(target, "eagle3", head, tensor_parallel=WORLD_SIZE, max_batch_tokens=16)
    if rank > 0:
        Engine.load(config.target.engine).follow()
        return
    inside = Inside(config)
    say(json.dumps(drafted(inside)))
    inside.engine.close()


def drafted(inside: Inside) -> list[list[Any]]:
    """A text and the trees that were drafted for it."""
    session = Session("a", prompt(37, seed=3).tolist(), SamplingParams(seed=5, max_tokens=64))
    inside.decode([session], 20)
    trees = [[tree.token_ids.tolist(), tree.parents.tolist()] for tree in inside.trees]
    return [session.output, trees]


if __name__ == "__main__":
    main()
