# SPDX-License-Identifier: Apache-2.0
"""Let SGLang import without torchvision, whose published builds need torch with CUDA.

Python runs this at its start, in each process of a server. Whatever is asked of the modules that
stand in is a class that does nothing. `CUMLA_TEST_CALLS` names a file that counts cumla's calls.
"""

from __future__ import annotations

import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class Nothing(type):
    """A class with all attributes."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing(name, (), {})


class StandIn(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return getattr(Nothing, name) if name.startswith("__") else Nothing(name, (), {})


class Finder(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] != "torchvision":
            return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__version__"] = "0.28.0"  # transformers looks at it


sys.meta_path.append(Finder())


def count_calls(path: str) -> None:
    """Write a line for each run of a plan: a process of a server is killed at its end."""
    import cumla

    for name in ("MLADecodePlan", "MLAAttentionPlan", "AttentionPlan"):
        plan = getattr(cumla, name)

        def run(self: Any, *args: Any, _run: Any = plan.run, _name: str = name, **kw: Any) -> Any:
            with open(path, "a") as file:
                file.write(f"{_name}\n")
            return _run(self, *args, **kw)

        plan.run = run


if "CUMLA_TEST_CALLS" in os.environ:
    count_calls(os.environ["CUMLA_TEST_CALLS"])
