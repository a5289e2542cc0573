"""`python -m cluster.worker`: see `cluster.worker.cli`."""

from __future__ import annotations

import sys

from cluster.worker.cli import main

if __name__ == "__main__":
    sys.exit(main())
