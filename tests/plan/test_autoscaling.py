"""How many replicas there should be: numbers in, a decision out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.plan.autoscaling import Statistics, decide


def drafters(num: int, texts: int, waiting: int = 0, **more: float) -> list[Statistics]:
    """Replicas with eight places each; texts: of all together."""
    each = texts / num
    return [{"texts": each, "places": 8, "waiting": waiting, **more} for _ in range(num)]


@pytest.mark.parametrize(
    ("num", "replicas", "wanted", "why"),
    [
        (1, drafters(1, 8), 1, "8 texts in 8 places, 0 waiting"),
        (1, drafters(1, 8, waiting=16), 3, "8 texts in 8 places, 16 waiting"),
        (2, drafters(2, 16, waiting=1), 2, "a few may wait"),
        (3, drafters(3, 12), 3, "with one less they would be more than 70 % full"),
        (3, drafters(3, 11), 2, "11 texts in 24 places"),
        (3, drafters(3, 0), 2, "one at a time"),
        (1, drafters(1, 0), 1, "never below one"),
        (2, drafters(2, 4, late=0.6), 3, "60% of the trees late"),
        (2, drafters(2, 4, late=1.0), 4, "100% of the trees late"),
        (2, drafters(2, 4, late=0.4), 2, "40% of the trees late"),
        (2, [{"cpu": 0.9}, {"cpu": 0.8}], 3, "85% of a core in use"),
        (2, [{"cpu": 0.2}, {"cpu": 0.2}], 1, "20% of a core in use"),
        (1, [{"texts": 3, "places": 64, "kv_use": 1.0}], 2, "100% of the KV pages in use"),
        (1, [{"texts": 3, "places": 0}], 1, "nothing is known"),
    ],
)
def test_the_fullest_statistic_decides(num: int, replicas: list[Statistics], wanted: int, why: str):
    decision = decide(num, replicas)
    assert decision.num == wanted, why
    if decision.num != num:
        assert why in decision.why or why == "one at a time"


@pytest.mark.parametrize(
    ("num", "worth", "wanted"),
    [
        (1, 75.0, 3),  # three are paid for, with a quarter to spare
        (1, 74.0, 2),
        (1, 0.0, 1),
        (3, 60.0, 3),  # what there is must bring its price, and no more
        (3, 59.0, 2),
        (1, 10.0, 1),
    ],
)
def test_a_drafter_that_does_not_bring_its_price_is_not_multiplied(
    num: int, worth: float, wanted: int
):
    full = drafters(num, 8 * num, waiting=8 * (3 - num), worth=worth)
    decision = decide(num, [{**each, "price": 20.0} for each in full])
    assert decision.num == wanted
    if worth < 75.0 and wanted < 3 and num > 1:
        assert decision.why == f"they bring {worth:.1f} tokens/s, and the price of one is 20"
    assert decide(num, full).num == 3, "without a price the queue alone decides"


def test_a_price_without_a_coordinator_that_says_what_they_bring_decides_nothing():
    assert decide(3, drafters(3, 24, price=20.0)).num == 3


def test_the_reason_names_what_was_wanted_and_what_it_is_worth():
    why = decide(1, drafters(1, 8, waiting=40, worth=30.0, price=20.0)).why
    assert why.startswith("8 texts in 8 places, 40 waiting, but they bring 30.0 tokens/s")


@given(num=st.integers(1, 50), texts=st.integers(0, 1000), more=st.integers(0, 1000))
def test_what_a_decision_leads_to_does_not_call_for_the_opposite(num: int, texts: int, more: int):
    """The same load on the new number of replicas: after a step down nothing asks for a step up,
    and after a step up nothing for a step down."""
    first = decide(num, drafters(num, texts, waiting=more)).num
    running = min(texts + more, 8 * first)
    after = decide(first, drafters(first, running, waiting=texts + more - running)).num
    assert first >= 1
    assert (after - first) * (first - num) >= 0


@given(price=st.floats(0.1, 100), worth=st.floats(0, 1e4), num=st.integers(1, 50))
def test_a_price_does_not_make_it_swing_either(price: float, worth: float, num: int):
    paid = {"worth": worth, "price": price}
    first = decide(num, drafters(num, 8 * num, 8 * num, **paid)).num
    after = decide(first, drafters(first, 8 * first, 8 * num, **paid)).num
    assert first >= 1
    assert (after - first) * (first - num) >= 0
