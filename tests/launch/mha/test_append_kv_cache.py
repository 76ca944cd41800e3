# SPDX-License-Identifier: Apache-2.0
"""The kernel's own text, run by the CPU, against the reference; all memory is compared."""

from __future__ import annotations

from typing import Any

import pytest

import cumla
from cumla.core import operation as core
from cumla.core.arrays import open_call
from tests.launch.on_host import run_on_host
from tests.launch.structs import parameters
from tests.mha.append_cases import Sample, check, make, samples


def launches_of(function: Any, arguments: dict[str, Any], monkeypatch: Any, module: str) -> Any:
    """What a call would launch, with the addresses of NumPy arrays."""
    found: list[Any] = []

    def run(operation: Any, inputs: Any, outputs: Any, options: Any, stream: Any) -> Any:
        call = open_call(tuple(inputs.items()), tuple(outputs.items()))
        views = dict(zip((*inputs, *outputs), call.views, strict=True))
        checked = operation.arguments(views, options)
        outs = core.checked_outputs(operation, operation.outputs(checked), views, tuple(outputs))
        found.extend(operation.recipe(None, checked, outs, 0))
        return tuple(outputs.values())

    monkeypatch.setattr(f"{module}.run", run)
    function(**arguments)
    monkeypatch.undo()
    return found


@pytest.mark.parametrize("sample", samples(120), ids=lambda s: str(s.seed))
def test_kernel_on_the_host(sample: Sample, monkeypatch: pytest.MonkeyPatch) -> None:
    given, owners = make(sample)
    expected, expected_owners = make(sample)
    cumla.reference.append_kv_cache(**expected)
    for launch in launches_of(cumla.append_kv_cache, given, monkeypatch, "cumla.mha.cache"):
        parameters(launch)  # as many as the kernel's struct has members
        run_on_host(launch)
    for name, owner in owners.items():
        check(owner, expected_owners[name], rotated=sample.table != "none")
