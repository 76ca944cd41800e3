# SPDX-License-Identifier: Apache-2.0
"""The functions that write in place, for arrays that are immutable: the new ones come back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

import cumla
from cumla.core.spec import SPECS, Cache, Instead
from cumla.jax.call import Reference, refuse_outputs

__all__ = ["append_indexer_cache", "append_kv_cache", "append_mla_cache"]


def append_mla_cache(
    rows: Any, kv_cache: Any, slot_mapping: Any = None, *, q_pe: Any = None, **options: Any
) -> Any:
    """Write the latent rows of new tokens into an MLA cache, and return it.

    As :func:`cumla.append_mla_cache`, inside and outside of `jax.jit`. The new cache takes the
    memory of `kv_cache` if that is an intermediate value or was donated (``donate_argnums`` of
    `jax.jit`). Otherwise XLA copies it first, and `kv_cache` keeps its values.

    Parameters
    ----------
    rows, kv_cache, slot_mapping : array, or pair or triple of arrays
        As in :func:`cumla.append_mla_cache`, of JAX.
    q_pe : array, optional
        Queries to rotate; the rotated ones come back.
    **options
        The other arguments of :func:`cumla.append_mla_cache`, all but q_pe_out and stream.

    Returns
    -------
    array, or pair or triple of arrays
        The cache, in the form of `kv_cache`; with `q_pe` a pair of it and the rotated queries.

    Raises
    ------
    TypeError, ValueError
        As :func:`cumla.append_mla_cache`, while tracing.

    Examples
    --------
    >>> import functools, jax, jax.numpy as jnp, cumla.jax
    >>> append = jax.jit(cumla.jax.append_mla_cache, donate_argnums=1)
    >>> kv_cache = jnp.zeros((4, 64, 576), jnp.bfloat16)
    >>> kv_cache = append(jnp.ones((2, 576), jnp.bfloat16), kv_cache, jnp.array([5, 64]))
    >>> jnp.argwhere(kv_cache[..., 0]).tolist()
    [[0, 5], [1, 0]]
    """
    given = {"rows": rows, "kv_cache": kv_cache, "slot_mapping": slot_mapping, "q_pe": q_pe}
    cache, *rotated = _written(cumla.append_mla_cache, given | options)
    return (cache, *rotated) if rotated else cache


def append_kv_cache(
    k: Any,
    v: Any,
    k_cache: Any,
    v_cache: Any,
    slot_mapping: Any = None,
    *,
    q: Any = None,
    **options: Any,
) -> tuple[Any, ...]:
    """Write the keys and values of new tokens into a cache, and return it.

    As :func:`cumla.append_kv_cache`, inside and outside of `jax.jit`; memory as in
    :func:`append_mla_cache`.

    Parameters
    ----------
    k, v, k_cache, v_cache, slot_mapping : array
        As in :func:`cumla.append_kv_cache`, of JAX.
    q : array, optional
        Queries to rotate; the rotated ones come back.
    **options
        The other arguments of :func:`cumla.append_kv_cache`, all but q_out and stream.

    Returns
    -------
    k_cache, v_cache : array
        The caches; with `q` a third array, the rotated queries.

    Raises
    ------
    TypeError, ValueError
        As :func:`cumla.append_kv_cache`, while tracing.

    Examples
    --------
    >>> import jax, jax.numpy as jnp, cumla.jax
    >>> caches = jnp.zeros((2, 8, 16, 4, 64), jnp.bfloat16)
    >>> k = v = jnp.ones((2, 4, 64), jnp.bfloat16)
    >>> k_cache, v_cache = cumla.jax.append_kv_cache(k, v, *caches, jnp.array([3, 16]))
    >>> jnp.argwhere(k_cache[..., 0, 0]).tolist()
    [[0, 3], [1, 0]]
    """
    given = {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, "q": q}
    return _written(cumla.append_kv_cache, given | {"slot_mapping": slot_mapping} | options)


def append_indexer_cache(k: Any, kv_cache: Any, slot_mapping: Any, **options: Any) -> Any:
    """Quantise the indexer keys of new tokens into the pages of a cache, and return it.

    As :func:`cumla.append_indexer_cache`, inside and outside of `jax.jit`; memory as in
    :func:`append_mla_cache`.

    Parameters
    ----------
    k, kv_cache, slot_mapping : array or pair of arrays
        As in :func:`cumla.append_indexer_cache`, of JAX.
    **options
        The other arguments of :func:`cumla.append_indexer_cache`, all but stream.

    Returns
    -------
    array or pair of arrays
        The cache, in the form of `kv_cache`.

    Raises
    ------
    TypeError, ValueError
        As :func:`cumla.append_indexer_cache`, while tracing.

    Examples
    --------
    >>> import jax.numpy as jnp, cumla.jax
    >>> kv_cache = jnp.zeros((4, 64, 1, 132), jnp.uint8)
    >>> k = jnp.ones((2, 128), jnp.bfloat16)
    >>> kv_cache = cumla.jax.append_indexer_cache(k, kv_cache, jnp.array([0, 200]))
    """
    given = {"k": k, "kv_cache": kv_cache, "slot_mapping": slot_mapping}
    (cache,) = _written(cumla.append_indexer_cache, given | options)
    return cache


def _written(function: Callable[..., None], given: dict[str, Any]) -> tuple[Any, ...]:
    """Call a function that writes in place; what it writes to comes back new, in its form."""
    spec = SPECS[function.__name__]
    refuse_outputs({instead.name: given.get(instead.name) for instead in spec.rows(Instead)})
    names = [cache.name for cache in spec.rows(Cache)]
    names += [other.of for other in spec.rows(Instead) if given.get(other.of) is not None]
    references = {name: jax.tree.map(Reference, given[name]) for name in names}
    function(**given | references)
    return tuple([jax.tree.map(lambda one: one.value, new) for new in references.values()])
