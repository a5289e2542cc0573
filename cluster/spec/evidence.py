"""Constants of learning that all parts of the control loop share.

The parts read them as attributes of this module, so that `benchmarks.replay` can vary them here.
"""

from __future__ import annotations

# The weight of the newest value in a running mean, which so covers about the last twenty values.
RECENT = 0.05
# Fewer rounds or trees than this are not enough for an estimate.
FEW = 16
# So many first explorations of each kind may take more of the time, as nothing is known before.
FIRST_TRIES = 4
