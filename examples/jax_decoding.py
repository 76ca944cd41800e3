# SPDX-License-Identifier: Apache-2.0
"""JAX, compiled: a loop of decoding steps inside `jax.jit`, with a cache that is donated."""

import functools

import jax
import jax.numpy as jnp

import cumla
import cumla.jax

SCALE = 192**-0.5
LAYERS, BATCH, HEADS, PAGES, STEPS = 2, 4, 16, 32, 8


@functools.partial(jax.jit, donate_argnums=0)
def decode(caches: jax.Array, q: jax.Array, block_table: jax.Array, kv_lens: jax.Array) -> tuple:
    """Decode so many steps; the caches of all layers are written where they are."""

    def step(carry: tuple, _: None) -> tuple:
        caches, q, kv_lens = carry
        at = {"batch_indices": jnp.arange(BATCH), "positions": kv_lens, "block_table": block_table}
        plan = cumla.jax.MLADecodePlan.from_arrays(q, caches[0]).update(kv_lens + 1)
        written = []
        for cache in caches:
            cache = cumla.jax.append_mla_cache(q[:, 0, 0], cache, **at)
            (out, _), plan = plan.run(q, cache, block_table, softmax_scale=SCALE)
            q = q.at[..., :512].add(out)
            written.append(cache)
        return (tuple(written), q / 2, kv_lens + 1), q

    return jax.lax.scan(step, (caches, q, kv_lens), None, length=STEPS)


def main() -> None:
    """Decode twice: the caches stay where they are."""
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (BATCH, 1, HEADS, 576), jnp.bfloat16)
    caches = tuple(jnp.zeros((PAGES, 64, 576), jnp.bfloat16) for _ in range(LAYERS))
    block_table = jax.random.permutation(keys[1], PAGES).astype(jnp.int32).reshape(BATCH, -1)
    kv_lens = jnp.array([0, 60, 1, 200], jnp.int32)

    places = [cache.unsafe_buffer_pointer() for cache in caches]
    for _ in range(2):
        (caches, q, kv_lens), outs = decode(caches, q, block_table, kv_lens)
    last = cumla.mla_decode(q, caches[0], block_table, kv_lens, softmax_scale=SCALE)  # no jit
    print("lengths:", kv_lens, "outputs:", outs.shape, "lse:", last.lse.shape)
    if [cache.unsafe_buffer_pointer() for cache in caches] != places:
        raise SystemExit("a donated cache must stay where it is")


if __name__ == "__main__":
    main()
