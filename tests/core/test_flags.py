# SPDX-License-Identifier: Apache-2.0
"""Options that are on or off: a bool of Python or NumPy, and nothing that is merely true or false.

Those of functions are found in their specs. A new one of a plan without a call fails
`test_every_flag_is_here`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

import cumla
from cumla.core.spec import SPECS
from tests.calls import E4M3, OPERATIONS, PLANS, Arguments, arrays_of, refused

NO_FLAGS = [("yes", "str 'yes'"), ("", "str ''"), (2, "int 2"), (0, "int 0"), (None, "NoneType")]
NO_FLAGS += [(np.int64(1), "int64 1"), (np.ones(1, bool), "ndarray")]


class Call(NamedTuple):
    """A call that works, with arguments that are made anew each time."""

    function: Callable[..., Any]
    make: Callable[[], Arguments]


def of_function(name: str) -> Call:
    operation = OPERATIONS[name]
    return Call(operation.function, lambda: operation.make() | operation.outputs())


def of_plan(name: str, **options: Any) -> tuple[Call, Call, Call]:
    """Make a plan by the class, by `from_arrays`, and the size of its buffer."""
    planned = PLANS[name]
    arguments = OPERATIONS[planned.operation].make()
    made_of = {name: arguments[name] for name in planned.made_of}
    return (
        Call(planned.kind, lambda: planned.numbers | {"like": np.zeros(1)} | options),
        Call(planned.kind.from_arrays, lambda: made_of | options),
        Call(planned.kind.workspace_bytes, lambda: planned.sizes() | {"sm_count": 132} | options),
    )


def calls() -> Iterator[tuple[str, str, Call]]:
    """Name every function with a flag, the flag, and a call."""
    for name, spec in sorted(SPECS.items()):
        for option in spec.options:
            if option.kind == "bool" and option.name != "fp8_products":
                yield name, option.name, of_function(name)
    for name in ("MLADecodePlan", "AttentionPlan"):
        for flag, longest in (("causal", {}), ("batch_invariant", {"max_kv_len": 64})):
            made, from_arrays, size = of_plan(name, **longest)
            yield name, flag, made
            yield f"{name}.from_arrays", flag, from_arrays
        yield f"{name}.workspace_bytes", "batch_invariant", size
    made, from_arrays, _ = of_plan("MLAAttentionPlan")
    yield "MLAAttentionPlan", "causal", made
    yield "MLAAttentionPlan.from_arrays", "causal", from_arrays
    for name in ("MLADecodePlan", "MLAAttentionPlan"):
        planned = PLANS[name]
        function, make = of_function(planned.operation)

        def fp8(make: Callable[[], Arguments] = make) -> Arguments:
            arguments = make()
            return arguments | {"kv_cache": arguments["kv_cache"].astype(E4M3)}

        yield planned.operation, "fp8_products", Call(function, fp8)
        plan = planned.ready(fp8())
        run = Call(plan.run, lambda planned=planned, fp8=fp8: planned.inputs(fp8()))
        yield f"{name}.run", "fp8_products", run
    name = "MLASparsePlan"
    made, from_arrays, size = of_plan(name)
    yield name, "batch_invariant", made
    yield f"{name}.from_arrays", "batch_invariant", from_arrays
    yield f"{name}.workspace_bytes", "batch_invariant", size
    name = "PagedMQALogitsPlan"
    planned, operation = PLANS[name], OPERATIONS["paged_mqa_logits"]
    plan = planned.ready(operation.make())
    run = Call(plan.run, lambda: planned.inputs(operation.make() | operation.outputs()))
    yield f"{name}.run", "clean", run


CALLS = {f"{name}-{flag}": (flag, call) for name, flag, call in calls()}
every_flag = pytest.mark.parametrize(("flag", "call"), CALLS.values(), ids=CALLS)


def public_functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Functions, and plans with their methods; results and errors are made by nobody."""
    for name in cumla.__all__:
        public = getattr(cumla, name)
        if inspect.isclass(public) and issubclass(public, (tuple, Exception)):
            continue
        yield name, public
        for method in vars(public) if inspect.isclass(public) else ():
            if not method.startswith("_") and callable(getattr(public, method)):
                yield f"{name}.{method}", getattr(public, method)


def test_every_flag_is_here() -> None:
    flags = {
        f"{name}-{parameter.name}"
        for name, function in public_functions()
        for parameter in inspect.signature(function).parameters.values()
        if "bool" in str(parameter.annotation)
    }
    assert flags == set(CALLS)


@every_flag
def test_what_is_no_bool(flag: str, call: Call) -> None:
    arguments = call.make()
    before = [array.tobytes() for _, array in arrays_of(arguments)]
    for value, kind in NO_FLAGS:
        message = f"{flag}: needs True or False, got {kind}; pass one of the two, such as bool(...)"
        with refused(TypeError, message):
            call.function(**arguments | {flag: value})
    assert [array.tobytes() for _, array in arrays_of(arguments)] == before


@pytest.mark.parametrize("value", [True, False])
@every_flag
def test_bools_of_numpy(flag: str, call: Call, value: bool) -> None:
    """They count as Python's: the same is written, and plans and sizes are the same."""
    seen = []
    for given in (value, np.bool_(value)):
        arguments = call.make()
        if flag == "batch_invariant" and not value:
            arguments.pop("max_kv_len", None)  # which belongs to True
        result = call.function(**arguments | {flag: given})
        made = getattr(result, "key", result if isinstance(result, int) else None)
        seen.append((made, [array.tobytes() for _, array in arrays_of(arguments)]))
    assert seen[0] == seen[1]
