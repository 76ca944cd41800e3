# SPDX-License-Identifier: Apache-2.0
"""What cuda/split/ragged_schedule_numbered.cu writes in addition, in NumPy."""

from __future__ import annotations

import numpy as np

from tests.launch.split.ragged_schedule_mirror import TileSchedule


def numbers(made: TileSchedule, qo_indptr: np.ndarray) -> np.ndarray:
    """The request of each place: the one whose query tokens its first one is among."""
    begins, ends = qo_indptr[:-1, None], qo_indptr[1:, None]
    q_begin = made.places[:, 3]
    return ((begins <= q_begin) & (q_begin < ends)).argmax(axis=0)
