# SPDX-License-Identifier: Apache-2.0
"""A function has the arguments that its spec lists, and no others; so have the runs of plans."""

from __future__ import annotations

import ast
import inspect
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cumla
from cumla.core.arrays import open_call
from cumla.core.operation import Ready
from cumla.core.plan import Plan
from cumla.core.spec import (
    REQUIRED,
    SPECS,
    STREAM,
    Argument,
    Factor,
    Option,
    Spec,
    array,
    in_parts,
)
from tests.calls import OPERATIONS, PLANS, Operation, Planned, every_operation, every_plan
from tests.fake_cuda import FakeCuPy

FUNCTIONS = [name for name in cumla.__all__ if name.islower() and name != "prepare"]
for name in cumla.__all__:
    getattr(cumla, name)  # loads all specs
KINDS = {  # of options in PyTorch, by their annotations
    "bool": "bool",
    "float": "float",
    "int": "int",
    "str": "str",
    "str | None": "str?",
    "float | None": "float?",
    "int | None": "int?",
    "int | Sequence[int | None] | None": "int[]?",
    "Any": "str?",
}
NAMES = sorted(SPECS)  # which are in the order of the imports, another one in each process
every_spec = pytest.mark.parametrize("spec", [SPECS[name] for name in NAMES], ids=NAMES)


def test_every_function_has_a_spec() -> None:
    assert sorted(SPECS) == sorted(FUNCTIONS)
    for name in FUNCTIONS:
        assert SPECS[name].function is getattr(cumla, name)


@every_spec
def test_signatures(spec: Spec) -> None:
    assert spec.function is not None
    parameters = list(inspect.signature(spec.function).parameters.values())
    found = {p.name: REQUIRED if p.default is p.empty else p.default for p in parameters}
    assert found == {a.name: a.default for a in (*spec.arguments, STREAM)}
    assert list(found) == [a.name for a in (*spec.arguments, STREAM)]
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert len(positional) == spec.positional
    annotations = {p.name: p.annotation for p in parameters}
    for option in spec.options:
        if not isinstance(option, Factor):
            assert KINDS[annotations[option.name]] == option.kind


@every_spec
def test_documentation_names_all_arguments(spec: Spec) -> None:
    text = inspect.getdoc(spec.function) or ""
    start, end = (text.index(f"{title}\n---") for title in ("Parameters", "Raises"))
    named = {
        name.strip()
        for line in text[start:end].splitlines()
        if not line.startswith(" ")
        for name in line.partition(" :")[0].split(",")
    }
    assert {argument.name for argument in spec.arguments} <= named


@every_operation
def test_what_was_sorted_is_found_again(operation: Operation) -> None:
    """What the binding of PyTorch makes of a call is the call."""
    spec = SPECS[operation.function.__name__]
    given = operation.make() | operation.outputs()
    whole = {argument.name: None for argument in spec.arguments} | given
    whole |= {
        a.name: a.default for a in spec.arguments if a.name not in given and a.default is not None
    }
    found = spec.given(*spec.sorted(whole))
    assert found is not None
    for name, value in found.items():
        expected = whole[name]
        if isinstance(expected, tuple):
            expected = list(expected)
        assert value is expected or _same(value, expected)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, list):
        return all(a is b for a, b in zip(one, other, strict=True))
    return type(one) in (int, float, str) and one == other


@cache
def parsed(path: str) -> ast.Module:
    return ast.parse(Path(path).read_text("utf-8"))


def passes_on(function: Any) -> tuple[list[str], list[str]]:
    """The parameters of a function, and what its last statement passes on, in their orders."""
    code = function.__code__
    (node,) = [
        node
        for node in ast.walk(parsed(code.co_filename))
        if isinstance(node, ast.FunctionDef)
        and code.co_firstlineno in (node.lineno, *[d.lineno for d in node.decorator_list])
    ]
    calls = [
        call
        for statement in node.body
        for call in ast.walk(statement)
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in ("call", "_call", "_renew")
    ]
    assert len(calls) == 1
    assert not calls[0].keywords
    names = []
    for argument in calls[0].args:
        group = argument.value.elts if isinstance(argument, ast.Starred) else [argument]
        names += [ast.unparse(one) for one in group]
    return named(function), names


def named(function: Any) -> list[str]:
    """The parameters with a name, without self."""
    parameters = list(inspect.signature(function).parameters.values())
    return [p.name for p in parameters if p.name != "self" and p.kind is not p.VAR_KEYWORD]


@every_spec
def test_functions_pass_their_arguments_on(spec: Spec) -> None:
    parameters, passed = passes_on(spec.function)
    assert parameters == passed


def plans() -> list[type[Plan[Any]]]:
    return list(dict.fromkeys(planned.kind for planned in PLANS.values()))


@pytest.mark.parametrize("kind", plans(), ids=lambda kind: kind.__name__)
def test_plans(kind: type[Plan[Any]]) -> None:
    """A run and an update together have the arguments of the function, but for what plans fix."""
    spec = kind._spec
    of_run, of_update, of_plan = map(named, (kind.run, kind.update, kind.__init__))  # type: ignore[attr-defined,misc]
    assert of_update == [*spec.planned, "stream"]
    for method in (kind.run, kind.update):  # type: ignore[attr-defined]
        parameters, passed = passes_on(method)
        assert parameters == passed
    assert spec.planned == tuple([a.name for a in spec.arrays if a.name in spec.planned])
    known = {argument.name for argument in (*spec.arguments, STREAM)}
    assert set(of_run) <= known
    assert known - {*of_run, *of_update} <= set(of_plan)
    defaults = {
        p.name: p.default
        for p in inspect.signature(kind.run).parameters.values()  # type: ignore[attr-defined]
        if p.default is not p.empty
    }
    for argument in spec.arguments:
        if isinstance(argument, Option) and argument.name in defaults:
            assert defaults[argument.name] == argument.default


PUBLIC = [getattr(cumla, name) for name in cumla.__all__]
SIZED = [kind for kind in PUBLIC if hasattr(kind, "workspace_bytes")]


@pytest.mark.parametrize("kind", SIZED, ids=lambda kind: kind.__name__)
def test_three_ways_to_size_a_plan_agree(kind: Any) -> None:
    """By the class, `from_arrays` and `workspace_bytes`: the same options, the same defaults."""
    of_class = inspect.signature(kind).parameters
    for other in (kind.from_arrays, kind.workspace_bytes):
        for name, parameter in inspect.signature(other).parameters.items():
            if name in of_class:
                assert parameter.default == of_class[name].default, name
    assert {*inspect.signature(kind.workspace_bytes).parameters} - {*of_class} == {"sm_count"}
    # What arrays do not tell is an option of both.
    options = {name for name, p in of_class.items() if isinstance(p.default, bool)}
    assert options <= {*inspect.signature(kind.from_arrays).parameters}


@every_plan
def test_arguments_in_the_wrong_place(planned: Planned) -> None:
    """The message says which method takes them, or that the plan has them."""
    given = OPERATIONS[planned.operation].make()
    plan = planned.ready(given)
    rightly = {"update": planned.lengths(given), "run": planned.inputs(given)}
    takers = dict.fromkeys(named(type(plan)), "when the plan is made")
    takers |= {name: f"to {m}" for m in rightly for name in named(getattr(plan, m))}
    for method, arguments in rightly.items():
        call = getattr(plan, method)
        for name in takers.keys() - {*named(call)}:
            message = rf"^{name}: needs to be given {takers[name]}, got it in {method}; "
            with pytest.raises(TypeError, match=message):
                call(**arguments, **{name: None})
        for name in ("colour", "misplaced"):
            with pytest.raises(TypeError, match=rf"{method}\(\) got an unexpected .* '{name}'"):
                call(**arguments, **{name: 1})


def test_hidden_options() -> None:
    """A call that no function can make is no call of the function."""
    spec = SPECS["mla_decode"]
    given = {a.name: a.default for a in spec.arguments} | OPERATIONS["mla_decode"].make()
    inputs, outputs, options = spec.sorted(given)
    assert spec.given(inputs, outputs, options) is not None
    assert spec.given(inputs, outputs, options._replace(empty_lse=np.inf)) is None


def test_defaults_are_not_checked() -> None:
    """A default costs a call nothing; whatever else is equal to it is checked."""
    seen = []

    def check(name: str, value: Any) -> Any:
        seen.append((name, value))
        return value

    made = Spec("made_up", (Option("option", False, check),), positional=0, kernels=())
    del SPECS["made_up"]
    for value in (False, 0, True):
        made.sorted({"option": value})
    assert seen == [("option", 0), ("option", True)]


def test_arguments_are_told_apart() -> None:
    for spec in SPECS.values():
        names = [argument.name for argument in spec.arguments]
        assert len(names) == len(set(names))
        assert all(isinstance(argument, Argument) for argument in spec.arguments)


def test_parts_are_told_from_arrays(cupy: FakeCuPy) -> None:
    """A call is kept by which of its arrays are in parts, and where each part lies."""
    made = Spec(
        "made_up",
        (array("x", in_parts("a", "b", "c?")), array("y", in_parts("a", "b", "c?"))),
        positional=2,
        kernels=(),
    )
    del SPECS["made_up"]
    ready = Ready()

    def key(x: Any, y: Any) -> Any:
        return ready.find(made.sorted, (x, y, None))[0]

    a, b, c = (cupy.like(np.zeros(4)) for _ in range(3))
    again = cupy.like(np.zeros(4))
    again.data.ptr = b.data.ptr
    assert key(a, b) is None  # nobody has seen its type yet
    open_call((("x", a),))
    keys = [key(a, b), key(b, a), key((a, b), c), key(a, (b, c)), key((c, b), a), key((a, b, c), c)]
    assert None not in keys
    assert len(set(keys)) == len(keys)
    assert key((a, again), c) == keys[2] != key([a, b], c)
    assert key([a, again], c) == key([a, b], c)
    c.data.ptr += 256
    assert key((a, b), c) not in (None, *keys)
    for pair in ((), (None, a), (np.zeros(3), a), []):
        assert key(pair, pair) is None, pair
