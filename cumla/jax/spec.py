# SPDX-License-Identifier: Apache-2.0
"""The static part of a call, as one string: XLA keeps it in the program, and hands it back.

The string holds everything but addresses, so that it serves as a key, and so that a program which
was exported runs in another process with the same version of cumla.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import cumla
from cumla.core import spec
from cumla.core.arrays import WORKSPACE, ArrayView
from cumla.core.operation import Operation, Output, unplaced
from cumla.errors import CumlaError

__all__ = ["Buffer", "Spec", "operation_of", "read", "views_of"]


class Buffer(NamedTuple):
    """An array in a program."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Spec(NamedTuple):
    """A call without its arrays."""

    operation: str  # as `_operations` names it
    options: Any
    key: Any  # of the plan that runs it; None: it follows from the arrays
    inputs: tuple[Buffer, ...]  # in their order; the last is the workspace, if `keeps_workspace`
    absent: tuple[str, ...]  # arguments that the operation knows and that were not given
    written: tuple[str, ...]  # inputs that come back, written to
    workspace: int  # bytes
    keeps_workspace: bool = False  # it comes in, and goes out after the launches

    @classmethod
    def of(cls, operation: Operation[Any, Any], *rest: Any, **named: Any) -> Spec:
        """Describe a call of an operation."""
        return cls(_names()[id(operation)], *rest, **named)

    def views(self, device: int | None) -> dict[str, ArrayView | None]:
        """Describe the inputs, in the order of a public call, without their places."""
        inputs = self.inputs[:-1] if self.keeps_workspace else self.inputs
        return views_of(inputs, self.absent, device)

    def results(self, returned: tuple[Output, ...]) -> tuple[Buffer, ...]:
        """List what the call gives: outputs, what is written in place, the workspace."""
        shapes = {buffer.name: buffer for buffer in self.inputs}
        new = [Buffer(output.name, output.dtypes[0], output.shape) for output in returned]
        new += [shapes[name] for name in self.written]
        if self.workspace or self.keeps_workspace or not new:
            new.append(Buffer(WORKSPACE, "uint8", (self.workspace,)))
        return tuple(new)

    def aliases(self, results: tuple[Buffer, ...]) -> dict[int, int]:
        """Return which inputs become which results, by their places."""
        names = [buffer.name for buffer in results]
        return {i: names.index(b.name) for i, b in enumerate(self.inputs) if b.name in names}

    def text(self) -> str:
        """Write it down."""
        return json.dumps([cumla.__version__, _plain(tuple(self))], separators=(",", ":"))


def read(text: bytes) -> Spec:
    """Read what `Spec.text` wrote.

    `CumlaError` if another version of cumla did.
    """
    _operations()  # which loads the specs of all functions
    version, rest = json.loads(text)
    if version != cumla.__version__:
        raise CumlaError(
            f"the program was traced with cumla {version}, and this is {cumla.__version__}; trace "
            f"or export it again"
        )
    found = Spec._make(_rebuilt(rest))
    return found._replace(inputs=tuple([Buffer._make(buffer) for buffer in found.inputs]))


def views_of(
    buffers: tuple[Buffer, ...], absent: tuple[str, ...], device: int | None
) -> dict[str, ArrayView | None]:
    """Describe contiguous arrays whose places are not known; None for what was not given."""
    views: dict[str, ArrayView | None] = {
        name: unplaced(Output(name, shape, (dtype,)), device) for name, dtype, shape in buffers
    }
    return views | dict.fromkeys(absent)


def operation_of(call: Spec) -> Operation[Any, Any]:
    """Find the operation of a call."""
    return _operations()[call.operation]


@cache
def _operations() -> Mapping[str, Operation[Any, Any]]:
    """List the operations of all public functions and plans, by the place of their definition."""
    found: dict[str, Operation[Any, Any]] = {}
    for home in sorted(set(cumla._HOMES.values())):
        for name, value in vars(import_module(f"cumla.{home}")).items():
            for i, one in enumerate(value if isinstance(value, tuple) else (value,)):
                if isinstance(one, Operation):
                    found[f"{home}.{name}[{i}]"] = one
    return found


@cache
def _names() -> Mapping[int, str]:
    return {id(operation): name for name, operation in _operations().items()}


def _plain(value: Any) -> Any:
    """Turn options and keys into what JSON has: a record as its class and its fields."""
    if is_dataclass(value) or hasattr(value, "_fields"):
        kind = type(value)
        values = value
        if is_dataclass(value):
            values = [getattr(value, field.name) for field in fields(value)]
        return {f"{kind.__module__}:{kind.__qualname__}": [_plain(one) for one in values]}
    return [_plain(one) for one in value] if isinstance(value, tuple) else value


def _rebuilt(value: Any) -> Any:
    """Turn it back; records are cumla's own, whatever the text says."""
    if isinstance(value, dict):
        ((name, values),) = value.items()
        module, _, kind = name.partition(":")
        found: Any = None
        if module == spec.__name__:
            found = spec.SPECS[kind].Options
        elif module.startswith("cumla."):
            found = getattr(import_module(module), kind)
        if not isinstance(found, type) or not (is_dataclass(found) or hasattr(found, "_fields")):
            raise CumlaError(f"the program names {name}, which is no record of cumla's")
        return found(*map(_rebuilt, values))
    return tuple(map(_rebuilt, value)) if isinstance(value, list) else value
