# SPDX-License-Identifier: Apache-2.0
"""What PyTorch would launch on a GPU."""

from __future__ import annotations

from typing import Any

import pytest

Mode = pytest.importorskip("torch.utils._python_dispatch").TorchDispatchMode


class Launches(Mode):  # type: ignore[misc, valid-type]
    """Names of PyTorch's operations that are no views."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **kwargs or {})
