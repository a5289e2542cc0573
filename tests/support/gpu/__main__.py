"""Proves without a GPU what can be proved of one (`make check-gpu-offline`; some minutes).

    python -m tests.support.gpu            compares with the committed table
    python -m tests.support.gpu --write    writes the table; then `make docs`

Exits with 1 where a number is another than in the table, where what is served by default spills, or
where a kernel over a step's true shapes is not its reference.  Triton keeps what it has compiled
(TRITON_CACHE_DIR).
"""

import json
import sys
import tempfile
from pathlib import Path

from transformers.utils import logging

from tests.support.checkpoints import tiny_checkpoint
from tests.support.engine.driver import load_engine
from tests.support.engine.interpreter import run_python
from tests.support.gpu import collectives, cubins, heads, steps, table
from tests.support.gpu.models import CONFIGS

_RANKS = (2, 4)


def measured() -> table.Table:
    """All of the table."""
    with tempfile.TemporaryDirectory() as folder:
        engine = load_engine(tiny_checkpoint("llama", Path(folder)))
        commands = collectives.of_commands(engine)
    return {
        "versions": table.versions(),
        "architectures": {name: steps.of_architecture(name) for name in CONFIGS},
        "draws": steps.draws(num_rows=32, vocab_size=128_256),
        "moves": {"accepted nodes": steps.move()},
        "heads": heads.rounds(),
        "collectives": {
            name: {f"TP {count}": collectives.of_architecture(name, count) for count in _RANKS}
            for name in CONFIGS
        },
        "commands of a step": commands,
        "steps in graphs (%)": json.loads(run_python("tests.support.gpu.load")),
        "cubins": cubins.measured(cubins.variants()),
    }


def main(arguments: list[str]) -> int:
    logging.set_verbosity_error()
    found = measured()
    faults = list(cubins.faults(found["cubins"]))
    if "--write" in arguments:
        table.write(found)
    changed = list(table.changes(found, table.read()))
    sys.stdout.writelines(f"{line}\n" for line in (*changed, *faults))
    sys.stdout.write(f"{len(found['cubins'])} kernels, {len(changed)} changes, ")
    sys.stdout.write(f"{len(faults)} faults\n")
    shapes = run_python("pytest", "-n", "2", "tests/engine/test_gpu_shapes.py")
    assert " passed" in shapes, shapes
    sys.stdout.write(f"true shapes: {shapes.splitlines()[-1]}\n")
    return int(bool(changed or faults))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
