# SPDX-License-Identifier: Apache-2.0
"""Flags of the environment; the one that asks for checks of values on the device.

A flag may be set and unset while the process runs, so each call looks again. `os.environ.get` takes
1 us for it; the mapping behind it, by the encoded name, 50 ns.
"""

from __future__ import annotations

import os

from cumla.errors import CumlaError

__all__ = ["check_mode", "environment_flag"]

_FLAGS = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("", "0", "false", "no", "off"), False),
}
_CHECK = "CUMLA_CHECK"
_ENCODED = os.environ.encodekey(_CHECK)


def check_mode() -> bool:
    """Tell whether ``CUMLA_CHECK`` asks for checks that look at values and wait for the GPU.

    Raises
    ------
    CumlaError
        As `environment_flag`.
    """
    try:
        if _ENCODED not in os.environ._data:  # type: ignore[attr-defined]
            return False
    except AttributeError:  # somebody has put another mapping there
        pass
    return environment_flag(_CHECK)


def environment_flag(name: str) -> bool:
    """Read a flag from the environment: off where it is not set, or empty.

    Parameters
    ----------
    name : str
        Name of the variable.

    Raises
    ------
    CumlaError
        If it is none of 0, 1, true, false, yes, no, on and off, in any case.
    """
    value = os.environ.get(name, "")
    flag = _FLAGS.get(value.strip().lower())
    if flag is None:
        raise CumlaError(
            f"{name}: needs 1, true, yes or on, or 0, false, no or off, got {value!r}; unset the "
            f"environment variable where it is not meant"
        )
    return flag
