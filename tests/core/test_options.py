# SPDX-License-Identifier: Apache-2.0
"""What an option is taken for does not depend on what was passed before, though 3.0 equals 3.

Calls on a GPU are known again by their arguments, before options are checked.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from cumla.core.frameworks import framework_of_type
from cumla.core.spec import SPECS, Factor, Option
from tests.calls import OPERATIONS, PLANS, Operation, every_operation, every_plan
from tests.fake_cuda import FakeBindings, FakeCuPy


class Text(str, enum.Enum):  # noqa: UP042 (whose str() is another text)
    """Members that equal strings."""

    NHD = "NHD"
    HND = "HND"
    LOWEST = "lowest"
    TOKENS = "tokens"
    SLOTS = "slots"
    POSITIONS = "positions"


VALUES = (
    *(True, False, 0, 1, 2, 8, 16, 32, 50, 0.5, math.e, "NHD", "HND", "lowest", "tokens"),
    *("blocks", "slots", "positions", "float32", "none"),
    *((1, None), (3, 0), (2, -1)),
)
NUMBERS = (bool, int, float, complex, np.bool_, np.int32, np.int64, np.float32, np.float64)


def equals(value: Any) -> Iterator[Any]:
    """List what equals a value, of other types."""
    if isinstance(value, tuple):
        for place, side in enumerate(value):
            for other in equals(side):
                yield (*value[:place], other, *value[place + 1 :])
    elif isinstance(value, str):
        yield from (np.str_(value), *[member for member in Text if member == value])
    elif value is not None:
        yield from [other for kind in NUMBERS if (other := kind(value)) == value]


def error_of(call: Callable[[], Any]) -> str:
    """Tell how a call fails, nothing if it does not."""
    try:
        call()
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def check_option(option: Option, call: Callable[[Any], Any]) -> bool:
    """Compare calls with an option after one that succeeded; whether any did."""
    accepted = [value for value in VALUES if not error_of(partial(call, value))]
    for value in accepted:
        for other in equals(value):
            alone = error_of(partial(option.check, option.name, other))
            call(value)
            assert error_of(partial(call, other)) == alone, (option.name, value, other)
    return bool(accepted)


def on_gpu(cupy: FakeCuPy, operation: Operation) -> dict[str, Any]:
    given = {name: cupy.like(value) for name, value in operation.make().items()}
    framework_of_type.clear()
    return given


@every_operation
def test_functions(operation: Operation, cupy: FakeCuPy, bindings: FakeBindings) -> None:
    given = on_gpu(cupy, operation)
    for option in SPECS[operation.function.__name__].options:

        def call(value: Any, name: str = option.name) -> Any:
            return operation.function(**given | {name: value})

        found = check_option(option, call)
        # A factor needs a cache in FP8, a format one of its bytes, and groups go with no window.
        needs_bytes = isinstance(option, Factor) or option.name.endswith("cache_format")
        assert found or needs_bytes or "groups" in given


@every_plan
def test_runs_of_plans(planned: Any, cupy: FakeCuPy, bindings: FakeBindings) -> None:
    given = on_gpu(cupy, OPERATIONS[planned.operation])
    plan = planned.ready(given)
    for option in plan._spec.options:
        if option.name not in plan._of_run:
            continue

        def call(value: Any, name: str = option.name) -> Any:
            return plan.run(**planned.inputs(given) | {name: value})

        check_option(option, call)


@pytest.mark.parametrize("name", ["attention", "AttentionPlan"])
def test_layouts_of_an_enumeration(name: str) -> None:
    """A member is the string that it equals, not what str() of it is."""
    operation = OPERATIONS["attention"]
    arguments = operation.make()
    expected = operation.function(**arguments).out
    turned = arguments | {n: arguments[n].swapaxes(1, 2) for n in ("k", "v")}
    if name == "attention":
        found = operation.function(**turned, kv_layout=Text.HND).out
    else:
        plan = PLANS[name].make(turned, kv_layout=Text.HND)
        plan.update(**PLANS[name].lengths(turned))
        found = plan.run(**PLANS[name].inputs(turned), kv_layout=Text.HND).out
    assert found[1:6].tobytes() == expected[1:6].tobytes()
