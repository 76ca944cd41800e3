# SPDX-License-Identifier: Apache-2.0
"""Division by a number known before a kernel runs, as a product: see cuda/split/division.cuh."""

from __future__ import annotations

from functools import lru_cache


@lru_cache(maxsize=4096)
def divisor_of(number: int) -> dict[str, int]:
    """Find the values of ``struct Divisor`` for a number from 1 to 2**31; not to be changed.

    With ``shift`` the least for which ``number <= 2**shift``, and
    ``magic = ceil(2**(31 + shift) / number)``::

        x // number == (2 * x * magic >> 32) >> shift        for 0 <= x < 2**31

    For ``magic * number == 2**(31 + shift) + rest`` with ``0 <= rest < 2**shift``, so that
    ``x * magic / 2**(31 + shift)`` exceeds ``x / number`` by at most ``x / (2**31 * number)``,
    which is less than ``1 / number``: too little to reach the next whole number. Both factors fit
    in 32 bits: ``2 * x < 2**32``, and ``2**(shift - 1) < number <= 2**31`` keeps ``magic`` below
    ``2**32``. (T. Granlund, P. L. Montgomery: Division by invariant integers using multiplication,
    1994.)
    """
    shift = (number - 1).bit_length()
    return {"magic": -(-(1 << 31 + shift) // number), "shift": shift}
