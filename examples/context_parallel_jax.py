# SPDX-License-Identifier: Apache-2.0
"""JAX: one request whose cache is cut among all devices of a process, inside `jax.shard_map`.

    python examples/context_parallel_jax.py

A million tokens on GPUs, a short request on CPUs, of which JAX makes several with ``XLA_FLAGS=``
``--xla_force_host_platform_device_count=4``. Needs JAX 0.6 or later.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import cumla
import cumla.jax
from cumla.distributed import ContextParallel

PAGE, HEADS, SCALE = 64, 128, 192**-0.5


def main() -> None:
    """Write and attend to one token, and compare with one device that has the whole cache."""
    devices = jax.devices()
    world = len(devices)
    tokens = 1 << 20 if devices[0].platform == "gpu" else 500
    mesh = jax.sharding.Mesh(np.array(devices), ("ranks",))
    parallel = ContextParallel("ranks", page_size=PAGE)

    # The group's table: entry j is a page number in the cache of rank j % world.
    entries = -(-tokens // PAGE)
    pages = -(-entries // world)
    block_table = (jnp.arange(entries, dtype=jnp.int32) // world)[None]
    kv_lens = jnp.array([tokens], jnp.int32)
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (1, 1, HEADS, 576), jnp.bfloat16)
    row = jax.random.normal(keys[1], (1, 576), jnp.bfloat16)
    ranks = PartitionSpec("ranks")
    shape = (world * pages, PAGE, 576)  # each device holds its pages alone
    fill = jax.jit(
        lambda key: jax.random.normal(key, shape, jnp.bfloat16),
        out_shardings=NamedSharding(mesh, ranks),
    )
    kv_cache = fill(keys[2])

    of_heads = cumla.AttentionState(
        PartitionSpec(None, None, "ranks"), PartitionSpec(None, "ranks")
    )

    @functools.partial(jax.jit, donate_argnums=0)
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(ranks, *[PartitionSpec()] * 4),
        out_specs=(ranks, of_heads),
    )
    def step(
        kv_cache: jax.Array, q: jax.Array, row: jax.Array, table: jax.Array, kv_lens: jax.Array
    ) -> tuple:
        slots = parallel.slots(table, jnp.zeros(1, jnp.int32), kv_lens - 1)
        kv_cache = cumla.jax.append_mla_cache(row, kv_cache, slots)
        own = parallel.pages(kv_lens, table)
        return kv_cache, parallel.attend(cumla.mla_decode, q, kv_cache, *own, softmax_scale=SCALE)

    kv_cache, (out, lse) = step(kv_cache, q, row, block_table, kv_lens)

    one = jax.device_put(kv_cache, devices[0])
    entry = jnp.arange(entries, dtype=jnp.int32)
    table = (entry % world * pages + entry // world)[None]
    whole = cumla.mla_decode(q, one, table, kv_lens, softmax_scale=SCALE)
    expected = np.asarray(whole.out, np.float32)
    error = np.linalg.norm(np.asarray(out, np.float32) - expected) / np.linalg.norm(expected)
    print(f"{world} devices, {tokens} tokens, out {out.shape}: {error:.1e}")
    if error > 1e-2 or not np.allclose(lse, whole.lse, atol=1e-3):
        raise SystemExit("the results differ")


if __name__ == "__main__":
    main()
