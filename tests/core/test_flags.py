# SPDX-License-Identifier: Apache-2.0
"""Options that are on or off: a bool of Python or NumPy, and nothing that is merely true or false.

Those of functions are found in their specs, and those of plans in their signatures. One that is in
no call here fails `test_every_flag_is_here`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

import cumla
from cumla import AttentionMask
from cumla.core.spec import SPECS
from tests.blocks import step_cases
from tests.calls import (
    E4M3,
    OPERATIONS,
    PLANS,
    Arguments,
    Operation,
    Planned,
    arrays_of,
    refused,
)
from tests.sparse import dsa_cases

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


def flags_of(function: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [parameter.name for parameter in parameters if "bool" in str(parameter.annotation)]


BELONGS = {"batch_invariant": "max_kv_len", "prefix_groups": "max_pages"}
"""What plans take with a flag, and only if it is True."""


def parameters_of(kind: type) -> Any:
    return inspect.signature(kind).parameters


def with_fp8(arguments: Arguments) -> Arguments:
    return arguments | {"kv_cache": arguments["kv_cache"].astype(E4M3)}


def calls() -> Iterator[tuple[str, str, Call]]:
    """Name every function with a flag, the flag, and a call."""
    for name, spec in sorted(SPECS.items()):
        for option in spec.options:
            if option.kind == "bool":
                call = of_function(name)
                if option.name == "fp8_products":
                    call = Call(call.function, lambda make=call.make: with_fp8(make()))
                yield name, option.name, call
    for kind in dict.fromkeys(planned.kind for planned in PLANS.values()):
        name = kind.__name__
        for flag in flags_of(kind):
            options = {name: 64 for name in [BELONGS.get(flag)] if name in parameters_of(kind)}
            for call in of_plan(name, **options):
                if flag in inspect.signature(call.function).parameters:
                    method = "" if call.function is kind else f".{call.function.__name__}"
                    yield f"{name}{method}", flag, call
        planned = PLANS[name]
        operation = OPERATIONS[planned.operation]
        for flag in flags_of(kind.run):
            change = with_fp8 if flag == "fp8_products" else dict

            def given(operation: Operation = operation, change: Any = change) -> Arguments:
                return change(operation.make())

            def of_run(planned: Planned = planned, given: Any = given) -> Arguments:
                return planned.inputs(given() | OPERATIONS[planned.operation].outputs())

            yield f"{name}.run", flag, Call(planned.ready(given()).run, of_run)
    dsa, blocks = dsa_cases.Step(), step_cases.Case()
    for kind, step, made_of, options in (
        (cumla.DSAPlan, dsa, dsa_cases.MADE_OF, {"topk": dsa.topk}),
        (cumla.BlockSparseStep, blocks, step_cases.MADE_OF, blocks.options),
    ):
        arrays = {name: step.arguments()[name] for name in made_of} | options
        sizes = parameters_of(kind.workspace_bytes)
        numbers = {n: value for n, value in step.numbers().items() if n in sizes}
        for function, given in (
            (kind, step.numbers() | {"like": np.zeros(1)}),
            (kind.from_arrays, arrays),
            (kind.workspace_bytes, numbers | {"sm_count": 132}),
        ):
            method = "" if function is kind else f".{function.__name__}"
            for flag in flags_of(function):
                yield f"{kind.__name__}{method}", flag, Call(function, given.copy)
    lens = np.array([9], np.int32)
    spans: Arguments = {"spans": np.zeros((1, 2, 2), np.int32), "kv_lens": lens, "q_len": 2}
    yield "AttentionMask.image_spans", "clamp", Call(AttentionMask.image_spans, lambda: spans)

    def of_tree(full: bool = False, **given: Any) -> AttentionMask:
        is_full = isinstance(full, (bool, np.bool_)) and bool(full)
        mask = np.ones(18 if is_full else (1, 2, 2), bool)
        return AttentionMask.from_tree(mask, full=full, **given)

    yield "AttentionMask.from_tree", "full", Call(of_tree, lambda: {"kv_lens": lens, "q_len": 2})


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
        f"{name}-{flag}" for name, function in public_functions() for flag in flags_of(function)
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
        if not value:
            arguments.pop(BELONGS.get(flag), None)
        result = call.function(**arguments | {flag: given})
        made = getattr(result, "key", result if isinstance(result, int) else None)
        seen.append((made, [array.tobytes() for _, array in arrays_of(arguments)]))
    assert seen[0] == seen[1]
