# SPDX-License-Identifier: Apache-2.0
"""Plans as values: an update gives a plan with a schedule, a run gives the plan back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, Self, TypeVar

import jax

from cumla.blocks import attention as block_attention
from cumla.core.arrays import WORKSPACE, ArrayView
from cumla.core.frameworks import Framework, framework_of_type
from cumla.core.plan import Plan
from cumla.indexer import paged_logits
from cumla.jax.call import buffer_of, emit, gpu, refuse_outputs, refuse_stream, run
from cumla.jax.spec import Buffer, views_of
from cumla.mha import attention as mha_attention
from cumla.mla import attention as mla_attention
from cumla.mla import decode
from cumla.sparse import dsa, mla_sparse

__all__ = [
    "AttentionPlan",
    "BlockSparsePlan",
    "DSAPlan",
    "MLAAttentionPlan",
    "MLADecodePlan",
    "MLASparsePlan",
    "PagedMQALogitsPlan",
]

K = TypeVar("K")
P = TypeVar("P")


class _Shape:
    """An array of which only shape and dtype are looked at."""

    __slots__ = ("dtype", "shape")

    def __init__(self, buffer: Buffer) -> None:
        framework_of_type.setdefault(_Shape, _SHAPES)
        self.shape, self.dtype = buffer.shape, buffer.dtype


class _Shapes(Framework):
    """The framework of shapes, from which plans are made."""

    name = "jax"

    def views(self, named: tuple[tuple[str, Any], ...]) -> list[ArrayView | None]:
        buffers = tuple([Buffer(name, a.dtype, a.shape) for name, a in named])
        return list(views_of(buffers, (), None).values())


_SHAPES = _Shapes()


def _shape(array: Any) -> Any:
    """Turn arrays into their shapes; leave other things alone."""
    if isinstance(array, (tuple, list)):
        return tuple(map(_shape, array))
    has_shape = hasattr(array, "shape") and hasattr(array, "dtype")
    return _Shape(buffer_of("array", array)) if has_shape else array


class _Value(Plan[K], Generic[K]):
    """Base in place of `Plan`: the buffer is an array of the program."""

    _buffer: Any = None  # the schedule; None before the first update
    _held: tuple[Any, ...] = ()  # lengths of the last update, for the CPU
    _held_names: tuple[str, ...] = ()
    _memory = None
    _values = None

    def _make(self, key_on: Callable[[int | None], K], *place: Any) -> None:
        device, workspace, _, stream = place
        refuse_stream(stream)
        for name, value in (("device", device), ("workspace", workspace)):
            if value is not None:
                raise TypeError(
                    f"{name}: needs None for a plan of cumla.jax, whose memory is XLA's, got "
                    f"{type(value).__qualname__}; leave it out"
                )
        self._device = gpu()
        self.key = key_on(self._device)

    def _update(self, inputs: dict[str, Any], stream: Any, *_: Any) -> None:
        refuse_stream(stream)
        nbytes = 0 if self._device is None else self._attend.workspace_bytes(self.key)
        results = emit(self._schedule, inputs, self._batch, lambda _: nbytes, key=self.key)
        self._buffer = results[WORKSPACE]
        self._held_names, self._held = tuple(inputs), tuple(inputs.values())

    def _run(
        self, inputs: Mapping[str, Any], outputs: Mapping[str, Any], *rest: Any
    ) -> tuple[Any, ...]:
        options, stream, *_ = rest
        refuse_stream(stream)
        refuse_outputs(outputs)
        if self._buffer is None:
            raise ValueError(
                f"plan: never updated; call plan = plan.update({self._lengths}) before the run"
            )
        held = dict(zip(self._held_names, self._held, strict=True))
        arrays = {**inputs, **held, WORKSPACE: self._buffer}
        static: Any = {"key": self.key, "absent": tuple(outputs), "keeps_workspace": True}
        results = emit(self._attend, arrays, options, self._checked, **static)
        self._buffer = results.pop(WORKSPACE)
        return tuple(results.values())

    def _checked(self, arguments: Any) -> int:
        """Check the shape; bytes of the buffer."""
        self._check_shape(arguments)
        return int(self._buffer.shape[0])


class _Front:
    """The face of a plan that is a value; in front of the class that checks the arguments."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _is_pytree(cls)

    @classmethod
    def from_arrays(cls, *arrays: Any, **options: Any) -> Self:
        """Make a plan for the shapes of arrays, or of `jax.ShapeDtypeStruct`."""
        named = {name: _shape(value) for name, value in options.items()}
        plan: Self = super().from_arrays(*map(_shape, arrays), **named)  # type: ignore[misc]
        return plan

    def update(self, *lengths: Any, **named: Any) -> Self:
        """Compute the schedule for these lengths: a plan that holds it comes back."""
        plan = _again(self)
        super(_Front, plan).update(*lengths, **named)  # type: ignore[misc]
        return plan

    def run(self, *arrays: Any, **named: Any) -> tuple[Any, Self]:
        """Attend, or score, with the schedule: the results, and the plan for the next layer.

        The plan that comes back has the memory of this one, which XLA copies if both are used.
        """
        plan = _again(self)
        return super(_Front, plan).run(*arrays, **named), plan  # type: ignore[misc]


def _again(plan: P) -> P:
    """Make another value of what a plan holds: callers cannot copy one."""
    other: P = object.__new__(type(plan))
    for name, value in vars(plan).items():
        vars(other)[name] = _again(value) if isinstance(value, Plan) else value
    return other


_ARRAYS = ("_buffer", "_held", "_logits_plan", "_attend_plan", "_row_lens", "indices")


def _flatten(plan: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Tell arrays, and plans that hold some, from what is static."""
    found = vars(plan)
    names = tuple([name for name in _ARRAYS if name in found])
    static = tuple(sorted([(n, v) for n, v in found.items() if n not in _ARRAYS]))
    return tuple([found[name] for name in names]), (names, static)


def _unflatten(cls: type, aux: tuple[Any, ...], arrays: tuple[Any, ...]) -> Any:
    names, static = aux
    plan: Any = object.__new__(cls)
    vars(plan).update(static, **dict(zip(names, arrays, strict=True)))
    return plan


def _is_pytree(cls: type[P]) -> type[P]:
    """Register a class of plans that are values."""
    jax.tree_util.register_pytree_node(cls, _flatten, lambda *what: _unflatten(cls, *what))
    return cls


class MLADecodePlan(_Front, decode.MLADecodePlan, _Value[Any]):  # type: ignore[misc]
    """Schedule of :func:`cumla.mla_decode` as a value, for every layer of a step.

    It is made as :class:`cumla.MLADecodePlan` is, without `device`, `workspace`, `like` and
    `stream`. ``plan.update`` takes what it takes there and returns a plan with the schedule;
    ``plan.run`` returns the results and the plan. A plan is a pytree: an argument and a result of
    functions under `jax.jit`, a carry of `jax.lax.scan`. On the CPU `max_kv_len` cuts nothing off.

    Raises
    ------
    TypeError, ValueError
        As :class:`cumla.MLADecodePlan`, while tracing; a run before the first update.

    Examples
    --------
    >>> import jax, jax.numpy as jnp, cumla.jax
    >>> @jax.jit
    ... def step(q, kv_cache, block_table, kv_lens):
    ...     plan = cumla.jax.MLADecodePlan.from_arrays(q, kv_cache)
    ...     plan = plan.update(kv_lens)
    ...     for layer in range(3):
    ...         (out, lse), plan = plan.run(q, kv_cache, block_table=block_table)
    ...     return out
    >>> q = jnp.ones((2, 1, 16, 576), jnp.bfloat16)
    >>> kv_cache = jnp.ones((4, 64, 576), jnp.bfloat16)
    >>> step(q, kv_cache, jnp.array([[0, 1], [2, 3]]), jnp.array([100, 7])).shape
    (2, 1, 16, 512)
    """


class MLAAttentionPlan(_Front, mla_attention.MLAAttentionPlan, _Value[Any]):  # type: ignore[misc]
    """Schedule of :func:`cumla.mla_attention` as a value.

    To :class:`cumla.MLAAttentionPlan` as :class:`MLADecodePlan` is to its namesake; see there.
    """


class MLASparsePlan(_Front, mla_sparse.MLASparsePlan, _Value[Any]):  # type: ignore[misc]
    """Schedule of :func:`cumla.mla_sparse_decode` and its relatives as a value.

    To :class:`cumla.MLASparsePlan` as :class:`MLADecodePlan` is to its namesake; see there.
    """


class AttentionPlan(_Front, mha_attention.AttentionPlan, _Value[Any]):  # type: ignore[misc]
    """Schedule of :func:`cumla.attention` as a value.

    To :class:`cumla.AttentionPlan` as :class:`MLADecodePlan` is to its namesake; see there.
    """


class BlockSparsePlan(_Front, block_attention.BlockSparsePlan, _Value[Any]):  # type: ignore[misc]
    """Schedule of :func:`cumla.block_sparse_attention` as a value.

    To :class:`cumla.BlockSparsePlan` as :class:`MLADecodePlan` is to its namesake; see there.
    """


class PagedMQALogitsPlan(_Front, paged_logits.PagedMQALogitsPlan, _Value[Any]):  # type: ignore[misc]
    """Schedule of :func:`cumla.paged_mqa_logits` as a value.

    To :class:`cumla.PagedMQALogitsPlan` as :class:`MLADecodePlan` is to its namesake; see there.
    """


@_is_pytree
class _Logits(paged_logits.PagedMQALogitsPlan, _Value[Any]):
    """A part of `DSAPlan` that changes."""


@_is_pytree
class _Attention(dsa.Attention, _Value[Any]):
    """A part of `DSAPlan` that changes."""


class DSAPlan(_Front, dsa.DSAPlan):  # type: ignore[misc]
    """Schedules and selection of a step of DeepSeek Sparse Attention as a value.

    To :class:`cumla.DSAPlan` as :class:`MLADecodePlan` is to its namesake; see there.
    ``plan.select`` returns the indices and a plan that holds them. Keep the plan that each call
    returns; the one before it has no schedule, or no selection.

    Examples
    --------
    >>> import jax, jax.numpy as jnp, cumla, cumla.jax
    >>> @jax.jit
    ... def layer(q, kv_cache, index_q, index_cache, weights, block_table, kv_lens):
    ...     places = {"block_table": block_table}
    ...     plan = cumla.jax.DSAPlan.from_arrays(
    ...         q, kv_cache, index_q, index_cache, topk=32, **places
    ...     )
    ...     plan = plan.update(kv_lens)
    ...     indices, plan = plan.select(index_q, index_cache, weights, **places)
    ...     (out, lse), plan = plan.run(q, kv_cache, **places)
    ...     return out, indices
    >>> index_q, scales = cumla.quantize_fp8(jnp.ones((2, 1, 8, 128), jnp.bfloat16))
    >>> out, indices = layer(
    ...     jnp.ones((2, 1, 16, 576), jnp.bfloat16),
    ...     jnp.ones((4, 64, 576), jnp.bfloat16),
    ...     index_q,
    ...     jnp.zeros((4, 64, 1, 132), jnp.uint8),
    ...     scales.reshape(2, 8),
    ...     jnp.array([[0, 1], [2, 3]]),
    ...     jnp.array([100, 7]),
    ... )
    >>> out.shape, indices.shape
    ((2, 1, 16, 512), (2, 1, 32))
    """

    _Logits = _Logits
    _Attend = _Attention
    _count = staticmethod(run)
    _calls = "plan = plan.update", "indices, plan = plan.select(...)"

    def _place(self, *place: Any) -> dict[str, Any]:
        self._device = gpu()
        return dict(zip(("device", "workspace", "like", "stream"), place[3:], strict=True))

    def select(self, *arrays: Any, **named: Any) -> tuple[Any, Self]:
        """Select the tokens of one layer: their positions, and the plan for its attention."""
        plan = _again(self)
        return dsa.DSAPlan.select(plan, *arrays, **named), plan
