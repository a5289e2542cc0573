"""A text whose parts carry the names of their drafters."""

from __future__ import annotations

from deployments.coloured import coloured, legend
from deployments.openai_client import Token


def test_runs_of_one_drafter_are_marked_once_and_the_targets_own_not_at_all() -> None:
    tokens = [
        Token(b"one"),
        Token(b" two", ("a", "b")),
        Token(b" three", ("a",)),
        Token(b" four", ("b",)),
        Token(b"\n"),
    ]
    text = "one two three four\n"
    marked = coloured(text, tokens, ["b", "a"], in_colour=False)
    assert marked == "one[a| two three][b| four]\n"


def test_on_a_terminal_drafters_have_colours_and_the_text_is_unchanged() -> None:
    tokens = [Token(b"x", ("a",)), Token(b"y"), Token(b"z", ("b",))]
    assert coloured("xyz", tokens, ["a", "b"], in_colour=True) == (
        "\x1b[32mx\x1b[0my\x1b[34mz\x1b[0m"
    )
    assert "\x1b[34mb\x1b[0m" in legend(["a", "b"], in_colour=True)
    assert "\x1b" not in legend(["a", "b"], in_colour=False)


def test_a_character_of_several_tokens_stays_whole() -> None:
    first, second = "é".encode()[:1], "é".encode()[1:]
    tokens = [Token(b"a", ("d",)), Token(first), Token(second, ("d",)), Token(b"b")]
    assert coloured("aéb", tokens, ["d"], in_colour=False) == "[d|aé]b"


def test_tokens_that_are_no_text_and_spaces_that_a_token_alone_lacks_lose_nothing() -> None:
    tokens = [Token(b"<|begin|>"), Token(b"two", ("d",)), Token(b"words"), Token(b"<|end|>")]
    assert coloured("two words", tokens, ["d"], in_colour=False) == "[d|two] words"


def test_text_beyond_the_tokens_is_shown_as_it_is() -> None:
    assert coloured("ab and more", [Token(b"ab", ("d",))], ["d"], in_colour=False) == (
        "[d|ab] and more"
    )
