"""What comes many times a second is said once a minute, with how often it came."""

from cluster.logs import OnceAMinute


def test_a_thing_is_said_at_once_and_then_after_a_minute_with_its_count():
    said = OnceAMinute()
    assert [said.is_due("a", now) for now in (5.0, 5.1, 64.9, 65.0, 65.1)] == [1, 0, 0, 4, 0]


def test_it_remembers_no_more_than_it_has_room_for():
    said = OnceAMinute()
    for key in range(10_000):
        assert said.is_due(key, 0.0) == 1
    assert said.is_due(9_999, 1.0) == 0
