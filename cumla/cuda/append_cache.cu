// SPDX-License-Identifier: Apache-2.0
// Writes rows into a paged cache of 512 latent and 64 RoPE columns, converted and rotated where that is asked for, and
// rotates the RoPE columns of queries beside them.
//
// grid = (row tiles + query tiles, kv heads), 288 threads. A row tile is 16 tokens of one kv head: four rows abreast, 64
// threads for the latent columns of each, and the ninth warp for the RoPE columns of all four. The rows are on their way
// before anybody knows where they go: that is looked up once a row, by the ninth warp, while they come, and so are the
// cosines and sines of all 16. In a query tile each warp takes 16 heads of one token.
//
// In flight: 4 x 16 B a thread, 18 KiB a CTA, four CTAs an SM; from float32 rows 36 KiB, three CTAs. An SM needs some 40.
// Registers: 56, from float32 rows 72 (65,536 / 288 / CTAs in steps of 8). Shared memory: 4.3 KB.
#include "append_rows.cuh"
#include "ptx/copy.cuh"
#include "ptx/sync.cuh"

namespace cumla {

constexpr int kTableRowBytes = 64 * 4;

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

// By the warp that holds the RoPE columns: the table's rows for the positions of its lanes 0 to 15 are on their way to
// shared memory, all at once, for which there are not enough registers. Two lanes bring a row, 32 bytes at a time.
__device__ __forceinline__ void fetch_table_rows(const AppendCacheParams& p, i64 position, char* rows) {
  const int lane = threadIdx.x % 32, row = lane / 2, piece = lane % 2 * 16;
  const i64 of_row = __shfl_sync(0xffffffffu, position, row);
  if (!has_rotation(p, of_row)) return;
  const u32 to = shared_address(rows + row * kTableRowBytes + piece);
  const char* const from = table_row(p, of_row) + piece;
  const int nbytes = p.cos_sin_is_float ? kTableRowBytes : kTableRowBytes / 2;
#pragma unroll
  for (int at = 0; at < kTableRowBytes; at += 32)
    if (at < nbytes) copy_16_async(to + at, from + at, true);
}

// By the warp that holds the RoPE columns.
template <typename T, bool kInterleaved, bool kFloat>
__device__ __forceinline__ void store_rotated(const AppendCacheParams& p, const Target* targets, const char* table_rows,
                                              const Chunk<T, kFloat> (&chunks)[kAtOnce], int chunk) {
#pragma unroll
  for (int k = 0; k < kAtOnce; ++k) {
    const Target target = targets[kAbreast * k];
    Rotation rotation = {};
    if (target.exists())
      rotation = find_rotation<T, kInterleaved>(p, table_rows + kAbreast * k * kTableRowBytes, chunk);
    const Chunk<T, true> rotated = rotate<T, kInterleaved>(chunks[k], rotation);
    if (target.exists()) store(p.rope_cache.data + target.rope, chunk, rotated.packed());
  }
}

template <typename T, bool kFloatRows>
__device__ __forceinline__ void append_rows(const AppendCacheParams& p) {
  __shared__ Target targets[kTileRows];
  __shared__ alignas(16) char table_rows[kTileRows * kTableRowBytes];
  Chunk<T, kFloatRows> chunks[kAtOnce] = {};
  const auto [is_latent, first, chunk] = load_share(p, chunks);
  const int lane = threadIdx.x % 32;
  if (!is_latent) {
    const i64 tile = static_cast<i64>(blockIdx.x) * kTileRows;
    const Given given = load_given(p, tile);
    if (p.cos_sin != nullptr) fetch_table_rows(p, given.position, table_rows);
    if (lane < kTileRows) targets[lane] = find_target(p, tile + lane, given, blockIdx.y);
  }
  __syncthreads();

  if (is_latent || p.cos_sin == nullptr) {
    char* const cache = is_latent ? p.latent_cache.data : p.rope_cache.data;
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const Target& target = targets[first + kAbreast * k];
      if (target.exists()) store(cache + (is_latent ? target.latent : target.rope), chunk, chunks[k].packed());
    }
  } else {
    copy_async_wait_all();
    __syncwarp();
    const char* const rows = table_rows + first * kTableRowBytes;
    if (p.interleaved)
      store_rotated<T, true>(p, targets + first, rows, chunks, chunk);
    else
      store_rotated<T, false>(p, targets + first, rows, chunks, chunk);
  }
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
