"""One rank of a tensor-parallel engine, as a process of its own, for the tests.

    python -m tests.support.engine.rank_process RANK WORLD_SIZE ADDRESS FOLDER...

Rank 0 decodes with each model in turn and prints a line of JSON, its texts.  Then it goes on with
the last one until the group breaks, and prints the error's code.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from cluster.core import token_array
from cluster.engine import parallel
from cluster.engine.engine import Engine, Work
from cluster.errors import WorkerError
from tests.support.engine.driver import GreedyDecoder, load_engine, prompt, run

NUM_TOKENS = 16
PROMPTS = {"short": prompt(5, seed=1), "long": prompt(43, seed=2)}


def main() -> None:
    rank, world_size = int(sys.argv[1]), int(sys.argv[2])
    address, folders = sys.argv[3], sys.argv[4:]
    torch.set_num_threads(1)
    parallel.init_rank(rank, world_size, address, timeout_s=20)
    for folder in folders:
        settings = {"tensor_parallel": world_size, "max_batch_tokens": 32, "num_pages": 20}
        engine = load_engine(Path(folder), **settings)
        if rank > 0:
            engine.follow()
            continue
        _say(json.dumps(GreedyDecoder(engine, PROMPTS, NUM_TOKENS).run()))
        if folder == folders[-1]:
            _decode_until_broken(engine)
        else:
            engine.close()
    parallel.leave_group()


def _decode_until_broken(engine: Engine) -> None:
    try:
        run(engine, Work("a", 0, prompt(5)))
        while True:
            run(engine, Work("a", 5, token_array([7])))
    except WorkerError as error:
        _say(error.code)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
