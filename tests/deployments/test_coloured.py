"""A text whose parts carry the names of their drafters, where its tokens are not its parts.

Whole tokens and colours are in test_try.py and test_chat.py.
"""

import pytest

from deployments.coloured import coloured, legend
from deployments.openai_client import Token

FIRST, SECOND = "é".encode()[:1], "é".encode()[1:]
BEGIN, END = Token(b"<|begin|>"), Token(b"<|end|>")


@pytest.mark.parametrize(
    ("text", "tokens", "marked"),
    [
        ("ab c", [Token(b"a", ("d",)), Token(b"b", ("d", "e")), Token(b" c")], "[d|ab] c"),
        ("aéb", [Token(b"a", ("d",)), Token(FIRST), Token(SECOND, ("d",)), Token(b"b")], "[d|aé]b"),
        # Tokens that are no text, and a space that a token alone lacks.
        ("two words", [BEGIN, Token(b"two", ("d",)), Token(b"words"), END], "[d|two] words"),
        ("ab and more", [Token(b"ab", ("d",))], "[d|ab] and more"),
    ],
)
def test_characters_stay_whole_and_nothing_is_lost(text: str, tokens: list[Token], marked: str):
    assert coloured(text, tokens, ["d", "e"], in_colour=False) == marked


def test_a_legend_has_colours_on_a_terminal_alone():
    assert "\x1b[34mb\x1b[0m" in legend(["a", "b"], in_colour=True)
    assert "\x1b" not in legend(["a", "b"], in_colour=False)
