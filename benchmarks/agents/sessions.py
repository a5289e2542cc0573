"""An agent's sessions over modules of Starlette (BSD-3-Clause), which every installation has.

Each renames a function: it reads the module, edits the function, compiles, writes the whole module
anew and says what it did.  The results are those of a real run; a request has what was recorded
before its turn, so every side and every model is asked the same.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import starlette

from cluster.records import frozen

MODULES = ("endpoints", "authentication", "config", "schemas", "templating", "applications")
# Enough for the recorded call; a whole module would take minutes on two cores.
MAX_TOKENS = {"read": 48, "edit": 256, "command": 48, "rewrite": 256, "answer": 64}
SYSTEM = (
    "You change the files of a repository. Use one function at a time: read before you edit, edit "
    "by the exact text that is there, and compile what you have changed."
)
_PARAMETERS = {
    "read": ("path",),
    "edit": ("path", "old_text", "new_text"),
    "command": ("line",),
    "rewrite": ("path", "content"),
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {each: {"type": "string"} for each in parameters},
                "required": list(parameters),
            },
        },
    }
    for name, parameters in _PARAMETERS.items()
]


@frozen
class Turn:
    """kind: one of MAX_TOKENS.  body: a chat's fields, without model and temperature."""

    kind: str
    body: dict[str, Any]


def session(module: str) -> list[Turn]:
    """The turns of the session over one module, in order."""
    source = (Path(starlette.__file__).parent / f"{module}.py").read_text("utf-8")
    name, old = _function(source)
    new_name, path = f"{name.rstrip('_')}_anew", f"starlette/{module}.py"
    new, whole = old.replace(name, new_name), source.replace(name, new_name)
    compile(whole, path, "exec")
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": f"Rename {name} to {new_name} in {path}."},
    ]
    turns = []
    for kind, arguments, result in (
        ("read", {"path": path}, source),
        ("edit", {"path": path, "old_text": old, "new_text": new}, "edited"),
        ("command", {"line": f"python -m py_compile {path}"}, "exit status 0"),
        ("rewrite", {"path": path, "content": whole}, "written"),
    ):
        forced = {"type": "function", "function": {"name": kind}}
        turns.append(_turn(kind, messages, tool_choice=forced))
        function = {"name": kind, "arguments": json.dumps(arguments)}
        call = {"id": f"call_{kind}", "type": "function", "function": function}
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": result},
        ]
    return [*turns, _turn("answer", messages)]


def _turn(kind: str, messages: list[dict[str, Any]], **more: Any) -> Turn:
    asked = {"messages": list(messages), "tools": TOOLS, "parallel_tool_calls": False}
    return Turn(kind, {**asked, "max_tokens": MAX_TOKENS[kind], **more})


def _function(source: str) -> tuple[str, str]:
    """Name and text of the function whose text is the longest below 1,200 characters."""
    texts = {
        node.name: ast.get_source_segment(source, node) or ""
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name[:2] != "__"
    }
    name = max((each for each in texts if len(texts[each]) < 1200), key=lambda one: len(texts[one]))
    return name, texts[name]
