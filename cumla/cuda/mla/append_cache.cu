// SPDX-License-Identifier: Apache-2.0
// Appends rows of 512 latent and 64 RoPE columns, or of other widths, to a paged cache. On request it converts them,
// rotates them, and rotates the RoPE columns of queries in the same launch.
//
// grid = (row tiles + query tiles, kv heads, slices of 512 latent columns), 288 threads. A row tile is 16 tokens of one
// kv head.
//
// Roles and time line of a row tile:
//   warps 0-7   load latent columns (64 threads a row, 4 rows at a time) | B | store them
//   warps 0-3   with rotation also: load RoPE columns, copy cosines and sines | B | rotate, store
//   warp 8      look up slots; without rotation also load RoPE columns | B | store them
// In a query tile each warp rotates 16 heads of one token.
//
// Barriers: B is one __syncthreads of all 288 threads. It guards the offsets that warp 8 writes and all warps read.
// There are no mbarriers; each rotating warp waits for its own cp.async copies, then __syncwarp.
//
// Budget: a CTA has 18 KiB of loads in flight, and 4 CTAs fit on an SM: at most 56 registers per thread. With float32
// rows these are 36 KiB, 3 CTAs and 72 registers. Shared memory: 4.3 KB.
#include "mla/append_rows.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"

namespace cumla::mla {

using namespace ptx;
using namespace rows;

template <typename T, typename Element>
__device__ __forceinline__ void store_copied(char* cache, const i64* offsets, const Octet<Element> (&octets)[kAtOnce],
                                             int count, int begin = 0) {
  const auto [first, octet] = copied_share();
#pragma unroll
  for (int k = 0; k < kAtOnce; ++k) {
    const i64 offset = offsets[first + kAbreast * k];
    if (offset >= 0 && octet < count) store(cache + offset, begin + octet, octets[k].template packed<T>());
  }
}

template <typename T, typename Element, typename Columns>
__device__ __forceinline__ void append_rows(const AppendCacheParams& p, const Columns& columns) {
  __shared__ i64 latent_offsets[kTileRows], rope_offsets[kTileRows];  // in the caches; negative: the row is skipped
  __shared__ alignas(16) char table_rows[kTileRows * kTableRowBytes];
  const i64 tile = static_cast<i64>(blockIdx.x) * kTileRows;
  const bool looks_up = threadIdx.x >= kLatentThreads;
  Held<Element> held = {};
  if (looks_up) {
    if (p.cos_sin == nullptr && copied_share().octet < columns.rope) load_copied(p, p.rope_rows, tile, held.copied);
    const int row = threadIdx.x % kTileRows;
    const bool is_latent = threadIdx.x % 32 < kTileRows;
    const Pages& cache = is_latent ? p.latent_cache : p.rope_cache;
    const Slot slot = slot_of(p, tile + row, load_given(p, tile));
    (is_latent ? latent_offsets : rope_offsets)[row] =
        slot.page < 0 ? -1 : cache.offset(slot.page, slot.row, blockIdx.y);
  } else {
    load_rows(p, tile, held, table_rows, columns);
  }
  __syncthreads();

  if (!looks_up)
    store_copied<T>(p.latent_cache.data, latent_offsets, held.copied, columns.latent, columns.first);
  else if (p.cos_sin == nullptr)
    store_copied<T>(p.rope_cache.data, rope_offsets, held.copied, columns.rope);
  if (columns.rope == 0 || threadIdx.x >= kRopeThreads || p.cos_sin == nullptr) return;
  const auto [row, octet] = rotated_share(columns);
  const i64 offset = rope_offsets[row];
  const uint4 words = rotate_rope<T>(p, held.rotated, table_rows, columns).template packed<T>();
  if (offset >= 0 && stores_rotated(columns)) store(p.rope_cache.data + offset, octet, words);
}

template <typename T, typename Element>
__device__ __forceinline__ void append_cache(const AppendCacheParams& p) {
  grid_dependency_launch();
  grid_dependency_wait();
  if (blockIdx.x < p.row_tiles)
    append_rows<T, Element>(p, FixedColumns<>());
  else
    rotate_queries_by_pairs<T>(p);
}

struct AppendWidthParams : AppendCacheParams {
  Octets octets;
};

template <typename T, typename Element>
__device__ __forceinline__ void append_cache(const AppendWidthParams& p) {
  grid_dependency_launch();
  grid_dependency_wait();
  if (blockIdx.x < p.row_tiles)
    append_rows<T, Element>(p, columns_of_slice(p.octets));
  else
    rotate_queries<T>(p, p.octets);
}

}  // namespace cumla::mla
