"""Which target a text goes to, and what is remembered of those that were placed."""

from collections.abc import Sequence
from typing import Any

from cluster.coordinator.admission import choose_seat
from cluster.coordinator.session import Session
from cluster.coordinator.targets import TargetSeat
from cluster.core import SamplingParams
from cluster.rpc.link import memory_pair
from cluster.rpc.messages import Load, WorkerDescription
from tests.support.coordinator.house import session

PAGE = 4


def seat(name: str, num_seats: int = 8) -> TargetSeat:
    description = WorkerDescription(
        name, "target", name, vocab_size=99, max_running_sequences=num_seats
    )
    return TargetSeat(name, description, memory_pair()[0], 1000, PAGE)


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
    own, other = text(LONG[:24]), text([*LONG[:16], 77, 77, 77, 77])
    seats = [seat("a"), filled("b", own), filled("c", other)]
    asked = text([*LONG[:30], 88, 88])
    assert [each.num_held(asked) for each in seats] == [0, 24, 16]
    assert choose_seat(asked, seats) is seats[1]


def test_less_than_half_of_a_prompt_is_no_reason_to_crowd_a_target():
    holder, empty = filled("holder", text()), seat("empty")
    holder.open(text(LONG[:12]))
    assert choose_seat(text(LONG), [holder, empty]) is empty
    holder.open(text(LONG[:16]))
    assert choose_seat(text(LONG), [holder, empty]) is holder


def test_a_prefix_of_another_tenant_or_adapter_is_none():
    held = filled("held", text(LONG, tenant=b"one"))
    assert held.num_held(text(LONG, tenant=b"one")) == len(LONG)
    assert held.num_held(text(LONG, tenant=b"other")) == 0
    assert held.num_held(text(LONG, tenant=b"one", adapter="sql@1")) == 0


def test_like_goes_with_like_and_an_empty_target_is_like_all():
    code, chat = filled("code", text(task="code")), filled("chat", text(task="chat"))
    assert choose_seat(text(task="chat"), [code, chat]) is chat
    assert choose_seat(text(task="code"), [chat, code]) is code
    sampled = filled("sampled", text(task="code", temperature=0.7))
    assert choose_seat(text(task="code", temperature=0.7), [code, sampled]) is sampled
    crowd = filled("crowd", *(text(task="code") for _ in range(3)))
    assert choose_seat(text(task="code"), [crowd, seat("empty")]).id == "empty"  # type: ignore[union-attr]


def test_the_freest_target_is_taken_as_the_targets_themselves_say():
    one, other = filled("one", text()), filled("other", text(), text())
    assert choose_seat(text(), [other, one]) is one
    one.note_load(Load(seats=8, num_running=4, num_waiting=1))
    assert choose_seat(text(), [other, one]) is other


def test_no_preference_piles_texts_up_at_one_of_the_targets():
    seats = [seat("a"), seat("b")]
    for count in range(12):
        asked = text(LONG)
        chosen = choose_seat(asked, seats)
        chosen.open(asked)
        freest = max(each.num_free for each in seats)
        assert all(2 * (each.num_free + 1) >= freest for each in seats), count
    assert all(each.num_free for each in seats)


def test_a_full_target_gets_nothing_and_one_that_failed_the_text_only_at_need():
    full, other = filled("full", text(LONG), text(), num_seats=2), seat("other", 2)
    asked = text(LONG)
    assert choose_seat(asked, [full, other]) is other
    assert choose_seat(asked, [full]) is None
    assert choose_seat(asked, []) is None
    asked.shunned_target = "other"
    spare = filled("spare", text(), num_seats=2)
    assert choose_seat(asked, [full, other, spare]) is spare
    assert choose_seat(asked, [full, other]) is other


def test_no_more_is_remembered_than_the_target_has_pages():
    small = seat("small")
    small.note_load(Load(seats=8, pages_total=5))
    small.open(text(LONG))
    # Its end is forgotten first, for nobody could use that without the beginning.
    assert small.num_held(text(LONG)) == 5 * PAGE
    small.open(text([9] * 12))
    assert small.num_held(text([9] * 12)) == 3 * PAGE
    assert small.num_held(text(LONG)) == 2 * PAGE
