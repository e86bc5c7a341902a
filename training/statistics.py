"""Intervals of means."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

# Two-sided 95% quantiles of Student's t by degrees of freedom; beyond, the normal's will do.
T_95 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26, 10: 2.23}
T_95 |= {11: 2.20, 12: 2.18, 13: 2.16, 14: 2.14, 15: 2.13, 19: 2.09, 23: 2.07, 31: 2.04}
T_95 |= {60: 2.00, 120: 1.98}


def t_95(freedom: int) -> float:
    """Return the quantile for degrees of freedom, or the next wider one in the table."""
    return T_95[max((f for f in T_95 if f <= freedom), default=1)]


def half_width(samples: NDArray[np.float64]) -> float:
    """Return half the 95% interval of the mean of independent samples (Student's t)."""
    count = len(samples)
    if count < 2:
        return math.nan
    return t_95(count - 1) * float(samples.std(ddof=1)) / math.sqrt(count)


def stratified_half_width(samples: Sequence[NDArray[np.float64]]) -> float:
    """Return half the 95% interval of the mean of strata's means, each stratum weighted alike.

    Args:
        samples: Independent samples of each stratum.
    """
    if any(len(stratum) < 2 for stratum in samples):
        return math.nan
    variance = sum(float(stratum.var(ddof=1)) / len(stratum) for stratum in samples)
    freedom = sum(len(stratum) - 1 for stratum in samples)
    return t_95(freedom) * math.sqrt(variance) / len(samples)
