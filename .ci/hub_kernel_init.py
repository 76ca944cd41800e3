# SPDX-License-Identifier: Apache-2.0
"""cumla as a kernel of Hugging Face: attention as Transformers calls it, and the package `cumla`.

Modules of cumla import each other by that name. So the first folder that is loaded becomes `cumla`
in the process. If there is one already it serves, provided that it has the same version.

Both functions are those of FlashAttention-3 with sinks, `s_aux`, and with the differences of
`cumla.compat.vllm_flash_attn`. `dropout_p` must be 0; `deterministic` is ignored: all results are.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["cumla", "flash_attn_func", "flash_attn_varlen_func"]

_VERSION = "@VERSION@"  # of the folder's cumla
_FOLDER = str(Path(__file__).parent)

for _name in ("numpy", "ml_dtypes"):
    if find_spec(_name) is None:
        raise ImportError(
            f"{_name}: needs to be installed, and the package `kernels` does not do that; run the "
            f"command of pip in the kernel's README.md"
        )
sys.path.insert(0, _FOLDER)
try:
    import cumla
finally:
    sys.path.remove(_FOLDER)
if cumla.__version__ != _VERSION:
    raise ImportError(
        f"cumla: this kernel needs version {_VERSION}, got {cumla.__version__}, imported before "
        f"from {cumla.__file__}; install {_VERSION}, or load the kernel in another process"
    )

from cumla.compat import vllm_flash_attn  # noqa: E402


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_k: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    deterministic: bool = False,
    s_aux: torch.Tensor | None = None,
) -> Any:
    """Attend to keys and values that come in rows, one request after the other.

    Example: ``flash_attn_varlen_func(q, k, v, offsets, offsets, causal=True)`` with q of
    ``(tokens, heads, head_dim)``, k and v of ``(tokens, kv_heads, head_dim)``, offsets int32.
    """
    return vllm_flash_attn.flash_attn_varlen_func(
        *(q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k, seqused_k),
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        s_aux=s_aux,
    )


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    deterministic: bool = False,
    s_aux: torch.Tensor | None = None,
) -> Any:
    """Attend in requests that all have the same lengths: ``(batch, tokens, heads, head_dim)``.

    Raises
    ------
    ValueError
        Transformers calls it for a repository whose name does not contain "flash". Transformers
        then passes no mask with a static cache, so the last keys would be taken for written.
    """
    if not torch.compiler.is_compiling():
        _check_name()
    batch, tokens = q.shape[:2]
    offsets = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * tokens
    lens = torch.full((batch,), k.shape[1], dtype=torch.int32, device=k.device)
    out = flash_attn_varlen_func(
        *(q.flatten(0, 1), k, v, offsets, None, tokens, k.shape[1], lens),
        *(softmax_scale, causal, window_size, softcap, dropout_p, deterministic, s_aux),
    )
    return out.unflatten(0, (batch, tokens))


def _check_name() -> None:
    caller = sys.modules.get("transformers.modeling_flash_attention_utils")
    if getattr(caller, "_flash_fn", None) is flash_attn_func:
        name = getattr(caller, "_loaded_implementation", None)
        if isinstance(name, str) and "flash" not in name:
            raise ValueError(
                f'attn_implementation: needs a repository whose name contains "flash", got '
                f"{name!r}; rename the repository, or its key in LOCAL_KERNELS"
            )
