"""The protocol between a peer's process and the benchmark: one JSON document per line.

Standard library only: a peer runs in its own interpreter, which lacks our packages.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any, TextIO

READY = "ready"

Question = dict[str, Any]
Reply = dict[str, Any]


def redirect_stdout() -> TextIO:
    """Return a stream to the benchmark; everything else that is printed goes to stderr."""
    line = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return line


def serve_questions(line: TextIO, answer: Callable[[Question], Reply]) -> None:
    """Write the ready line, then answer questions until stdin ends."""
    line.write(READY + "\n")
    for question in sys.stdin:
        line.write(json.dumps(answer(json.loads(question))) + "\n")
