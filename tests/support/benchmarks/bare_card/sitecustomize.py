"""Makes an interpreter that has this folder on its path one of a bare machine with a GPU: it has
torch, Triton and transformers, and not what is named here.  For `tests.benchmarks.gpu`.

Two parts of the benchmark are broken besides.  BARE_CARD_RECORD: the record of the run, which is
copied as it is when the first of them begins.
"""

import os
import shutil
import signal
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

# Of what we use, as `pip list` of such a machine has it not.
ABSENT = frozenset(
    [
        "ray",
        "fastapi",
        "starlette",
        "uvicorn",
        "argcomplete",
        "backports",
        "opentelemetry",
        "llguidance",
        "gguf",
        "grpc_health",
        "grpc_reflection",
        "openai",
        "anthropic",
    ]
)
KILLED, WRONG = "sampled", "memory"


class BareCard(MetaPathFinder):
    """Knows what is not there."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> None:
        """See `MetaPathFinder`; raises ModuleNotFoundError, and ends the part that is killed."""
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        if name == f"benchmarks.gpu.{KILLED}":
            record = Path(os.environ["BARE_CARD_RECORD"])
            shutil.copy(record, record.with_suffix(".before"))
            os.kill(os.getpid(), signal.SIGSEGV)
        if name == f"benchmarks.gpu.{WRONG}":
            raise OSError("this part is broken")


if __name__ == "sitecustomize":  # and not where a test wants its names
    sys.meta_path.insert(0, BareCard())
