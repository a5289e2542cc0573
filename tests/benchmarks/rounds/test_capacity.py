"""The null workers give the coordinator the documented load."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.rounds.__main__ import codec_time_s, shares
from benchmarks.rounds.capacity import Load, costs, parts, profile, run
from benchmarks.rounds.null_workers import NUM_NODES, TOKENS_PER_ROUND, VOCABULARY, draft_tree, text
from cluster.spec.tree import prune, reroot
from cluster.spec.tree_check import check_tree

_SMALL = Load(num_sequences=4, num_rounds=20)


def test_every_round_verifies_eight_nodes_and_commits_three_tokens() -> None:
    capacity, _ = asyncio.run(run(_SMALL))
    assert capacity.nodes_per_item == NUM_NODES
    assert capacity.tokens_per_item == TOKENS_PER_ROUND
    assert capacity.committed_tokens >= 4 * 20 * TOKENS_PER_ROUND


def test_workers_and_client_are_within_the_time_of_the_process() -> None:
    capacity, _ = asyncio.run(run(_SMALL))
    assert capacity.worker_cpu_s > 0
    assert capacity.client_cpu_s > 0
    assert 0 < capacity.coordinator_cpu_s < capacity.process_cpu_s


def test_the_tree_is_valid_and_its_best_eight_nodes_exclude_the_last_token() -> None:
    tree, survival = draft_tree(9)
    check_tree(tree, VOCABULARY)
    best, _, kept = prune(tree, survival, NUM_NODES)
    assert kept.tolist() == list(range(NUM_NODES))
    assert int(text(11, 1)[0]) not in best.token_ids.tolist()


def test_three_tokens_later_the_tree_has_the_next_eight_nodes() -> None:
    tree, survival = draft_tree(1020)  # the vocabulary ends behind the first period
    landed = reroot(tree, text(1020, TOKENS_PER_ROUND), survival)
    assert landed.hit
    following, _ = draft_tree(1020 + TOKENS_PER_ROUND)
    assert landed.tree.token_ids.tolist() == following.token_ids.tolist()[: NUM_NODES + 1]
    assert landed.tree.parents.tolist() == following.parents.tolist()[: NUM_NODES + 1]


def test_the_profile_names_functions_and_parts() -> None:
    stats = profile(Load(num_sequences=4, num_rounds=5))
    top = costs(stats, 5)
    assert len(top) == 5
    assert all("benchmarks" not in row["function"] for row in top)
    found = parts(stats, {"take": ("relay.py", "take"), "none": ("relay.py", "no such")})
    assert found.keys() == {"take"}
    assert 0 < found["take"] < 1


def test_the_codec_is_measured_on_frames_of_the_whole_batch() -> None:
    _, frames = asyncio.run(run(_SMALL, keep_frames=True))
    assert all(len(frame.verdicts) == 4 for frame in frames)
    assert codec_time_s(frames) > 0


def test_the_shares_of_a_step_add_up_to_its_period() -> None:
    times = {
        "num_sequences": 2, "num_nodes": 8, "step_time_s": 0.020, "forward_time_s": 0.015,
        "period_s": 0.024, "draft_time_s": 0.001,
    }  # fmt: skip
    report = shares([times] * 3)
    parts_ms = sum(report[name] for name in ("forward", "draw", "drafting", "outside"))
    assert parts_ms == pytest.approx(report["period"])
    assert report["outside"] == pytest.approx(3.0)
