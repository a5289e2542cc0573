"""The judge of laws: what was emitted beside what was expected."""

import numpy as np
from scipy import stats

# Cells in which fewer are expected count as one.
_RARE = 8.0


def p_value(seen: np.ndarray, expected: np.ndarray) -> float:
    """Chi-squared test of counts by cell; 0 where something impossible was emitted."""
    if seen[expected == 0.0].any():
        return 0.0
    rare = expected < _RARE
    groups = [np.append(each[~rare], each[rare].sum()) for each in (seen, expected)]
    if groups[1][-1] == 0.0:
        groups = [each[:-1] for each in groups]
    return float(stats.chisquare(*groups).pvalue) if len(groups[0]) > 1 else 1.0
