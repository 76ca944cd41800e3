// SPDX-License-Identifier: Apache-2.0
// Writes the keys and values of new tokens into a cache of the same 16 or 32 bits or of e4m3, and rotates keys and
// queries on the way.
//
// grid = (token tiles, chunks of four heads: of q, then k, then v), 256 threads. A team of `units` threads has one
// token and four heads. Each thread holds the same two octets of columns of the four rows, so it loads cosines and
// sines once for all of them. One thread holds both octets of half-split pairs, so threads exchange nothing. Loads of
// rows are issued first; while they are in flight, each thread looks up the place of its token.
//
// Budget: 32 KiB in flight per CTA, three CTAs per SM (at most 85 registers per thread), no shared memory. float32: 64
// KiB, two CTAs per SM.
#include "rows/elements.cuh"
#include "rows/quantize.cuh"
#include "rows/slots.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"

namespace cumla::mha {

using namespace ptx;
using namespace rows;

constexpr int kThreads = 256;
constexpr int kHeads = 4;  // per thread
template <typename T>
constexpr bool kIsFp32 = false;
template <>
constexpr bool kIsFp32<Fp32> = true;

// Rows of tokens in batches of equal length; ragged rows are one batch.
struct BatchedRows {
  char* data;
  i64 stride_batch, stride_token, stride_head;
};

// One factor, one per kv head, or one per request and kv head: value = e4m3 * factor.
struct Scales {
  const char* data;  // null: `value`
  i64 stride_request, stride_head;
  float value;
  int unused;
};

// Cosines or sines: rows are positions.
struct Angles {
  const char* data;
  i64 stride_position, stride_column;
};

// The octets of each thread of a team. The first `rope_units` threads have an octet of first halves of pairs, from
// octet `rope_first` on, and the octet of their second halves. The other threads have two of the `rest` octets each;
// the last of them may have one.
struct Division {
  int units, rope_units, rope_first, rest;
};

struct AppendKvCacheParams {
  BatchedRows q, q_out, k, v;
  Pages k_cache, v_cache;
  Indices slots, batch_indices, positions, kv_lens, bounds;  // bounds: of each request's tokens
  const char* page_numbers;
  i64 page_numbers_stride_request, page_numbers_stride;
  Indices page_list_bounds;
  Angles cos, sin;  // null: nothing is rotated
  Scales k_scale, v_scale;
  i64 tokens, tokens_of_batch, batch, num_entries, num_pages, page_size, max_position;
  Division keys, values;  // queries are divided as keys are
  int q_heads, kv_heads, interleaved, table_type;
};

enum TableType { kFloat, kBfloat16, kFloat16 };

// A request, a position for the rotation, and a place: a position in the request's pages, or a slot. Negative: none.
struct Token {
  i64 request, position, place;
};

// The request whose tokens are [bounds[i], bounds[i + 1]), or -1.
__device__ __forceinline__ i64 find_request(const AppendKvCacheParams& p, i64 token) {
  i64 low = 0, high = p.batch;  // the last bound that is not above the token lies in [low, high)
  while (high - low > 1) {
    const i64 middle = (low + high) / 2;
    (p.bounds[middle] <= token ? low : high) = middle;
  }
  return low < high && p.bounds[low] <= token && token < p.bounds[low + 1] ? low : -1;
}

__device__ __forceinline__ Token find_token(const AppendKvCacheParams& p, i64 token) {
  Token found = {-1, -1, -1};
  if (p.batch_indices.data != nullptr) {
    found.request = p.batch_indices[token];
  } else if (p.kv_lens.data != nullptr) {
    i64 begin, end;
    if (p.bounds.data != nullptr) {
      found.request = find_request(p, token);
      begin = found.request < 0 ? 0 : p.bounds[found.request];
      end = found.request < 0 ? 0 : p.bounds[found.request + 1];
    } else {
      found.request = token / p.tokens_of_batch;
      begin = found.request * p.tokens_of_batch;
      end = begin + p.tokens_of_batch;
    }
    if (found.request >= 0) found.position = found.place = p.kv_lens[found.request] - (end - token);
  }
  if (p.positions.data != nullptr) {
    found.position = p.positions[token];
    if (p.kv_lens.data == nullptr) found.place = found.position;
  }
  if (p.slots.data != nullptr) found.place = p.slots[token];
  return found;
}

// Finds the place of a token's rows in the cache.
__device__ __forceinline__ Slot find_slot_of(const AppendKvCacheParams& p, i64 token, const Token& found) {
  if (p.page_size == 0) return {token, 0};  // rows of tokens, no cache
  if (found.place < 0) return {-1, 0};
  return slot_at(p, found.request, found.place);
}

__device__ __forceinline__ float table_entry(const AppendKvCacheParams& p, const Angles& angles, i64 position,
                                             int column) {
  const char* const at = angles.data + position * angles.stride_position + column * angles.stride_column;
  if (p.table_type == kFloat) return *reinterpret_cast<const float*>(at);
  const u32 bits = *reinterpret_cast<const unsigned short*>(at);
  return p.table_type == kBfloat16 ? unpack_pair<Bf16>(bits).x : unpack_pair<Fp16>(bits).x;
}

// The octets of one thread; `second` is negative if there is none.
struct Share {
  int first, second;
  bool is_rotated;
};

__device__ __forceinline__ Share share_of(const Division& division, int unit) {
  const int rope_units = division.rope_units, rope_first = division.rope_first;
  if (unit < rope_units) return {rope_first + unit, rope_first + unit + rope_units, true};
  const auto beside_rope = [=](int octet) { return octet < rope_first ? octet : octet + 2 * rope_units; };
  const int first = unit - rope_units, second = first + division.units - rope_units;
  return {beside_rope(first), second < division.rest ? beside_rope(second) : -1, false};
}

// Cosines and sines of the eight pairs of one thread. Half-split: pair i begins in column i of the first octet.
// Interleaved: even i are the pairs of the first octet, odd i those of the second.
struct Turn {
  float cos[kOctet], sin[kOctet];
};

__device__ __forceinline__ Turn load_turn(const AppendKvCacheParams& p, i64 position, int unit) {
  Turn turn;
#pragma unroll
  for (int i = 0; i < kOctet; ++i) {
    const int octet = i % 2 == 0 ? unit : unit + p.keys.rope_units;
    const int pair = p.interleaved ? octet * (kOctet / 2) + i / 2 : unit * kOctet + i;
    turn.cos[i] = table_entry(p, p.cos, position, pair);
    turn.sin[i] = table_entry(p, p.sin, position, pair);
  }
  return turn;
}

__device__ __forceinline__ float2 turned(float x, float y, float cos, float sin) {
  return {cos * x - sin * y, sin * x + cos * y};
}

__device__ __forceinline__ Octet<Fp32> octet_of(const float (&x)[kOctet]) {
  return {{x[0], x[1], x[2], x[3]}, {x[4], x[5], x[6], x[7]}};
}

template <typename T>
__device__ __forceinline__ void rotate(const Octet<T>& first, const Octet<T>& second, const Turn& turn,
                                       bool interleaved, Octet<Fp32>& new_first, Octet<Fp32>& new_second) {
  float a[kOctet], b[kOctet];
#pragma unroll
  for (int i = 0; i < kOctet / 2; ++i) {
    const float2 x = first.pair(i), y = second.pair(i);
    const int even = 2 * i, odd = even + 1;
    const float2 one = turned(x.x, interleaved ? x.y : y.x, turn.cos[even], turn.sin[even]);
    const float2 two = turned(interleaved ? y.x : x.y, y.y, turn.cos[odd], turn.sin[odd]);
    a[even] = one.x;
    a[odd] = interleaved ? one.y : two.x;
    b[even] = interleaved ? two.x : one.y;
    b[odd] = two.y;
  }
  new_first = octet_of(a);
  new_second = octet_of(b);
}

template <typename T, bool kToFp8, typename Elements>
__device__ __forceinline__ void store_octet(char* row, int octet, const Elements& elements, float inverse) {
  if constexpr (kToFp8) {
    store_quantized(row, octet, elements, inverse);
  } else if constexpr (kIsFp32<T>) {
    reinterpret_cast<float4*>(row)[2 * octet] = elements.low;
    reinterpret_cast<float4*>(row)[2 * octet + 1] = elements.high;
  } else {
    store(row, octet, elements.template packed<T>());
  }
}

__device__ __forceinline__ float inverse_scale(const Scales& scales, i64 request, int head) {
  const float* const at = reinterpret_cast<const float*>(scales.data + request * scales.stride_request +
                                                         head * scales.stride_head);
  return 1.0f / (scales.data != nullptr ? *at : scales.value);
}

// Two octets of up to four rows, in registers.
template <typename T>
struct Held {
  Octet<T> first[kHeads], second[kHeads];

  __device__ __forceinline__ void load(const char* rows, i64 stride, int heads, const Share& share) {
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      if (i >= heads) break;
      first[i].load_early(rows + i * stride, share.first);
      if (share.second >= 0) second[i].load_early(rows + i * stride, share.second);
    }
  }

  template <bool kToFp8>
  __device__ __forceinline__ void store_at(const AppendKvCacheParams& p, char* rows, i64 stride, int heads,
                                           const Share& share, int unit, i64 position, const Scales* scales,
                                           i64 request, int head) const {
    const bool turns = share.is_rotated && position >= 0 && position < p.max_position;
    Turn turn;
    if (turns) turn = load_turn(p, position, unit);
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      if (i >= heads) break;
      char* const row = rows + i * stride;
      const float inverse = kToFp8 ? inverse_scale(*scales, request, head + i) : 1.0f;
      if (turns) {
        Octet<Fp32> one, two;
        rotate(first[i], second[i], turn, p.interleaved, one, two);
        store_octet<T, kToFp8>(row, share.first, one, inverse);
        store_octet<T, kToFp8>(row, share.second, two, inverse);
      } else {
        store_octet<T, kToFp8>(row, share.first, first[i], inverse);
        if (share.second >= 0) store_octet<T, kToFp8>(row, share.second, second[i], inverse);
      }
    }
  }
};

__device__ __forceinline__ char* row_of(const BatchedRows& rows, i64 token, i64 tokens_of_batch, int head) {
  const i64 batch = token / tokens_of_batch;
  return rows.data + batch * rows.stride_batch + (token - batch * tokens_of_batch) * rows.stride_token +
         head * rows.stride_head;
}

template <typename T, bool kToFp8>
__device__ __forceinline__ void append_kv_cache(const AppendKvCacheParams& p) {
  grid_dependency_launch();
  grid_dependency_wait();
  const int q_chunks = (p.q_heads + kHeads - 1) / kHeads, kv_chunks = (p.kv_heads + kHeads - 1) / kHeads;
  const bool is_query = blockIdx.y < q_chunks, is_value = blockIdx.y >= q_chunks + kv_chunks;
  const Division& division = is_value ? p.values : p.keys;
  const int team = threadIdx.x / division.units, unit = threadIdx.x % division.units;
  const int teams = kThreads / division.units;
  const i64 token = static_cast<i64>(blockIdx.x) * teams + team;
  if (team >= teams || token >= p.tokens) return;
  const int chunk = static_cast<int>(blockIdx.y) - (is_query ? 0 : is_value ? q_chunks + kv_chunks : q_chunks);
  const int head = chunk * kHeads, heads = (is_query ? p.q_heads : p.kv_heads) - head;
  const Share share = share_of(division, unit);

  const BatchedRows& from = is_query ? p.q : is_value ? p.v : p.k;
  Held<T> held;
  held.load(row_of(from, token, p.tokens_of_batch, head), from.stride_head, heads, share);
  const Token found = find_token(p, token);
  if (is_query) {
    char* const to = row_of(p.q_out, token, p.tokens_of_batch, head);
    held.template store_at<false>(p, to, p.q_out.stride_head, heads, share, unit, found.position, nullptr, 0, head);
    return;
  }
  const bool is_known = p.max_position == 0 || p.page_size == 0 ||
                        (found.position >= 0 && found.position < p.max_position);
  const Slot slot = find_slot_of(p, token, found);
  if (slot.page < 0 || !is_known) return;
  const Pages& cache = is_value ? p.v_cache : p.k_cache;
  char* const to = cache.data + cache.offset(slot.page, slot.row, head);
  held.template store_at<kToFp8>(p, to, cache.stride_head, heads, share, unit, found.position,
                                 is_value ? &p.v_scale : &p.k_scale, found.request, head);
}

}  // namespace cumla::mha
