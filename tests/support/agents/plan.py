"""The coding agents of plan.yaml: how each is started, and what its model writes."""

import json
from collections.abc import Callable, Mapping
from dataclasses import field
from glob import glob
from pathlib import Path
from string import Template
from typing import Any

import yaml

from cluster.records import frozen

MODEL = "drafthouse"
GREET = 'def greet(name):\n    return "hello " + name\n'
NEW = '    return f"Hello, {name}!"'
COMMAND, COMMAND_RAN = "python3 check.py", "checked.txt"
CHECK = (
    "from greet import greet\n\n"
    'assert greet("you") == "Hello, you!"\n'
    f'open("{COMMAND_RAN}", "w").write("fine")\n'
)
FIRST = "I read both files first.\n"
LAST = "greet.py greets politely now, and check.py is content."
TITLE = "Greet politely"
# How the template begins the result of a tool.
_RESULT = "<tool_response>"
_NAMES = {
    "model": MODEL,
    "key": "invented",
    "task": "Let greet.py greet politely, then run check.py.",
    "old": '    return "hello " + name',
    "new": NEW,
    "command": COMMAND,
}


def filled(value: Any, **names: object) -> Any:
    """The value with the names in its texts replaced."""
    if isinstance(value, str):
        return Template(value).substitute(_NAMES, **names)
    if isinstance(value, dict):
        return {key: filled(each, **names) for key, each in value.items()}
    return [filled(each, **names) for each in value] if isinstance(value, list) else value


@frozen
class Agent:
    """An entry of plan.yaml."""

    name: str
    package: str
    words: list[str]
    environment: Mapping[str, str]
    steps: Mapping[int, Any]
    files: Mapping[str, Any] = field(default_factory=dict)
    task_has: str = "<tools>"
    heeds_no_proxy: bool = True
    asks_anyway: str = ""

    @property
    def is_of_npm(self) -> bool:
        return "==" not in self.package

    @property
    def version(self) -> str:
        return self.package.rpartition("=" if "==" in self.package else "@")[2]

    def command(self, **place: object) -> list[str]:
        """place: the names that plan.yaml explains."""
        program, *words = filled(self.words, **place)
        if "*" in program:
            program = str(max(map(Path, glob(program))))
        return [program, *words]

    def answer(self, work: Path) -> Callable[[str], str]:
        """What the model writes to a prompt in the format of `configs/templates`."""
        steps = {count: _written(filled(step, work=work)) for count, step in self.steps.items()}

        def write(prompt: str) -> str:
            if self.task_has not in prompt:
                return TITLE
            return steps.get(prompt.count(_RESULT), LAST)

        return write


def call(name: str, **arguments: object) -> str:
    """A call as the model writes it."""
    body = f'{{"name": "{name}", "arguments": {json.dumps(arguments)}}}'
    return f"<tool_call>\n{body}\n</tool_call>"


def _written(step: str | list[dict[str, dict[str, Any]]]) -> str:
    """Of several calls in a text before them."""
    if isinstance(step, str):
        return step
    calls = [call(name, **arguments) for each in step for name, arguments in each.items()]
    return calls[0] if len(calls) == 1 else FIRST + "\n".join(calls)


_DESCRIBED = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
AGENTS = tuple(Agent(name, **each) for name, each in _DESCRIBED.items())
