"""Proves without a GPU what can be proved of one (`make check-gpu-offline`; some minutes).

    python -m tests.support.gpu            compares with the committed table, and says what is worse
    python -m tests.support.gpu --write    writes the table; then `make docs`

Exits with 1 where anything differs from the table, or where what is served by default spills.
Triton keeps what it has compiled (TRITON_CACHE_DIR).
"""

from __future__ import annotations

import sys

from tests.support.gpu import collectives, cubins, heads, steps, table
from tests.support.gpu.models import CONFIGS

_RANKS = (2, 4)


def measured() -> table.Table:
    """All of the table."""
    return {
        "versions": table.versions(),
        "architectures": {name: steps.of_architecture(name) for name in CONFIGS},
        "draws": steps.draws(num_rows=32, vocab_size=128_256),
        "heads": heads.rounds(),
        "collectives": {
            name: {f"TP {count}": collectives.of_architecture(name, count) for count in _RANKS}
            for name in CONFIGS
        },
        "cubins": cubins.measured(cubins.variants()),
    }


def main(arguments: list[str]) -> int:
    found = measured()
    faults = list(cubins.faults(found["cubins"]))
    if "--write" in arguments:
        table.write(found)
    changed = list(table.changes(found, table.read()))
    sys.stdout.writelines(f"{line}\n" for line in (*changed, *faults))
    sys.stdout.write(f"{len(found['cubins'])} kernels, {len(changed)} changes, ")
    sys.stdout.write(f"{len(faults)} faults\n")
    return int(bool(changed or faults))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
