"""How much evidence counts, for everything in the control loop that learns.

Read as attributes of this module, so that `benchmarks.replay` can vary them in one place.
"""

from __future__ import annotations

# Weight of the newest value in a running mean: the last twenty or so count.
RECENT = 0.05
# Fewer rounds, or trees, than this tell nothing.
FEW = 16
# The first tries of anything may take more of the time, for until then nobody knows.
FIRST_TRIES = 4
