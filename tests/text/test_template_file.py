"""A template from a file stands in place of the model's own; the one that comes with SmolLM2 adds
tools and changes nothing else."""

from pathlib import Path
from typing import Any

import pytest

from cluster.text.chat import read_template
from cluster.text.dialect import dialect_of
from cluster.text.tokenizer import Tokenizer
from tests.support.errors import config_error
from tests.support.text.answers import parts_of
from tests.text.test_chat import with_template

TOOLS_FILE = "configs/templates/smollm2-tools.jinja"
# HuggingFaceTB/SmolLM2-135M-Instruct's own.
OWN = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""  # noqa: E501
TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}


def said(role: str, content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


CHATS = [
    [said("user", "Hello")],
    [said("system", "Be brief."), said("user", " two\nlines "), said("assistant", "yes")],
    [said("user", "a"), said("assistant", ""), said("user", "<|im_end|>")],
    [said("user", "a"), said("system", "later")],
]


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("goes_on", [True, False])
def test_without_tools_smollm2s_file_says_what_its_own_template_says(
    folder: Path, chat: list[dict[str, Any]], *, goes_on: bool
):
    ours = Tokenizer.load(folder, chat_template=TOOLS_FILE)
    expected = with_template(folder, OWN).render_chat(chat, add_generation_prompt=goes_on)
    assert ours.render_chat(chat, add_generation_prompt=goes_on) == expected


def test_smollm2s_file_shows_tools_calls_and_their_results(folder: Path):
    tokenizer = Tokenizer.load(folder, chat_template=TOOLS_FILE)
    calls = dialect_of(tokenizer, "auto", "auto").calls
    assert calls.name == "hermes"
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    chat = [
        said("user", "How is it?"),
        said("assistant", None, tool_calls=[call, call]),
        said("tool", "rain", tool_call_id="1"),
    ]
    text = tokenizer.render_chat(chat, tools=[TOOL])
    assert '<tools>\n{"type": "function", "function": {"name": "weather"' in text
    written = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
    assert f"<|im_start|>assistant\n{written}\n{written}<|im_end|>\n" in text
    assert text.endswith(
        "<|im_start|>user\n<tool_response>\nrain\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    # What the prompt shows is what the parser of the format reads.
    found = [part for part in parts_of(calls.name, written) if part.is_call]
    assert found[0].name == "weather"
    assert "".join(piece.text for piece in found) == "{}"


def test_a_file_anywhere_is_read_and_a_missing_one_is_named(folder: Path, tmp_path: Path):
    (tmp_path / "own.jinja").write_text("{{ messages[0].content }}!", "utf-8")
    tokenizer = Tokenizer.load(folder, chat_template=str(tmp_path / "own.jinja"))
    assert tokenizer.render_chat([said("user", "Hello")]) == "Hello!"
    assert Tokenizer.load(folder).chat_template != tokenizer.chat_template
    with config_error(r"answers\.chat_template: none\.jinja is no file"):
        Tokenizer.load(folder, chat_template="none.jinja")
    (tmp_path / "bad.jinja").write_bytes(b"\xff")
    with config_error("cannot be read"):
        read_template(str(tmp_path / "bad.jinja"))
