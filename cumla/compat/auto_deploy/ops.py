# SPDX-License-Identifier: Apache-2.0
"""The functions as operations of PyTorch, for torch.compile and torch.export."""

from __future__ import annotations

import inspect
from typing import Any

from cumla.compat._torch import import_torch
from cumla.compat.auto_deploy import functions

__all__ = ["register"]

_TYPES = {"Tensor | None": "Tensor?", "list[Tensor]": "Tensor[]", "int": "SymInt"}
_TYPES |= {"float | None": "float?"}
_WRITTEN = {"k_cache": "Tensor(a!)", "v_cache": "Tensor(b!)"}
_libraries: dict[tuple[str, str], Any] = {}  # namespace, operation; they live as long as these


def _fake_attention(q: Any, *arguments: Any) -> Any:
    """Return q's tokens with the columns of v_cache in each head."""
    *_, k_cache, v_cache, _ = arguments
    heads = q.shape[2] if len(q.shape) == 4 else q.shape[2] // k_cache.shape[3]
    return q.new_empty((*q.shape[:2], heads * v_cache.shape[3]))


def _fake_rope(x: Any, *_: Any) -> Any:
    return x.new_empty(x.shape)


def _fake_sdpa(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> Any:
    return query.new_empty((*query.shape[:-1], value.shape[-1]))


# Functions that make the result of an operation without values. Metadata follow from shapes alone.
_FAKES = {"fused": _fake_attention, "apply": _fake_rope, "scaled": _fake_sdpa}


def _schema(name: str) -> str:
    """Write the schema of a function from its signature."""
    signature = inspect.signature(getattr(functions, name))
    arguments = [
        f"{_WRITTEN.get(p.name) or _TYPES.get(p.annotation, p.annotation)} {p.name}"
        + ("" if p.default is p.empty else f"={p.default}")
        for p in signature.parameters.values()
    ]
    result = signature.return_annotation
    return f"{name}({', '.join(arguments)}) -> {_TYPES.get(result, result)}"


def register(namespace: str = "cumla", rope_namespace: str | None = None) -> None:
    """Register the functions as operations of PyTorch, ``torch.ops.<namespace>.<function>``.

    The two of rotary embedding go to rope_namespace, `namespace` by default; AutoDeploy has
    ``"attention"`` and ``"rope"``. torch.compile and torch.export take them into their graphs; no
    gradients flow. A second call with the same names does nothing. `ValueError` if an operation of
    that name exists, such as an imported TensorRT-LLM's; then nothing is registered.

    Examples
    --------
    >>> import torch
    >>> from cumla.compat import auto_deploy
    >>> auto_deploy.register()
    >>> x, freqs_cis = torch.ones(1, 3, 2, 16).half(), torch.ones(8, 8, 2)
    >>> torch.ops.cumla.apply_rope_with_input_pos(x, freqs_cis, None, "bsnd").shape
    torch.Size([1, 3, 2, 16])
    """
    torch = import_torch()
    spaces = {False: namespace, True: rope_namespace or namespace}
    wanted = [(spaces[name.startswith("apply_rope")], name) for name in functions.__all__]
    new = [key for key in wanted if key not in _libraries]
    for space, name in new:
        if hasattr(getattr(torch.ops, space), name):
            raise ValueError(
                f"namespace: needs one in which {name} is free, got {space!r}, where it is "
                f"registered already; pass another"
            )
    for space, name in new:
        library = torch.library.Library(space, "FRAGMENT")
        library.define(_schema(name))
        library.impl(name, getattr(functions, name), "CompositeExplicitAutograd")
        fake = _FAKES.get(name.partition("_")[0], getattr(functions, name))
        torch.library.register_fake(f"{space}::{name}", fake, lib=library)
        _libraries[space, name] = library
