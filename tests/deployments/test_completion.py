"""A shell completes the command: verbs, options, what is allowed for an option."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from deployments.cli import main


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_its_code(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    assert "drafthouse" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("drafthouse ser", {"serve "}),
        ("drafthouse serve demo-target --max-model", {"--max-model-len "}),
        ("drafthouse serve --log-format ", {"text", "json"}),
        ("drafthouse bench --good", {"--goodput "}),
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
    done = subprocess.run(
        [sys.executable, "-m", "deployments.cli"],
        env={**os.environ, **asked},
        capture_output=True,
        text=True,
        check=True,
    )
    assert {*done.stdout.splitlines()} == expected
