"""Processes, nodes and links fail while streams are written on four nodes: no text changes."""

import os
import platform
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.support.record import rows
from tests.deployments.conftest import wait_until
from tests.nodes.conftest import Cluster, wait_until_whole
from tests.nodes.faults import FAULTS, HEAD
from tests.support.deployments.metrics import metric
from tests.support.deployments.writers import Writers

NUM_STREAMS, NUM_HTTP_STREAMS, NUM_TOKENS = 28, 4, 48
# `make test-nightly` sets the number of random faults, and the file for the record.
NUM_FAULTS = int(os.environ.get("DRAFTHOUSE_FAULTS", "3"))
RECORD = os.environ.get("DRAFTHOUSE_FAULTS_RECORD", "")


def test_no_fault_changes_a_text(cluster: Cluster):
    seed = random.SystemRandom().randrange(2**32)
    draw = random.Random(seed)
    possible = [kind for kind in FAULTS if kind != HEAD or cluster.nodes.has_redis]
    writers = Writers(
        cluster.grpc_addresses, cluster.urls, NUM_STREAMS, NUM_HTTP_STREAMS, NUM_TOKENS
    )
    pauses: dict[str, list[float]] = defaultdict(list)
    repairs: dict[str, list[float]] = defaultdict(list)
    with writers.running():
        writers.wait()
        for kind in draw.choices(possible, k=NUM_FAULTS):
            writers.longest_s = 0.0
            FAULTS[kind](cluster, draw)
            began = time.monotonic()
            writers.wait()
            pauses[kind].append(writers.longest_s)
            wait_until_whole(cluster)
            repairs[kind].append(time.monotonic() - began)
            if RECORD:  # whatever comes after this fault
                told = rows(_record(seed, writers, pauses, repairs))
                Path(RECORD).write_text(f"{told}\n")
    assert not writers.wrong, (seed, writers.wrong)
    url = cluster.url()
    wait_until(lambda: metric(url, "drafthouse_target_up") == 2 * 2)  # each coordinator has both
    sys.stdout.write(f"{rows(_record(seed, writers, pauses, repairs))}\n")  # -rP


def _record(
    seed: int,
    writers: Writers,
    pauses: Mapping[str, Sequence[float]],
    repairs: Mapping[str, Sequence[float]],
) -> dict[str, object]:
    """What the faults so far have cost, by kind."""
    return {
        "machine": f"{os.cpu_count()} cores, Python {platform.python_version()}, seed {seed}",
        "faults": sum(map(len, repairs.values())),
        "streams": NUM_STREAMS + NUM_HTTP_STREAMS,
        "texts": writers.counts.total(),
        "texts that differed": len(writers.wrong),
        "streams ended by an error": dict(writers.errors),
        "kinds": {
            kind: {
                "faults": len(found),
                "median pause, s": round(statistics.median(pauses[kind]), 2),
                "longest pause, s": round(max(pauses[kind]), 2),
                "median time until all parts are back, s": round(statistics.median(found), 1),
            }
            for kind, found in sorted(repairs.items())
        },
    }
