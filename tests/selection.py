# SPDX-License-Identifier: Apache-2.0
"""Which values of a parameter every change is tested with, and which --exhaustive adds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

exhaustive: bool | None = None
"""Whether --exhaustive was given, as tests/conftest.py says; None in processes that tests start."""


def some(values: Iterable[Any], step: int) -> list[Any]:
    """Every `step`-th value, the first one included; the others with --exhaustive.

    A tuple has the values of several parameters.
    """
    rows = [value if type(value) is tuple else (value,) for value in values]
    marks = pytest.mark.exhaustive
    return [pytest.param(*row, marks=marks if i % step else ()) for i, row in enumerate(rows)]
