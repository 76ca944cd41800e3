# SPDX-License-Identifier: Apache-2.0
"""Rows to FP8, each with its scale: :func:`quantize_fp8`."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from cumla import reference
from cumla.core.arguments import check_dtype, check_layout
from cumla.core.names import arg
from cumla.core.operation import Output
from cumla.core.spec import Out, Spec, array, flag
from cumla.indexer.arguments import E4M3, FLOATS
from cumla.launch.indexer.quantize_fp8 import MOST_AXES, MOST_COLUMNS, merge_axes, quantize_launch
from cumla.launch.kernel import Unplanned
from cumla.reference import QuantizedRows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cumla.core.arguments import Views
    from cumla.core.arrays import ArrayView
    from cumla.core.paged import Host, Results
    from cumla.launch.kernel import Launch

__all__ = ["QuantizedRows", "quantize_fp8"]


QUANTIZE = Spec(
    "quantize_fp8",
    (array("x"), flag("power_of_two_scales", False), Out("out"), Out("scale_out")),
    positional=1,
    kernels=("quantize_fp8_",),
    returns=("out", "scale_out"),
    result=QuantizedRows,
)


@QUANTIZE
def quantize_fp8(
    x: Any,
    *,
    power_of_two_scales: bool = False,
    out: Any = None,
    scale_out: Any = None,
    stream: Any = None,
) -> QuantizedRows:
    """Quantise each row, along the last axis, to e4m3 and one float32 scale.

    The scale is the row's largest magnitude over 448, the largest e4m3 number, and a row is about
    ``values * scale``. Devices and streams are as in :func:`cumla.mla_decode`; arrays on the CPU
    are quantised by :func:`cumla.reference.quantize_fp8`, which gives the same bits and has the
    formulas.

    Parameters
    ----------
    x : array
        ``(..., columns)`` bfloat16, float16 or float32, of CuPy, PyTorch, JAX or NumPy. A multiple
        of 16 columns, up to 8192. Any strides that are multiples of 16 bytes, the last axis
        contiguous.
    power_of_two_scales : bool
        Round each scale up to a power of two, at least 2 ** -13, the first one above 1e-4.
    out : array, optional
        Of the shape of x, float8_e4m3fn or uint8; written and returned. Strides as for x. Must not
        overlap it. Of the framework of x; JAX's arrays cannot be written to.
    scale_out : array, optional
        ``(...)`` float32, with any strides; written and returned.
    stream : optional
        As in :func:`cumla.mla_decode`.

    Returns
    -------
    QuantizedRows
        ``values``, of the shape of x, and ``scale``, of that shape without the last axis, arrays of
        the framework of x. The values are float8_e4m3fn, on the CPU of ml_dtypes where NumPy lacks
        it. New CuPy arrays are uint8 with the same bits, because CuPy does not compute with that
        type.

    Raises
    ------
    TypeError, ValueError, CumlaError
        As :func:`cumla.mla_decode`; x has more non-contiguous axes than a launch takes.

    Notes
    -----
    Infinities count as the largest float32. NaN becomes the NaN 0x7f and changes nothing else in
    its row. Scales are positive, finite and normal, also for rows of zeros.

    Examples
    --------
    >>> import numpy as np, cumla
    >>> cumla.quantize_fp8(np.full((3, 128), 896, np.float32)).scale.tolist()
    [2.0, 2.0, 2.0]
    """
    rows: QuantizedRows = _QUANTIZE.call(x, power_of_two_scales, out, scale_out, stream)
    return rows


_Arguments = tuple["ArrayView", bool]  # x, and whether scales are powers of two


class _Quantize(Unplanned[_Arguments]):
    def arguments(self, views: Views, options: Any) -> _Arguments:
        x = views["x"]
        assert x is not None
        check_dtype("x", x.dtype, FLOATS)
        columns = x.shape[-1] if x.shape else 0
        if columns % 16 or not 0 < columns <= MOST_COLUMNS:
            raise ValueError(
                f"{arg('x')}: needs a last axis of a multiple of 16 columns, up to "
                f"{MOST_COLUMNS}, got shape {x.shape}; pad it with zeros, or cut it into rows"
            )
        check_layout("x", x)
        _check_axes(x, views.get("out"), views.get("scale_out"))
        return x, options.power_of_two_scales

    def outputs(self, arguments: _Arguments) -> tuple[Output, ...]:
        shape = arguments[0].shape
        return Output("out", shape, E4M3), Output("scale_out", shape[:-1], ("float32",), "elements")

    def launches(self, arguments: _Arguments, outs: Sequence[ArrayView]) -> Sequence[Launch]:
        x, power_of_two_scales = arguments
        values, scale = outs
        return () if 0 in x.shape else (quantize_launch(x, values, scale, power_of_two_scales),)

    def reference(self, host: Host, arguments: _Arguments) -> Results:
        outs = {name: host[name] for name in ("out", "scale_out") if name in host}
        return reference.quantize_fp8(host["x"], power_of_two_scales=arguments[1], **outs)


_QUANTIZE = _Quantize(QUANTIZE)


def _check_axes(rows: ArrayView, values: ArrayView | None, scale: ArrayView | None) -> None:
    """Check that a launch holds the axes of the rows; new outputs are contiguous."""
    lead = rows.shape[:-1]
    if 0 in lead:
        return
    for out, axes in ((values, len(lead) + 1), (scale, len(lead))):
        if out is not None and len(out.shape) != axes:  # it will be refused as such
            return
    contiguous = tuple(prod(lead[axis + 1 :]) for axis in range(len(lead)))
    merged = merge_axes(
        lead,
        rows.strides[:-1],
        contiguous if values is None else values.strides[:-1],
        contiguous if scale is None else scale.strides,
    )
    if len(merged) > MOST_AXES:
        raise ValueError(
            f"{arg('x')}: needs at most {MOST_AXES} axes before the last that are not contiguous "
            f"in x, out and {arg('scale_out')} alike, got {len(merged)} in shape {rows.shape}; "
            f"make contiguous copies"
        )
