# SPDX-License-Identifier: Apache-2.0
"""JAX, compiled: decoding steps whose caches are donated, so that XLA can replay a CUDA graph."""

import functools

import jax
import jax.numpy as jnp

import cumla
import cumla.jax

SCALE = 192**-0.5
LAYERS, BATCH, HEADS, PAGES, STEPS = 2, 4, 16, 32, 8


@functools.partial(jax.jit, donate_argnums=(0, 1, 3))
def step(caches: tuple, q: jax.Array, block_table: jax.Array, kv_lens: jax.Array) -> tuple:
    """Decode a step; everything that changes is written where it is.

    So no address changes from step to step, and on a GPU XLA captures the launches at the second
    step and replays them from the third on. Layers are unrolled: XLA does not capture loops.
    """
    at = {"batch_indices": jnp.arange(BATCH), "positions": kv_lens, "block_table": block_table}
    plan = cumla.jax.MLADecodePlan.from_arrays(q, caches[0]).update(kv_lens + 1)
    written = []
    for cache in caches:
        cache = cumla.jax.append_mla_cache(q[:, 0, 0], cache, **at)
        (out, _), plan = plan.run(q, cache, block_table=block_table, softmax_scale=SCALE)
        q = q.at[..., :512].add(out)
        written.append(cache)
    return tuple(written), q / 2, kv_lens + 1


def main() -> None:
    """Decode: the caches stay where they are."""
    keys = jax.random.split(jax.random.key(0), 2)
    q = jax.random.normal(keys[0], (BATCH, 1, HEADS, 576), jnp.bfloat16)
    caches = tuple(jnp.zeros((PAGES, 64, 576), jnp.bfloat16) for _ in range(LAYERS))
    block_table = jax.random.permutation(keys[1], PAGES).astype(jnp.int32).reshape(BATCH, -1)
    kv_lens = jnp.array([0, 60, 1, 200], jnp.int32)

    places = [cache.unsafe_buffer_pointer() for cache in caches]
    for _ in range(STEPS):
        caches, q, kv_lens = step(caches, q, block_table, kv_lens)
    last = cumla.mla_decode(q, caches[0], block_table, kv_lens, softmax_scale=SCALE)  # no jit
    print("lengths:", kv_lens, "outputs:", q.shape, "lse:", last.lse.shape)
    if [cache.unsafe_buffer_pointer() for cache in caches] != places:
        raise SystemExit("a donated cache must stay where it is")


if __name__ == "__main__":
    main()
