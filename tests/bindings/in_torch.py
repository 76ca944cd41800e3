# SPDX-License-Identifier: Apache-2.0
"""The calls of `tests.calls` with tensors, and what compares their results."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cumla.core.arrays import from_numpy
from tests.calls import Operation, int32

torch = pytest.importorskip("torch")

import cumla.torch as binding  # noqa: E402
from cumla.core.spec import SPECS, Instead  # noqa: E402

# PyTorch times the guards of each graph behind a flush of the cache, for its log.
guards = importlib.import_module("torch._dynamo.guards")
guards.profile_guard_manager = lambda *of: 0.0  # type: ignore[attr-defined]

Arguments = dict[str, Any]


def tensors(value: Any) -> Any:
    """Copy arrays into tensors; every query row gets a request."""
    if isinstance(value, dict):
        whole = {"qo_indptr": int32(0, 4, 8)} if len(value.get("q", ())) == 8 else {}
        return {name: tensors(part) for name, part in (value | whole).items()}
    if isinstance(value, (tuple, list)):
        return type(value)(map(tensors, value))
    return from_numpy("torch", value.copy()) if isinstance(value, np.ndarray) else value


def flat(value: Any) -> list[Any]:
    """List tensors as bytes, for they are equal to the bit."""
    leaves = torch.utils._pytree.tree_leaves(value)
    return [a.flatten().view(torch.uint8) for a in leaves if isinstance(a, torch.Tensor)]


def assert_equal(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    pairs = list(zip(flat(found), flat(expected), strict=True))
    assert all(torch.equal(*pair) for pair in pairs)
    assert pairs or expected is None


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, **{"backend": "aot_eager"} | options)


def in_graph(operation: Operation, arguments: Arguments) -> tuple[tuple[Any, ...], Arguments]:
    """Arguments of the operation of PyTorch, by position and by name."""
    spec = SPECS[operation.function.__name__]
    forms = {argument.name: binding._form(argument) for argument in spec.arguments}
    given = dict(binding._argument(forms[name], name, a) for name, a in arguments.items())
    for instead in spec.rows(Instead):
        if given.get(instead.of) is not None:
            given[instead.name] = given[instead.of].clone()
    schema = getattr(torch.ops.cumla, operation.function.__name__).default._schema
    names = [a.name for a in schema.arguments if not a.kwarg_only and a.name in given]
    return tuple([given.pop(name) for name in names]), given


def check_compiled(operation: Operation, make: Callable[[Any], Any]) -> None:
    """Compare calls in a graph with eager ones, without outputs and with; `make` copies."""
    calls = [operation.make()]
    if outputs := operation.outputs():
        calls.append(operation.make() | outputs)
    eager, traced = ([make(given) for given in calls] for _ in range(2))
    expected = [operation.function(**given) for given in eager]
    graph = compiled(lambda calls: [operation.function(**given) for given in calls])
    for one, other in zip(graph(traced), expected, strict=True):
        assert_equal(one, other)
    assert_equal(traced, eager)


def halves(
    operation: Operation, given: Arguments
) -> tuple[Callable[[Any], list[Any]], Callable[[Any], list[Any]]]:
    """Functions of a workspace: one attends twice by it, one writes the schedule there before."""
    positional, named = in_graph(operation, given)
    name = operation.function.__name__
    first, second = (getattr(torch.ops.cumla, f"{name}_{half}") for half in ("schedule", "attend"))

    def attend(workspace: Any) -> list[Any]:
        return [second(*positional, **named, workspace=workspace) for _ in range(2)]

    def both(workspace: Any) -> list[Any]:
        first(*positional, **named, workspace=workspace)
        return attend(workspace)

    return attend, both
