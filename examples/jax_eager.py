# SPDX-License-Identifier: Apache-2.0
"""JAX, eagerly: results are new JAX arrays. `jax_decoding.py` compiles the calls."""

import jax
import jax.numpy as jnp

import cumla

SCALE = 192**-0.5


@jax.jit
def project(out: jax.Array, weight: jax.Array) -> jax.Array:
    """Do something of the model's own under `jit`."""
    return jnp.einsum("bshl,hlv->bshv", out.astype(jnp.float32), weight)


def main() -> None:
    """Attend, then go on in compiled JAX."""
    batch, heads, pages = 4, 16, 32
    keys = jax.random.split(jax.random.key(0), 4)
    q = jax.random.normal(keys[0], (batch, 1, heads, 576), jnp.bfloat16)
    kv_cache = jax.random.normal(keys[1], (pages, 64, 576), jnp.bfloat16)
    block_table = jax.random.permutation(keys[2], pages).astype(jnp.int32).reshape(batch, -1)
    kv_lens = jnp.array([500, 64, 1, 0], jnp.int32)
    weight = jax.random.normal(keys[3], (heads, 512, 128))

    out, lse = cumla.mla_decode(q, kv_cache, block_table, kv_lens, softmax_scale=SCALE)
    result = project(out, weight)
    print(type(result).__name__, result.shape, "lse of the empty request:", lse[3, 0, 0])
    if float(jnp.abs(result[3]).max()) != 0.0 or not jnp.isneginf(lse[3]).all():
        raise SystemExit("a request without tokens must have out 0 and lse -inf")


if __name__ == "__main__":
    main()
