// SPDX-License-Identifier: Apache-2.0
// Writes rows into a paged cache of 512 latent and 64 RoPE columns, converted and rotated where that is asked for, and
// rotates the RoPE columns of queries beside them.
//
// grid = (row tiles + query tiles, kv heads), 288 threads. A row tile is 16 tokens of one kv head: four rows abreast, 64
// threads for the latent columns of each; the first four warps hold the RoPE columns of four rows each, too, and rotate them.
// The rows are on their way before anybody knows where they go: that is looked up once a row, by the ninth warp, while they
// come, and so are cosines and sines, by the warps that rotate. In a query tile each warp takes 16 heads of one token.
//
// In flight: 4 x 16 B a thread and 16 B of 128, 18 KiB a CTA, four CTAs an SM; from float32 rows 36 KiB, three CTAs. An SM
// needs some 40. Registers: 56, from float32 rows 64 (65,536 / 288 / CTAs in steps of 8). Shared memory: 4.3 KB.
#include "append_rows.cuh"
#include "ptx/copy.cuh"
#include "ptx/sync.cuh"

namespace cumla {

// Where a row goes, from the beginning of the cache; latent is negative if it goes nowhere.
struct Target {
  i64 latent, rope;

  __device__ __forceinline__ bool exists() const { return latent >= 0; }
};

__device__ __forceinline__ Target find_target(const AppendCacheParams& p, i64 token, const Given& given, int head) {
  const Place place = find_place(p, token, given);
  if (place.page < 0) return {-1, -1};
  return {p.latent_cache.offset(place.page, place.row, head), p.rope_cache.offset(place.page, place.row, head)};
}

template <typename T, bool kFloatRows>
__device__ __forceinline__ void append_rows(const AppendCacheParams& p) {
  __shared__ Target targets[kTileRows];
  __shared__ alignas(16) char table_rows[kTileRows * kTableRowBytes];
  const i64 tile = static_cast<i64>(blockIdx.x) * kTileRows;
  const int lane = threadIdx.x % 32;
  const bool looks_up = threadIdx.x >= kLatentThreads;
  Held<T, kFloatRows> held;
  if (looks_up) {
    const Given given = load_given(p, tile);
    if (lane < kTileRows) targets[lane] = find_target(p, tile + lane, given, blockIdx.y);
  } else {
    load_rows(p, tile, held, table_rows);
  }
  __syncthreads();
  if (looks_up) return;

  const auto [first, chunk] = latent_share();
#pragma unroll
  for (int k = 0; k < kAtOnce; ++k) {
    const Target& target = targets[first + kAbreast * k];
    if (target.exists()) store(p.latent_cache.data + target.latent, chunk, held.latent[k].packed());
  }
  if (threadIdx.x >= kRopeThreads) return;
  const auto [row, rope_chunk] = rope_share();
  const Target target = targets[row];
  const uint4 rope = p.cos_sin == nullptr ? held.rope.packed() : rotate_rope(p, held.rope, table_rows).packed();
  if (target.exists()) store(p.rope_cache.data + target.rope, rope_chunk, rope);
}

template <typename T, bool kFloatRows>
__device__ __forceinline__ void append_cache(const AppendCacheParams& p) {
  grid_dependency_launch();
  grid_dependency_wait();
  if (blockIdx.x < p.row_tiles)
    append_rows<T, kFloatRows>(p);
  else if (p.interleaved)
    rotate_queries<T, true>(p);
  else
    rotate_queries<T, false>(p);
}

}  // namespace cumla
