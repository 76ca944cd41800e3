# SPDX-License-Identifier: Apache-2.0
"""Modules of a server that is not installed, for tests of its plugin."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

PATH = "someone/some-model"
CONFIG = SimpleNamespace(architectures=["SomeForCausalLM"])
MODEL = SimpleNamespace(model_path=PATH, hf_config=CONFIG)  # of SGLang
OF_MODEL = f"; the model is SomeForCausalLM of {PATH}$"  # behind what a plugin refuses


@contextmanager
def standing_in(contents: Mapping[str, Mapping[str, Any]], plugin: str) -> Iterator[None]:
    """Let imports find modules with these contents, and the plugin's modules be loaded anew."""
    real = {name: sys.modules.get(name) for name in contents}
    _forget(plugin)
    for name, values in contents.items():  # others stay that are imported meanwhile, say torch's
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(values)
    try:
        yield
    finally:
        for name, module in real.items():
            del sys.modules[name]
            if module is not None:
                sys.modules[name] = module
        _forget(plugin)


def _forget(plugin: str) -> None:
    """Let a plugin's modules be loaded anew: their bases are those of one stub."""
    for name in [name for name in sys.modules if name.startswith(f"{plugin}.")]:
        del sys.modules[name]
        delattr(sys.modules[plugin], name.rpartition(".")[2])
