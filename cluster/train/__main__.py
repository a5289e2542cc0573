"""`python -m cluster.train`: the training verbs without the rest of the product."""

import sys

from cluster.train.cli import main

sys.exit(main())
