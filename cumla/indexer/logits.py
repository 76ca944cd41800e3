# SPDX-License-Identifier: Apache-2.0
"""FP8 logits that tell which tokens of a sequence to attend to: :func:`mqa_logits`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast

from cumla import reference
from cumla.core.arguments import INT32, Array, bind, check_layout
from cumla.core.names import arg
from cumla.core.operation import Operation, Output
from cumla.core.paged import Host, Results, refuse_value
from cumla.core.spec import Out, Spec, array, flag, integer
from cumla.indexer.arguments import (
    FLOAT32,
    LOGITS_DTYPE,
    check_e4m3,
    check_sizes,
    checked_pair,
    logits_output,
)
from cumla.launch.device import require_hopper
from cumla.launch.indexer.mqa_logits import MOST_TOKENS, MQALogitsArguments, mqa_logits_launch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cumla.core.arguments import Views
    from cumla.core.arrays import ArrayView
    from cumla.core.operation import Launchable

__all__ = ["mqa_logits"]

_TABLE = {
    "kv[1]": Array("seq_len_kv", FLOAT32),
    "weights": Array("seq_len num_heads", FLOAT32),
    "ks": Array("seq_len", INT32),
    "ke": Array("seq_len", INT32),
}


MQA_LOGITS = Spec(
    "mqa_logits",
    (
        array("q"),
        array("kv", checked_pair, must_split=True),
        array("weights"),
        array("ks"),
        array("ke"),
        integer("max_kv_len", "leave it out for all columns", None),
        LOGITS_DTYPE,
        flag("clean", True),
        Out("out"),
    ),
    positional=5,
    kernels=("mqa_logits_",),
    returns=("out",),
)


@MQA_LOGITS
def mqa_logits(
    q: Any,
    kv: Any,
    weights: Any,
    ks: Any,
    ke: Any,
    *,
    max_kv_len: int | None = None,
    logits_dtype: Any = None,
    clean: bool = True,
    out: Any = None,
    stream: Any = None,
) -> Any:
    """Score the tokens of a sequence for each query: the FP8 indexer's logits of a prefill.

    With ``k, scale = kv`` and the sum over the heads h, ``logit[i, j] = scale[j] *
    sum(weights[i, h] * max(q[i, h] @ k[j], 0))`` for the tokens ``ks[i] <= j < ke[i]``, and -inf
    for all others; one kernel writes both. A product that is NaN counts as 0. Devices and streams
    are as in :func:`cumla.mla_decode`; arrays on the CPU are computed by
    :func:`cumla.reference.mqa_logits`.

    Parameters
    ----------
    q : array
        ``(seq_len, num_heads, head_dim)`` float8_e4m3fn, or uint8 with its bits, of CuPy, PyTorch,
        JAX or NumPy (ml_dtypes). num_heads is 8, 16, 32 or 64, head_dim 32, 64 or 128. Any strides
        that are multiples of 16 bytes, the last axis contiguous.
    kv : pair of arrays
        The keys ``(seq_len_kv, head_dim)``, as q, and their scales ``(seq_len_kv,)`` float32, of
        any strides. Tokens that no query sees may hold anything, NaN included.
    weights : array
        ``(seq_len, num_heads)`` float32, with q's scale folded in. Any strides.
    ks, ke : array
        ``(seq_len,)`` int32: the first visible token of each query and the one after the last,
        clamped to ``[0, seq_len_kv]``. If ke is not above ks, nothing is visible.
    max_kv_len : int, optional
        Compress the result to this many columns: column c of row i is token ``ks[i] + c``. Later
        tokens are left out.
    logits_dtype : optional
        Of the result: ``"float32"`` or ``"bfloat16"``, or a framework's own object for one of them.
        By default that of `out`, or else float32.
    clean : bool
        Write -inf to columns of tokens that are not visible. Otherwise they are not written, and
        undefined in a new array.
    out : array, optional
        ``(seq_len, seq_len_kv)`` or ``(seq_len, max_kv_len)``, written and returned. Rows are
        contiguous, with any stride between them. Of q's framework; JAX's arrays cannot be written
        to.
    stream : optional
        As in :func:`cumla.mla_decode`.

    Returns
    -------
    array
        The logits, an array of q's framework.

    Raises
    ------
    TypeError, ValueError, CumlaError
        As :func:`cumla.mla_decode`; there are too many keys for one call.

    Notes
    -----
    Formula: DeepSeek-V3.2-Exp, "Boosting Long-Context Efficiency with DeepSeek Sparse Attention",
    section 1. The tensor cores sum the products; all else is float32. The same call gives the same
    bits.

    Examples
    --------
    >>> import numpy as np, cumla
    >>> q, kv = (cumla.quantize_fp8(np.ones(n, np.float32)) for n in ((2, 8, 128), (5, 128)))
    >>> ks, ke = np.array([0, 0], np.int32), np.array([4, 5], np.int32)
    >>> cumla.mqa_logits(q.values, kv, q.scale, ks, ke).shape
    (2, 5)
    """
    return _LOGITS.call(q, kv, weights, ks, ke, max_kv_len, logits_dtype, clean, out, stream)


class _Arguments(NamedTuple):
    q: ArrayView
    k: ArrayView
    others: tuple[ArrayView, ...]  # scales of the keys, weights, ks, ke
    options: Any


class _Logits(Operation[_Arguments, int]):
    """Scores the tokens that each query sees; its key is the number of multiprocessors."""

    trusted = ("ks", "ke")

    def arguments(self, views: Views, options: Any) -> _Arguments:
        q, k = views["q"], views["kv[0]"]
        assert q is not None and k is not None
        check_e4m3("q", q, "(seq_len, num_heads, head_dim)", 3)
        check_e4m3("kv[0]", k, "(seq_len_kv, head_dim)", 2)
        seq_len, num_heads, head_dim = q.shape
        check_sizes("q", num_heads, "q", head_dim)
        if k.shape[1] != head_dim:
            raise ValueError(
                f"{arg('kv[0]')}: needs {arg('q')}'s head_dim {head_dim} as its last axis, got "
                f"shape {k.shape}; pass keys and queries of one model"
            )
        if k.shape[0] > MOST_TOKENS:
            raise ValueError(
                f"{arg('kv[0]')}: needs at most {MOST_TOKENS} keys, got {k.shape[0]}; score them "
                f"in parts"
            )
        if seq_len and options.max_kv_len and not k.shape[0]:
            raise ValueError(
                f"{arg('kv[0]')}: needs at least one token, got shape {k.shape}; skip the call "
                f"where there is nothing to score"
            )
        check_layout("q", q)
        check_layout("kv[0]", k)
        sizes = {"seq_len": seq_len, "num_heads": num_heads, "seq_len_kv": k.shape[0]}
        bind(_TABLE, views, sizes)
        given = cast("dict[str, ArrayView]", views)
        return _Arguments(q, k, tuple([given[name] for name in _TABLE]), options)

    def outputs(self, arguments: _Arguments) -> tuple[Output, ...]:
        options = arguments.options
        shape = (arguments.q.shape[0], options.max_kv_len or arguments.k.shape[0])
        return (logits_output(shape, options.logits_dtype),)

    def key(self, arguments: _Arguments, device: int) -> int:
        return require_hopper(device).sm_count

    def recipe(
        self, key: int, arguments: _Arguments, outs: Sequence[ArrayView], buffer: int
    ) -> Sequence[Launchable]:
        (out,) = outs
        if 0 in out.shape or 0 in arguments.k.shape:
            return ()
        views = MQALogitsArguments._make((arguments.q, arguments.k, *arguments.others, out))
        compressed, clean = arguments.options.max_kv_len is not None, arguments.options.clean
        return (mqa_logits_launch(views, compressed=compressed, clean=clean, sm_count=key),)

    def check_values(self, host: Host, arguments: _Arguments) -> None:
        most = arguments.k.shape[0]
        need = f"a number from 0 to seq_len_kv = {most}"
        for name in ("ks", "ke"):
            wrong = (host[name] < 0) | (host[name] > most)
            refuse_value(name, host[name], wrong, need, "the kernel would clamp it")

    def reference(self, host: Host, arguments: _Arguments) -> Results:
        given: dict[str, Any] = {n: array for n, array in host.items() if not n.startswith("kv[")}
        given |= arguments.options._asdict()
        logits = reference.mqa_logits(kv=(host["kv[0]"], host["kv[1]"]), **given)
        return (logits,)


_LOGITS = _Logits(MQA_LOGITS)
