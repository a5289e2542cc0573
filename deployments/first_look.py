"""What is wrong with the arguments of `make serve`, told before minutes of installation.

It has PyYAML and NumPy alone, so it reads what a file and the options say against the schema.
Kinds of drafters, models and the machine are `drafthouse serve`'s to look at, once it is installed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from cluster.config.file import load
from cluster.errors import ConfigError
from deployments import vllm_options

# As `drafthouse serve` has it.
_DEMONSTRATION = "configs/local.yaml"


def main(argv: Sequence[str]) -> str:
    """Return what is wrong, "" = nothing that shows here."""
    parser = argparse.ArgumentParser(prog="make serve", add_help=False, allow_abbrev=False)
    parser.add_argument("files", nargs="*")
    vllm_options.add_options(parser)
    arguments, _ = parser.parse_known_args(argv)
    (file, *others) = arguments.files or [_DEMONSTRATION]
    # A model, or the value of an option that is not known here.
    if others or not Path(file).is_file():
        return ""
    try:
        load(file, vllm_options.asked(arguments)[1])
    except ConfigError as error:
        return f"drafthouse: {' '.join(error.message.split())}"
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) or 0)
