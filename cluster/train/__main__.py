"""`python -m cluster.train`: the `drafthouse train` commands alone."""

import sys

from cluster.train.cli import main

sys.exit(main())
