# SPDX-License-Identifier: Apache-2.0
"""What the demo's steps are held against: attention in float32, computed in another way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

UNABSORBED = "un-absorbed attention"  # to the same cache
TOLERANCE = 1e-2  # of |out - expected| / |expected|, for each token in each step


def worst_error(out: Array, expected: Array) -> float:
    """Find the largest relative error of a token; both are (tokens, heads, columns)."""
    errors = np.linalg.norm(out - expected, axis=(1, 2)) / np.linalg.norm(expected, axis=(1, 2))
    return float(errors.max())


def verdict(worst: Sequence[float], oracle: str = UNABSORBED, arithmetic: str = "float32") -> int:
    """Print whether all steps are right, by the worst error of each; the exit code."""
    wrong = np.flatnonzero(~(np.array(worst) <= TOLERANCE))  # NaN is wrong
    if wrong.size:
        print(
            f"WRONG: {wrong.size} of {len(worst)} steps are more than {TOLERANCE:g} away from "
            f"{oracle} in {arithmetic}, the first is step {wrong[0] + 1}"
        )
        return 1
    print(f"ok: every step within {TOLERANCE:g} of {oracle} in {arithmetic}")
    return 0
