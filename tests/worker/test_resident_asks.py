"""When a resident hears of a text, and when it is asked for a tree."""

from __future__ import annotations

from cluster.core import token_array
from cluster.worker.residents import Residents
from tests.support.clock import FakeClock
from tests.support.worker.residents import LONG_STEP, GreedyOracle, drafted, resident, resident_text


class LookUp(GreedyOracle):
    is_look_up = True


def test_a_look_up_that_is_asked_for_nothing_hears_of_a_text_now_and_then() -> None:
    oracle = LookUp()
    drafter = resident(oracle, clock=FakeClock())
    kept = resident_text(draft_nodes=0)
    for token in range(200):
        kept.tokens.append(token_array([token % 32]))
        assert drafter.draft([kept], 0.01, 1000.01) == ([], False)
    lengths = [commit.base_len + len(commit.token_ids) for commit in oracle.commits]
    assert lengths == [64, 128, 192]
    assert oracle.tasks == []


def test_a_model_reads_a_text_when_it_is_first_asked_and_says_so() -> None:
    oracle = GreedyOracle()
    drafter = resident(oracle, clock=FakeClock())
    kept = resident_text(range(100), draft_nodes=4)
    kept.ask_mask = 0
    assert drafter.draft([kept], 0.01, 1000.01) == ([], False)
    assert oracle.commits == []
    kept.ask_mask = drafter.member.bit
    trees = drafted(drafter, kept, now=1000.0)
    assert len(oracle.commits) == len(trees) == 1
    assert drafter.turn is not None
    assert drafter.turn.num_read == 1
    kept.tokens.append(token_array([7]))
    drafted(drafter, kept, now=1000.0)
    assert drafter.turn.num_read == 0
    kept.ask_mask = 0
    kept.tokens.append(token_array([7] * 100))
    assert drafter.draft([kept], 0.01, 1000.01) == ([], False)
    assert len(oracle.commits) == 2


def test_each_resident_of_a_target_is_asked_by_its_own_bit() -> None:
    oracles = [GreedyOracle(name=name) for name in "abc"]
    drafters = [resident(each, each.name, clock=FakeClock()) for each in oracles]
    residents = Residents(drafters, FakeClock())
    kept = resident_text(draft_nodes=4)
    kept.ask_mask = 0b101
    found = residents.draft([kept], LONG_STEP)
    assert {drafter.name for drafter, _ in found.trees} == {"a", "c"}
    assert [(turn.drafter, turn.num_sequences, turn.num_nodes) for turn in found.turns] == [
        ("a", 1, 4),
        ("c", 1, 4),
    ]
    assert oracles[1].commits == []
