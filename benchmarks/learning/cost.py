"""The cost of recording: the recorder's time in the engine's thread, that of the likeliest tokens
which are found for it, and that of the files, which a thread of its own writes."""

from __future__ import annotations

import itertools
import re
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.learning.traffic import config_of, questions, recorder_of, talk
from cluster.draft.recorded import encode, read_folder
from cluster.engine.cpu import kernels
from cluster.local import LLM
from cluster.models.resolve import resolve
from cluster.train.traffic import origin_of

_NUM_TOP = 32
_ROWS, _REPEATS = 6, 200
_NUM_REQUESTS = 64
_TIME = re.compile(r'^drafthouse_draft_seconds_total\{drafter="recorder"\} (\S+)', re.MULTILINE)


def measured_cost(target: str, drafter: str, folder: Path) -> dict[str, Any]:
    """The summary of a record, in microseconds."""
    found: dict[str, Any] = {}
    for share in (0.1, 1.0):
        inside = recorder_of(folder / str(share), share)
        with LLM(config_of(target, drafter, recorder=inside)) as llm:
            asked = list(itertools.islice(questions(0), _NUM_REQUESTS))
            answers = llm.chat([talk(each) for each, _ in asked], [params for _, params in asked])
            time.sleep(2.0)  # a target tells of its metrics once a second
            spent = _TIME.search(llm.metrics())
        num_tokens = sum(len(each.token_ids) for each in answers)
        assert spent is not None
        found[f"read, per served token at share {share}"] = 1e6 * float(spent[1]) / num_tokens
    origin = origin_of(resolve(target))
    recorded = read_folder(folder / "1.0", origin)
    began, sizes = time.perf_counter(), [len(encode(each, origin)) for each in recorded]
    spent_s, num_tokens = time.perf_counter() - began, sum(len(a.token_ids) for a in recorded)
    found["encode, per recorded token"] = 1e6 * spent_s / num_tokens
    found["bytes per recorded token of an answer"] = sum(sizes) / num_tokens
    found["rejected drafts per recorded token"] = (
        sum(len(each.rejected.token_ids) for each in recorded) / num_tokens
    )
    native, logits = kernels.load(), torch.randn(_ROWS, origin.vocab_size) * 3.0
    assert native is not None
    torch.set_num_threads(1)
    began = time.process_time()
    for _ in range(_REPEATS):
        native.draws.top(logits, _NUM_TOP)
    spent_s = (time.process_time() - began) / _REPEATS / _ROWS
    found["likeliest 32, per row of a recorded text"] = 1e6 * spent_s
    return found
