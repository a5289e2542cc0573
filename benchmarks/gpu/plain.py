"""Plain greedy decoding: in CUDA graphs, with steps that run ahead, and eagerly."""

from __future__ import annotations

from functools import partial

from benchmarks.gpu.kernels import copy_bandwidth
from benchmarks.gpu.part import Measurements, Row, Setting
from benchmarks.gpu.target import GREEDY, Target
from cluster.core import SamplingParams

BATCHES = (1, 8, 32, 64, 128)
TINY_BATCHES = (1, 2)
PROMPT_LEN, TINY_PROMPT_LEN = 1024, 24
ROUNDS, TINY_ROUNDS = 40, 6


def rows(setting: Setting) -> Measurements:
    """The limit of a step is the bytes that it reads at least, at half the speed of a copy, which
    reads and writes."""
    target = Target(setting, max_running_sequences=max(BATCHES))
    yield {}, target.fallbacks
    bandwidth = copy_bandwidth(setting.device, 2**20 if setting.tiny else 2**31)
    texts: dict[int, list[list[int]]] = {}
    for mode in ("graphs", "ahead", "eager"):
        for batch in TINY_BATCHES if setting.tiny else BATCHES:
            labels = {"batch": batch, "mode": mode}
            yield labels, partial(_row, target, setting, batch, mode, bandwidth, texts)


def _row(
    target: Target,
    setting: Setting,
    batch: int,
    mode: str,
    bandwidth: float,
    texts: dict[int, list[list[int]]],
) -> Row:
    row, found = decoded(target, setting, batch, mode=mode)
    read = target.read_bytes(batch, TINY_PROMPT_LEN if setting.tiny else PROMPT_LEN)
    row["limit_ms"] = 1e3 * read / bandwidth
    row["share_of_copy"] = row["limit_ms"] / row["round_ms"]
    if batch in texts:
        row["equal_to_graphs"] = equal_share(found, texts[batch])
    texts.setdefault(batch, found)
    return row


def decoded(
    target: Target,
    setting: Setting,
    batch: int,
    *,
    nodes: int = 0,
    params: SamplingParams = GREEDY,
    mode: str = "graphs",
) -> tuple[Row, list[list[int]]]:
    """The figures of a run, and its texts."""
    prompt_len, rounds = (TINY_PROMPT_LEN, TINY_ROUNDS) if setting.tiny else (PROMPT_LEN, ROUNDS)
    times = target.run(batch, prompt_len, rounds, nodes=nodes, params=params, mode=mode)
    return times.row(), times.texts


def equal_share(found: list[list[int]], expected: list[list[int]]) -> float:
    """The share of tokens before the first difference of two texts."""
    equal = compared = 0
    for own, other in zip(found, expected, strict=True):
        length = min(len(own), len(other))
        compared += length
        differing = (at for at in range(length) if own[at] != other[at])
        equal += next(differing, length)
    return equal / compared
