"""A shell completes the command: verbs, options, what is allowed for an option."""

from __future__ import annotations

import pytest

from tests.conftest import Run, python


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_its_code(shell: str, run: Run) -> None:
    assert "drafthouse" in run("completion", shell)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("drafthouse serve demo-target --max-model", {"--max-model-len "}),
        ("drafthouse serve --log-format ", {"text", "json"}),
    ],
)
def test_what_may_follow_is_offered(line: str, expected: set[str]) -> None:
    """As the shell asks, which reads the answer from another stream than the output."""
    asked = {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "_ARGCOMPLETE_SHELL": "bash",
        "_ARGCOMPLETE_STDOUT_FILENAME": "/dev/stdout",
    }
    done = python("-m", "deployments.cli", **asked)
    assert {*done.stdout.splitlines()} == expected, done.stderr
