// SPDX-License-Identifier: Apache-2.0
// What the kernels that write rows into paged caches share: the rows and where they go, the rotation of RoPE columns, and
// that of the queries beside them.
#pragma once
#include "ptx/copy.cuh"
#include "ptx/types.cuh"

namespace cumla {

constexpr int kChunk = 8;  // elements that a thread moves at once: 16 bytes in 16 bits each
constexpr int kLatentChunks = 512 / kChunk;
constexpr int kRopeChunks = 64 / kChunk;
constexpr int kAbreast = 32 / kRopeChunks;  // rows whose RoPE columns one warp holds
constexpr int kAtOnce = 4;                  // chunks of a thread, in flight
constexpr int kTileRows = kAbreast * kAtOnce;
constexpr int kLatentThreads = kAbreast * kLatentChunks;
constexpr int kRopeThreads = kTileRows * kRopeChunks;
constexpr int kAppendWarps = kLatentThreads / 32 + 1;
constexpr int kTableRowBytes = 64 * 4;  // at most

// Strides are bytes everywhere.
struct Rows {
  char* data;
  i64 stride_token, stride_head;
};

struct Pages {
  char* data;
  i64 stride_page, stride_row, stride_head;

  __device__ __forceinline__ i64 offset(i64 page, i64 row, int head) const {
    return page * stride_page + row * stride_row + head * stride_head;
  }
};

struct Indices {
  const char* data;  // null: not given
  i64 stride;
  i64 is_wide;  // 64 bits each, else 32

  __device__ __forceinline__ i64 operator[](i64 i) const {
    const char* const at = data + i * stride;
    return is_wide ? *reinterpret_cast<const i64*>(at) : *reinterpret_cast<const i32*>(at);
  }
};

struct AppendCacheParams {
  Rows latent_rows, rope_rows;
  Pages latent_cache, rope_cache;
  Indices slots;                      // or, where they are not given:
  Indices batch_indices;              // the request of each token
  Indices positions;                  // where in its request; the angle of the rotation, too
  const char* page_numbers;           // i32: a table of num_entries columns, or a list of num_entries for all requests
  i64 page_numbers_stride_request;    // 0: a list
  i64 page_numbers_stride;
  Indices page_list_bounds;           // [batch + 1]: of each request's entries in the list
  const char* cos_sin;                // [max_position][32 cosines | 32 sines]; null: nothing is rotated
  i64 cos_sin_stride;
  Rows queries, queries_out;          // null: none
  i64 tokens, num_pages, page_size, batch, num_entries, max_position, row_tiles, num_heads;
  int cos_sin_is_float;  // else of the cache's type
  int interleaved;       // pairs are (2 i, 2 i + 1), else (i, i + 32)
};

// Eight neighbouring elements of a row: as stored in the cache, or float32.
template <typename T, bool kFloat>
struct Chunk;

template <typename T>
struct Chunk<T, false> {
  uint4 words;

  __device__ __forceinline__ void load(const char* row, int chunk) {
    words = load_global_16(reinterpret_cast<const uint4*>(row) + chunk);
  }
  __device__ __forceinline__ float2 pair(int i) const {
    return unpack_pair<T>(i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w);
  }
  __device__ __forceinline__ uint4 packed() const { return words; }
};

template <typename T>
struct Chunk<T, true> {
  float4 low, high;

  __device__ __forceinline__ void load(const char* row, int chunk) {
    low = load_global_16(reinterpret_cast<const float4*>(row) + 2 * chunk);
    high = load_global_16(reinterpret_cast<const float4*>(row) + 2 * chunk + 1);
  }
  __device__ __forceinline__ float2 pair(int i) const {
    return i == 0 ? float2{low.x, low.y} : i == 1 ? float2{low.z, low.w} : i == 2 ? float2{high.x, high.y}
                                                                                  : float2{high.z, high.w};
  }
  __device__ __forceinline__ uint4 packed() const {
    return {pack_pair<T>(low.x, low.y), pack_pair<T>(low.z, low.w), pack_pair<T>(high.x, high.y),
            pack_pair<T>(high.z, high.w)};
  }
};

__device__ __forceinline__ void store(char* row, int chunk, const uint4& words) {
  reinterpret_cast<uint4*>(row)[chunk] = words;
}

__device__ __forceinline__ const char* table_row(const AppendCacheParams& p, i64 position) {
  return p.cos_sin + position * p.cos_sin_stride;
}

// Four neighbouring numbers of a row of the table.
template <typename T>
__device__ __forceinline__ float4 table_entries(const AppendCacheParams& p, const char* row, int column) {
  if (p.cos_sin_is_float) return *reinterpret_cast<const float4*>(row + 4 * column);
  const uint2 words = *reinterpret_cast<const uint2*>(row + 2 * column);
  const float2 low = unpack_pair<T>(words.x), high = unpack_pair<T>(words.y);
  return {low.x, low.y, high.x, high.y};
}

// Element e of a chunk becomes cos[e] * element + sin[e] * partner: signs are in the sines.
struct Rotation {
  float cos[kChunk], sin[kChunk];
};

template <typename T, bool kInterleaved>
__device__ __forceinline__ Rotation find_rotation(const AppendCacheParams& p, const char* table_row, int chunk) {
  if (kInterleaved) {
    const float4 cos = table_entries<T>(p, table_row, 4 * chunk), sin = table_entries<T>(p, table_row, 32 + 4 * chunk);
    return {{cos.x, cos.x, cos.y, cos.y, cos.z, cos.z, cos.w, cos.w},
            {-sin.x, sin.x, -sin.y, sin.y, -sin.z, sin.z, -sin.w, sin.w}};
  }
  Rotation rotation;
  const float sign = chunk < kRopeChunks / 2 ? -1.0f : 1.0f;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int column = chunk % (kRopeChunks / 2) * kChunk + 4 * half;
    const float4 cos = table_entries<T>(p, table_row, column), sin = table_entries<T>(p, table_row, 32 + column);
    const float cosines[4] = {cos.x, cos.y, cos.z, cos.w}, sines[4] = {sin.x, sin.y, sin.z, sin.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      rotation.cos[4 * half + i] = cosines[i];
      rotation.sin[4 * half + i] = sign * sines[i];
    }
  }
  return rotation;
}

// By a whole warp: the partners of a half-split chunk are four lanes away.
template <typename T, bool kInterleaved, bool kFloat>
__device__ __forceinline__ Chunk<T, true> rotate(const Chunk<T, kFloat>& chunk, const Rotation& rotation) {
  float2 pairs[kChunk / 2];
#pragma unroll
  for (int i = 0; i < kChunk / 2; ++i) {
    const float2 own = chunk.pair(i);
    float2 partner = {own.y, own.x};
    if (!kInterleaved) {
      partner.x = __shfl_xor_sync(0xffffffffu, own.x, kRopeChunks / 2);
      partner.y = __shfl_xor_sync(0xffffffffu, own.y, kRopeChunks / 2);
    }
    pairs[i] = {rotation.cos[2 * i] * own.x + rotation.sin[2 * i] * partner.x,
                rotation.cos[2 * i + 1] * own.y + rotation.sin[2 * i + 1] * partner.y};
  }
  return {{pairs[0].x, pairs[0].y, pairs[1].x, pairs[1].y}, {pairs[2].x, pairs[2].y, pairs[3].x, pairs[3].y}};
}

__device__ __forceinline__ bool has_rotation(const AppendCacheParams& p, i64 position) {
  return position >= 0 && position < p.max_position;
}

// What is given of a token: its position, and its slot, or again its position where there are no slots. Negative: neither.
struct Given {
  i64 position, slot;
};

// By a whole warp, of the tokens of a tile: half of it loads positions, half slots, so that one does not wait for the other.
__device__ __forceinline__ Given load_given(const AppendCacheParams& p, i64 tile) {
  static_assert(2 * kTileRows == 32, "half a warp");
  const int lane = threadIdx.x % 32, row = lane % kTileRows;
  const Indices indices = lane < kTileRows ? p.positions : p.slots;
  i64 own = -1;
  if (tile + row < p.tokens && indices.data != nullptr) own = indices[tile + row];
  const i64 position = __shfl_sync(0xffffffffu, own, row), slot = __shfl_sync(0xffffffffu, own, kTileRows + row);
  return {position, p.slots.data != nullptr ? slot : position};
}

// Where a row goes; page is negative if it goes nowhere. The position counts where something is rotated.
struct Place {
  i64 page, row;
};

__device__ __forceinline__ Place find_place(const AppendCacheParams& p, i64 token, const Given& given) {
  const Place nowhere = {-1, 0};
  const i64 place = given.slot;
  if (place < 0 || (p.cos_sin != nullptr && !has_rotation(p, given.position))) return nowhere;
  i64 page = static_cast<u64>(place) / static_cast<u64>(p.page_size);
  const i64 row = place - page * p.page_size;
  if (p.slots.data == nullptr) {
    const i64 request = p.batch_indices[token];
    if (request < 0 || request >= p.batch) return nowhere;
    i64 first = 0, end = p.num_entries;
    if (p.page_list_bounds.data != nullptr) {
      first = p.page_list_bounds[request];
      end = min(p.page_list_bounds[request + 1], end);
    }
    if (first < 0 || page >= end - first) return nowhere;
    page = *reinterpret_cast<const i32*>(p.page_numbers + request * p.page_numbers_stride_request +
                                         (first + page) * p.page_numbers_stride);
  }
  if (page < 0 || page >= p.num_pages) return nowhere;
  return {page, row};
}

// What a thread of a row tile takes.
struct Share {
  int row, chunk;
};

// As they are: of the latent columns, by the first kLatentThreads, and of RoPE columns that are not rotated, by the last
// warp. The same chunk of row + kAbreast, row + 2 * kAbreast ..., too.
__device__ __forceinline__ Share copied_share() {
  const int thread = threadIdx.x, lane = threadIdx.x % 32;
  if (threadIdx.x < kLatentThreads) return {thread / kLatentChunks, thread % kLatentChunks};
  return {lane / kRopeChunks, lane % kRopeChunks};
}

// Of the RoPE columns to be rotated, by the first kRopeThreads.
__device__ __forceinline__ Share rotated_share() {
  const int thread = threadIdx.x;
  return {thread / kRopeChunks, thread % kRopeChunks};
}

template <typename T, bool kFloat>
struct Held {
  Chunk<T, kFloat> copied[kAtOnce], rotated;
};

__device__ __forceinline__ const char* row_of(const Rows& rows, i64 token) {
  const int head = blockIdx.y;
  return rows.data + token * rows.stride_token + head * rows.stride_head;
}

__device__ __forceinline__ int rows_of_tile(const AppendCacheParams& p, i64 tile) {
  return static_cast<int>(min(p.tokens - tile, static_cast<i64>(kTileRows)));
}

template <typename T, bool kFloat>
__device__ __forceinline__ void load_copied(const AppendCacheParams& p, const Rows& rows, i64 tile,
                                            Chunk<T, kFloat> (&chunks)[kAtOnce]) {
  const auto [first, chunk] = copied_share();
  const char* const row = row_of(rows, tile + first);
#pragma unroll
  for (int k = 0; k < kAtOnce; ++k)
    if (first + kAbreast * k < rows_of_tile(p, tile)) chunks[k].load(row + kAbreast * k * rows.stride_token, chunk);
}

// By the first kLatentThreads. Those that hold RoPE columns to be rotated have the table's row for them brought to shared
// memory, eight lanes a row, for which there are not enough registers; positions come last, since widening them waits for
// them. RoPE columns that are not rotated are left to the last warp: here, behind latent ones, they made copies slower.
template <typename T, bool kFloat>
__device__ __forceinline__ void load_rows(const AppendCacheParams& p, i64 tile, Held<T, kFloat>& held, char* table_rows) {
  load_copied(p, p.latent_rows, tile, held.copied);
  const auto [row, chunk] = rotated_share();
  if (p.cos_sin == nullptr || row >= rows_of_tile(p, tile)) return;  // else one of the first kRopeThreads
  held.rotated.load(row_of(p.rope_rows, tile + row), chunk);
  const i64 position = p.positions[tile + row];
  if (!has_rotation(p, position)) return;
  const u32 to = shared_address(table_rows + row * kTableRowBytes) + 16 * chunk;
  const char* const from = table_row(p, position) + 16 * chunk;
  copy_16_async(to, from, true);
  if (p.cos_sin_is_float) copy_16_async(to + kTableRowBytes / 2, from + kTableRowBytes / 2, true);
}

// By the first kRopeThreads, after load_rows. Of a row whose position has no rotation, numbers without a meaning.
template <typename T, bool kFloat>
__device__ __forceinline__ Chunk<T, true> rotate_rope(const AppendCacheParams& p, const Chunk<T, kFloat>& rope,
                                                      const char* table_rows) {
  const auto [row, chunk] = rotated_share();
  copy_async_wait_all();
  __syncwarp();
  const char* const entries = table_rows + row * kTableRowBytes;
  return p.interleaved ? rotate<T, true>(rope, find_rotation<T, true>(p, entries, chunk))
                       : rotate<T, false>(rope, find_rotation<T, false>(p, entries, chunk));
}

template <typename T, bool kInterleaved>
__device__ __forceinline__ void rotate_queries(const AppendCacheParams& p) {
  const i64 tile = static_cast<i64>(blockIdx.x - p.row_tiles) * gridDim.y + blockIdx.y;
  const u64 item = tile * kAppendWarps + threadIdx.x / 32;
  const u64 head_tiles = (p.num_heads + kTileRows - 1) / kTileRows;
  const i64 token = item / head_tiles;
  if (token >= p.tokens) return;
  const i64 first = (item - token * head_tiles) * kTileRows + threadIdx.x % 32 / kRopeChunks;
  const int chunk = threadIdx.x % kRopeChunks;
  auto row_of = [&](const Rows& queries, int k) {
    return queries.data + token * queries.stride_token + (first + kAbreast * k) * queries.stride_head;
  };

  Chunk<T, false> chunks[kAtOnce] = {};
#pragma unroll
  for (int k = 0; k < kAtOnce; ++k)
    if (first + kAbreast * k < p.num_heads) chunks[k].load(row_of(p.queries, k), chunk);
  const i64 position = p.positions[token];
  if (!has_rotation(p, position)) return;
  const Rotation rotation = find_rotation<T, kInterleaved>(p, table_row(p, position), chunk);
#pragma unroll
  for (int k = 0; k < kAtOnce; ++k) {
    const Chunk<T, true> rotated = rotate<T, kInterleaved>(chunks[k], rotation);
    if (first + kAbreast * k < p.num_heads) store(row_of(p.queries_out, k), chunk, rotated.packed());
  }
}

}  // namespace cumla
