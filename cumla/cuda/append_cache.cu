// SPDX-License-Identifier: Apache-2.0
// Writes rows into a paged cache of 512 latent and 64 RoPE columns, converted and rotated where that is asked for, and
// rotates the RoPE columns of queries beside them.
//
// grid = (row tiles + query tiles, kv heads), 288 threads. A row tile is 16 tokens of one kv head: four rows abreast, 64
// threads for the latent columns of each, and the ninth warp for the RoPE columns of all four. The rows are on their way
// before anybody knows where they go: that is looked up once a row, by the ninth warp, while they come. In a query tile
// each warp takes 16 heads of one token.
//
// In flight: 4 x 16 B a thread, 18 KiB a CTA, four CTAs an SM; from float32 rows 36 KiB, three CTAs. An SM needs some 40.
// Registers: 56, from float32 rows 72 (65,536 / 288 / CTAs in steps of 8). Shared memory: 384 B.
#include "ptx/sync.cuh"
#include "ptx/types.cuh"

namespace cumla {

constexpr int kChunk = 8;  // elements that a thread moves at once: 16 bytes in 16 bits each
constexpr int kLatentChunks = 512 / kChunk;
constexpr int kRopeChunks = 64 / kChunk;
constexpr int kAbreast = 32 / kRopeChunks;  // rows whose RoPE columns one warp holds
constexpr int kAtOnce = 4;                  // chunks of a thread, in flight
constexpr int kTileRows = kAbreast * kAtOnce;
constexpr int kLatentThreads = kAbreast * kLatentChunks;
constexpr int kAppendWarps = kLatentThreads / 32 + 1;

// Strides are bytes everywhere.
struct Rows {
  char* data;
  i64 stride_token, stride_head;
};

struct Pages {
  char* data;
  i64 stride_page, stride_row, stride_head;
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
    words = reinterpret_cast<const uint4*>(row)[chunk];
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
    low = reinterpret_cast<const float4*>(row)[2 * chunk];
    high = reinterpret_cast<const float4*>(row)[2 * chunk + 1];
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

// Four neighbouring numbers of the table's row of a position.
template <typename T>
__device__ __forceinline__ float4 table_entries(const AppendCacheParams& p, i64 position, int column) {
  const char* const row = p.cos_sin + position * p.cos_sin_stride;
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
__device__ __forceinline__ Rotation find_rotation(const AppendCacheParams& p, i64 position, int chunk) {
  if (kInterleaved) {
    const float4 cos = table_entries<T>(p, position, 4 * chunk), sin = table_entries<T>(p, position, 32 + 4 * chunk);
    return {{cos.x, cos.x, cos.y, cos.y, cos.z, cos.z, cos.w, cos.w},
            {-sin.x, sin.x, -sin.y, sin.y, -sin.z, sin.z, -sin.w, sin.w}};
  }
  Rotation rotation;
  const float sign = chunk < kRopeChunks / 2 ? -1.0f : 1.0f;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int column = chunk % (kRopeChunks / 2) * kChunk + 4 * half;
    const float4 cos = table_entries<T>(p, position, column), sin = table_entries<T>(p, position, 32 + column);
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
__device__ __forceinline__ uint4 rotate(const Chunk<T, kFloat>& chunk, const Rotation& rotation) {
  u32 words[kChunk / 2];
#pragma unroll
  for (int i = 0; i < kChunk / 2; ++i) {
    const float2 own = chunk.pair(i);
    float2 partner = {own.y, own.x};
    if (!kInterleaved) {
      partner.x = __shfl_xor_sync(0xffffffffu, own.x, kRopeChunks / 2);
      partner.y = __shfl_xor_sync(0xffffffffu, own.y, kRopeChunks / 2);
    }
    words[i] = pack_pair<T>(rotation.cos[2 * i] * own.x + rotation.sin[2 * i] * partner.x,
                            rotation.cos[2 * i + 1] * own.y + rotation.sin[2 * i + 1] * partner.y);
  }
  return {words[0], words[1], words[2], words[3]};
}

__device__ __forceinline__ bool has_rotation(const AppendCacheParams& p, i64 position) {
  return position >= 0 && position < p.max_position;
}

// Where a row goes, from the beginning of the cache; latent is negative if it goes nowhere. The position counts where
// something is rotated.
struct Target {
  i64 latent, rope, position;

  __device__ __forceinline__ bool exists() const { return latent >= 0; }
};

__device__ __forceinline__ Target find_target(const AppendCacheParams& p, i64 token, int head) {
  Target target = {-1, -1, 0};
  if (token >= p.tokens) return target;
  if (p.positions.data != nullptr) target.position = p.positions[token];
  if (p.cos_sin != nullptr && !has_rotation(p, target.position)) return target;

  const i64 place = p.slots.data != nullptr ? p.slots[token] : target.position;
  if (place < 0) return target;
  i64 page = static_cast<u64>(place) / static_cast<u64>(p.page_size);
  const i64 row = place - page * p.page_size;
  if (p.slots.data == nullptr) {
    const i64 request = p.batch_indices[token];
    if (request < 0 || request >= p.batch) return target;
    i64 first = 0, end = p.num_entries;
    if (p.page_list_bounds.data != nullptr) {
      first = p.page_list_bounds[request];
      end = min(p.page_list_bounds[request + 1], end);
    }
    if (first < 0 || page >= end - first) return target;
    page = *reinterpret_cast<const i32*>(p.page_numbers + request * p.page_numbers_stride_request +
                                         (first + page) * p.page_numbers_stride);
  }
  if (page < 0 || page >= p.num_pages) return target;
  auto offset_in = [&](const Pages& cache) {
    return page * cache.stride_page + row * cache.stride_row + head * cache.stride_head;
  };
  target.latent = offset_in(p.latent_cache);
  target.rope = offset_in(p.rope_cache);
  return target;
}

// By the warp that holds the RoPE columns.
template <typename T, bool kInterleaved, bool kFloat>
__device__ __forceinline__ void store_rotated(const AppendCacheParams& p, const Target* targets,
                                              const Chunk<T, kFloat> (&chunks)[kAtOnce], int chunk) {
#pragma unroll
  for (int k = 0; k < kAtOnce; ++k) {
    const Target target = targets[kAbreast * k];
    Rotation rotation = {};
    if (target.exists()) rotation = find_rotation<T, kInterleaved>(p, target.position, chunk);
    const uint4 words = rotate<T, kInterleaved>(chunks[k], rotation);
    if (target.exists()) store(p.rope_cache.data + target.rope, chunk, words);
  }
}

template <typename T, bool kFloatRows>
__device__ __forceinline__ void append_rows(const AppendCacheParams& p) {
  __shared__ Target targets[kTileRows];
  const int thread = threadIdx.x, head = blockIdx.y;
  const bool is_latent = thread < kLatentThreads;
  const int first = is_latent ? thread / kLatentChunks : thread % 32 / kRopeChunks;
  const int chunk = is_latent ? thread % kLatentChunks : thread % kRopeChunks;
  const i64 tile = static_cast<i64>(blockIdx.x) * kTileRows;
  const Rows& rows = is_latent ? p.latent_rows : p.rope_rows;

  Chunk<T, kFloatRows> chunks[kAtOnce] = {};
#pragma unroll
  for (int k = 0; k < kAtOnce; ++k) {
    const i64 token = tile + first + kAbreast * k;
    if (token < p.tokens) chunks[k].load(rows.data + token * rows.stride_token + head * rows.stride_head, chunk);
  }
  if (!is_latent && thread % 32 < kTileRows) targets[thread % 32] = find_target(p, tile + thread % 32, head);
  __syncthreads();

  if (is_latent || p.cos_sin == nullptr) {
    char* const cache = is_latent ? p.latent_cache.data : p.rope_cache.data;
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const Target& target = targets[first + kAbreast * k];
      if (target.exists()) store(cache + (is_latent ? target.latent : target.rope), chunk, chunks[k].packed());
    }
  } else if (p.interleaved) {
    store_rotated<T, true>(p, targets + first, chunks, chunk);
  } else {
    store_rotated<T, false>(p, targets + first, chunks, chunk);
  }
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
  const Rotation rotation = find_rotation<T, kInterleaved>(p, position, chunk);
#pragma unroll
  for (int k = 0; k < kAtOnce; ++k) {
    const uint4 words = rotate<T, kInterleaved>(chunks[k], rotation);
    if (first + kAbreast * k < p.num_heads) store(row_of(p.queries_out, k), chunk, words);
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
