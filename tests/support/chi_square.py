"""Whether counts fit a distribution."""

from __future__ import annotations

import numpy as np
from scipy import stats


def p_value(observed: np.ndarray, expected: np.ndarray) -> float:
    """How likely such counts are: chi-square, the cells seldom expected counted together."""
    observed, expected = observed.ravel(), expected.ravel()
    if observed[expected == 0.0].any():
        return 0.0  # a token of probability 0 came out
    rare = expected < 5.0
    observed = np.append(observed[~rare], observed[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    observed, expected = observed[expected > 0.0], expected[expected > 0.0]
    if len(expected) < 2:
        return 1.0
    expected *= observed.sum() / expected.sum()  # fp32 rows add up to 1 only nearly
    return float(stats.chisquare(observed, expected).pvalue)
