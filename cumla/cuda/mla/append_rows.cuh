// SPDX-License-Identifier: Apache-2.0
// Shared by the kernels that append MLA rows to paged caches: parameters, the slots of rows, rotation of RoPE columns
// and of queries.
#pragma once
#include "rows/elements.cuh"
#include "rows/rope.cuh"
#include "rows/slots.cuh"
#include "ptx/copy.cuh"
#include "ptx/types.cuh"

namespace cumla::mla {

using namespace ptx;
using namespace rows;

constexpr int kRopeDim = 64;
constexpr int kLatentOctets = 512 / kOctet;
constexpr int kRopeOctets = kRopeDim / kOctet;
constexpr int kAbreast = 32 / kRopeOctets;  // rows whose RoPE columns one warp has
constexpr int kAtOnce = 4;                  // octets that a thread loads together
constexpr int kTileRows = kAbreast * kAtOnce;
constexpr int kLatentThreads = kAbreast * kLatentOctets;
constexpr int kRopeThreads = kTileRows * kRopeOctets;
constexpr int kAppendWarps = kLatentThreads / 32 + 1;
constexpr int kTableRowBytes = 64 * 4;  // at most; float32 has the longest

struct AppendCacheParams {
  Rows latent_rows, rope_rows;
  Pages latent_cache, rope_cache;
  Indices slots;                      // null: slots follow from positions, in the pages of the requests
  Indices batch_indices;              // the request of each token
  Indices positions;                  // of the token in its request; also the angle of the rotation
  const char* page_numbers;           // i32: a block table of num_entries columns, or a page list of num_entries
  i64 page_numbers_stride_request;    // 0: a page list
  i64 page_numbers_stride;
  Indices page_list_bounds;           // [batch + 1]: the range of each request in the page list
  const char* cos_sin;                // [max_position][32 cosines | 32 sines]; null: no rotation
  i64 cos_sin_stride;
  Rows queries, queries_out;          // null: no queries
  i64 tokens, num_pages, page_size, batch, num_entries, max_position, row_tiles, num_heads;
  int cos_sin_is_float;  // else it has the dtype of the cache
  int interleaved;       // pairs are (2 i, 2 i + 1), else (i, i + 32)
};

// One warp loads the indices of a tile's tokens. Half of it loads positions, half slots, so that the loads overlap.
__device__ __forceinline__ Given load_given(const AppendCacheParams& p, i64 tile) {
  static_assert(2 * kTileRows == 32, "half a warp");
  const int lane = threadIdx.x % 32, row = lane % kTileRows;
  const Indices indices = lane < kTileRows ? p.positions : p.slots;
  i64 own = -1;
  if (tile + row < p.tokens && indices.data != nullptr) own = indices[tile + row];
  const i64 position = __shfl_sync(0xffffffffu, own, row), slot = __shfl_sync(0xffffffffu, own, kTileRows + row);
  return {position, p.slots.data != nullptr ? slot : position};
}

// The slot of a row. With rotation, a row without a valid position has none.
__device__ __forceinline__ Slot slot_of(const AppendCacheParams& p, i64 token, const Given& given) {
  if (given.slot < 0 || (p.cos_sin != nullptr && !has_rotation(p, given.position))) return {-1, 0};
  return find_slot(p, token, given.slot);
}

// The first row and the octet that a thread of a row tile handles.
struct Share {
  int row, octet;
};

// The part of each row that a CTA writes: latent octets from the first one on, at most kLatentOctets, and RoPE octets.
// A lane has the RoPE octet of its number, or that of a lane before it. Known to the compiler:
template <int kLatent = kLatentOctets, int kRope = kRopeOctets>
struct FixedColumns {
  static constexpr int first = 0, latent = kLatent, rope = kRope;

  __device__ __forceinline__ int rope_octet(int lane) const { return lane % kRope; }
};

// The same at run time; RoPE octets are kRopeOctets, half of them, or none.
struct Columns {
  int first, latent, rope;

  __device__ __forceinline__ int rope_octet(int lane) const { return lane & (rope - 1); }
};

// Columns that are copied: latent columns, by the first kLatentThreads; RoPE columns without rotation, by the last
// warp. A thread also handles the same octet of row + kAbreast, row + 2 * kAbreast, ...
__device__ __forceinline__ Share copied_share() {
  const int thread = threadIdx.x, lane = threadIdx.x % 32;
  if (threadIdx.x < kLatentThreads) return {thread / kLatentOctets, thread % kLatentOctets};
  return {lane / kRopeOctets, lane % kRopeOctets};
}

// RoPE columns that are rotated, by the first kRopeThreads. Of fewer octets, a power of two, several lanes have the
// same one; the first of them stores it.
template <typename Columns>
__device__ __forceinline__ Share rotated_share(const Columns& columns) {
  const int thread = threadIdx.x;
  return {thread / kRopeOctets, columns.rope_octet(thread % kRopeOctets)};
}
template <typename Columns>
__device__ __forceinline__ bool stores_rotated(const Columns& columns) {
  return columns.rope == kRopeOctets || threadIdx.x % kRopeOctets < columns.rope;
}

template <typename Element>
struct Held {
  Octet<Element> copied[kAtOnce], rotated;
};

__device__ __forceinline__ const char* row_of(const Rows& rows, i64 token) {
  const int head = blockIdx.y;
  return rows.data + token * rows.stride_token + head * rows.stride_head;
}

__device__ __forceinline__ int rows_of_tile(const AppendCacheParams& p, i64 tile) {
  return static_cast<int>(min(p.tokens - tile, static_cast<i64>(kTileRows)));
}

template <typename Element>
__device__ __forceinline__ void load_copied(const AppendCacheParams& p, const Rows& rows, i64 tile,
                                            Octet<Element> (&octets)[kAtOnce], int begin = 0) {
  const auto [first, octet] = copied_share();
  const char* const row = row_of(rows, tile + first);
#pragma unroll
  for (int k = 0; k < kAtOnce; ++k)
    if (first + kAbreast * k < rows_of_tile(p, tile)) octets[k].load_early(row + kAbreast * k * rows.stride_token,
                                                                           begin + octet);
}

// Called by the first kLatentThreads. Threads that rotate also copy their row of the cos/sin table to shared memory,
// eight lanes per row, because registers do not suffice. Hazard: positions are loaded last, because widening them to
// 64 bits waits for the load. A row may have fewer octets than it has threads; no octet past them is read.
template <typename Element, typename Columns>
__device__ __forceinline__ void load_rows(const AppendCacheParams& p, i64 tile, Held<Element>& held, char* table_rows,
                                          const Columns& columns) {
  if (copied_share().octet < columns.latent) load_copied(p, p.latent_rows, tile, held.copied, columns.first);
  const auto [row, octet] = rotated_share(columns);
  // The others are among the first kRopeThreads.
  if (columns.rope == 0 || p.cos_sin == nullptr || row >= rows_of_tile(p, tile)) return;
  held.rotated.load_early(row_of(p.rope_rows, tile + row), octet);
  const i64 position = p.positions[tile + row];
  if (!has_rotation(p, position) || !stores_rotated(columns)) return;
  const u32 to = shared_address(table_rows + row * kTableRowBytes) + 16 * octet;
  const char* const from = table_row(p, position) + 16 * octet;
  copy_16_async(to, from, true);
  const int half = 2 * kOctet * columns.rope;
  if (p.cos_sin_is_float) copy_16_async(to + half, from + half, true);
}

template <typename T, int kRope, typename Element>
__device__ __forceinline__ Octet<Fp32> rotate_octet(const AppendCacheParams& p, const Octet<Element>& rope,
                                                    const char* entries, int octet) {
  return p.interleaved ? rotate<kRope, true>(rope, find_rotation<T, kRope, true>(p, entries, octet))
                       : rotate<kRope, false>(rope, find_rotation<T, kRope, false>(p, entries, octet));
}

// Called by the first kRopeThreads, after load_rows. If the position has no rotation, the result is undefined.
template <typename T, typename Element, typename Columns>
__device__ __forceinline__ Octet<Fp32> rotate_rope(const AppendCacheParams& p, const Octet<Element>& rope,
                                                   const char* table_rows, const Columns& columns) {
  const auto [row, octet] = rotated_share(columns);
  copy_async_wait_all();
  __syncwarp();
  const char* const entries = table_rows + row * kTableRowBytes;
  return columns.rope == kRopeOctets ? rotate_octet<T, kRopeDim>(p, rope, entries, octet)
                                     : rotate_octet<T, kRopeDim / 2>(p, rope, entries, octet);
}

template <typename T, bool kInterleaved, int kRope = kRopeDim>
__device__ __forceinline__ void rotate_queries(const AppendCacheParams& p) {
  const i64 tile = static_cast<i64>(blockIdx.x - p.row_tiles) * gridDim.y + blockIdx.y;
  const u64 item = tile * kAppendWarps + threadIdx.x / 32;
  const u64 head_tiles = (p.num_heads + kTileRows - 1) / kTileRows;
  const i64 token = item / head_tiles;
  if (token >= p.tokens) return;
  const i64 first = (item - token * head_tiles) * kTileRows + threadIdx.x % 32 / kRopeOctets;
  const int octet = FixedColumns<0, kRope / kOctet>().rope_octet(threadIdx.x % kRopeOctets);
  auto row_of = [&](const Rows& queries, int k) {
    return queries.data + token * queries.stride_token + (first + kAbreast * k) * queries.stride_head;
  };

  Octet<T> octets[kAtOnce] = {};
#pragma unroll
  for (int k = 0; k < kAtOnce; ++k)
    if (first + kAbreast * k < p.num_heads) octets[k].load_early(row_of(p.queries, k), octet);
  const i64 position = p.positions[token];
  if (!has_rotation(p, position)) return;
  const Rotation rotation = find_rotation<T, kRope, kInterleaved>(p, table_row(p, position), octet);
#pragma unroll
  for (int k = 0; k < kAtOnce; ++k) {
    const Octet<Fp32> rotated = rotate<kRope, kInterleaved>(octets[k], rotation);
    if (first + kAbreast * k < p.num_heads && stores_rotated(FixedColumns<0, kRope / kOctet>()))
      store(row_of(p.queries_out, k), octet, rotated.packed<T>());
  }
}

template <typename T, int kRope = kRopeDim>
__device__ __forceinline__ void rotate_queries_by_pairs(const AppendCacheParams& p) {
  if (p.interleaved)
    rotate_queries<T, true, kRope>(p);
  else
    rotate_queries<T, false, kRope>(p);
}

// Rows of other widths than 512 + 64 have latent columns in multiples of kOctet, and 64, 32 or no RoPE ones.
struct Octets {
  int latent, rope;
};

// A grid has a slice of kLatentOctets latent octets on its z axis; the first one has the RoPE columns, too.
__device__ __forceinline__ Columns columns_of_slice(const Octets& octets) {
  const int first = blockIdx.z * kLatentOctets;
  return {first, min(octets.latent - first, kLatentOctets), blockIdx.z == 0 ? octets.rope : 0};
}

// Queries beside rows of such widths.
template <typename T>
__device__ __forceinline__ void rotate_queries(const AppendCacheParams& p, const Octets& octets) {
  if (blockIdx.z > 0) return;
  if (octets.rope == kRopeOctets)
    rotate_queries_by_pairs<T>(p);
  else
    rotate_queries_by_pairs<T, kRopeDim / 2>(p);
}

}  // namespace cumla::mla
