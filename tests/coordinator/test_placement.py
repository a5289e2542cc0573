"""Which target a text goes to, and what is remembered of those that were placed."""

from collections.abc import Sequence
from typing import Any

from cluster.coordinator.admission import Placement
from cluster.coordinator.session import Session
from cluster.coordinator.targets import TargetSeat
from cluster.core import SamplingParams
from cluster.messages import Load, WorkerDescription
from cluster.rpc.link import memory_pair
from tests.support.coordinator.house import session

PAGE = 4


def seat(name: str, num_seats: int = 8) -> TargetSeat:
    description = WorkerDescription(
        name, "target", name, vocab_size=99, max_running_sequences=num_seats
    )
    return TargetSeat(name, description, memory_pair()[0], 1000)


_numbers = iter(range(10**9))


def text(
    tokens: Sequence[int] = (1,),
    task: str = "default",
    *,
    temperature: float = 0.0,
    **fields: Any,
) -> Session:
    params = SamplingParams(max_tokens=9, temperature=temperature)
    return session(tokens, params, id=f"r{next(_numbers)}", task=task, **fields)


def filled(name: str, *texts: Session, num_seats: int = 8) -> TargetSeat:
    found = seat(name, num_seats)
    for each in texts:
        found.open(each)
    return found


LONG = list(range(1, 33))  # eight pages


def test_a_text_goes_where_most_of_its_prompt_is_held():
    placement, seats = Placement(PAGE), [seat("a"), seat("b"), seat("c")]
    placement.remember(seats[1], text(LONG[:24]))
    placement.remember(seats[2], text([*LONG[:16], 77, 77, 77, 77]))
    asked = text([*LONG[:30], 88, 88])
    assert [placement.num_held(each.id, asked) for each in seats] == [0, 24, 16]
    assert placement.choose(asked, seats) is seats[1]


def test_less_than_half_of_a_prompt_is_no_reason_to_crowd_a_target():
    placement = Placement(PAGE)
    holder, empty = filled("holder", text()), seat("empty")
    placement.remember(holder, text(LONG[:12]))
    assert placement.choose(text(LONG), [holder, empty]) is empty
    placement.remember(holder, text(LONG[:16]))
    assert placement.choose(text(LONG), [holder, empty]) is holder


def test_a_prefix_of_another_tenant_or_adapter_is_none():
    placement, held = Placement(PAGE), seat("held")
    placement.remember(held, text(LONG, tenant=b"one"))
    assert placement.num_held("held", text(LONG, tenant=b"one")) == len(LONG)
    assert placement.num_held("held", text(LONG, tenant=b"other")) == 0
    assert placement.num_held("held", text(LONG, tenant=b"one", adapter="sql@1")) == 0


def test_like_goes_with_like_and_an_empty_target_is_like_all():
    placement = Placement(PAGE)
    code, chat = filled("code", text(task="code")), filled("chat", text(task="chat"))
    assert placement.choose(text(task="chat"), [code, chat]) is chat
    assert placement.choose(text(task="code"), [chat, code]) is code
    sampled = filled("sampled", text(task="code", temperature=0.7))
    assert placement.choose(text(task="code", temperature=0.7), [code, sampled]) is sampled
    crowd = filled("crowd", *(text(task="code") for _ in range(3)))
    assert placement.choose(text(task="code"), [crowd, seat("empty")]).id == "empty"  # type: ignore[union-attr]


def test_the_freest_target_is_taken_as_the_targets_themselves_say():
    placement, one, other = Placement(PAGE), filled("one", text()), filled("other", text(), text())
    assert placement.choose(text(), [other, one]) is one
    one.note_load(Load(seats=8, num_running=4, num_waiting=1))
    assert placement.choose(text(), [other, one]) is other


def test_no_preference_piles_texts_up_at_one_of_the_targets():
    placement, seats = Placement(PAGE), [seat("a"), seat("b")]
    for count in range(12):
        asked = text(LONG)
        chosen = placement.choose(asked, seats)
        chosen.open(asked)
        placement.remember(chosen, asked)
        freest = max(each.num_free for each in seats)
        assert all(2 * (each.num_free + 1) >= freest for each in seats), count
    assert all(each.num_free for each in seats)


def test_a_full_target_gets_nothing_and_one_that_failed_the_text_only_at_need():
    placement = Placement(PAGE)
    full, other = filled("full", text(), text(), num_seats=2), seat("other", 2)
    placement.remember(full, text(LONG))
    asked = text(LONG)
    assert placement.choose(asked, [full, other]) is other
    assert placement.choose(asked, [full]) is None
    assert placement.choose(asked, []) is None
    asked.shunned_target = "other"
    spare = filled("spare", text(), num_seats=2)
    assert placement.choose(asked, [full, other, spare]) is spare
    assert placement.choose(asked, [full, other]) is other


def test_no_more_is_remembered_than_the_target_has_pages_and_nothing_of_a_lost_one():
    placement, small = Placement(PAGE), seat("small")
    small.note_load(Load(seats=8, pages_total=5))
    placement.remember(small, text(LONG))
    # Its end is forgotten first, for nobody could use that without the beginning.
    assert placement.num_held("small", text(LONG)) == 5 * PAGE
    placement.remember(small, text([9] * 12))
    assert placement.num_held("small", text([9] * 12)) == 3 * PAGE
    assert placement.num_held("small", text(LONG)) == 2 * PAGE
    placement.forget("unknown")
    placement.forget("small")
    assert placement.num_held("small", text(LONG)) == 0
