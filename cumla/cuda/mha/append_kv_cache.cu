// SPDX-License-Identifier: Apache-2.0
// Appends keys and values of new tokens to a cache of the same dtype or of e4m3. It rotates keys and queries on the
// way.
//
// grid = (chunks of heads: of q, then k, then v; token tiles, in y and z), 128 threads, in teams.
//
// Roles and time line:
//   a team       has one token and one chunk of up to four heads; all chunks of a token, then the next token
//   each thread  has the same two octets of columns of all its rows:
//                position and slot | rows to shared memory (cp.async) | request and slot | cosines and sines |
//                wait for its copies | rotate | store
// Barriers: none. A thread reads only what it copied itself, so it waits for its own cp.async group.
//
// Budget: 16 KiB of shared memory per CTA, all in flight, 7 CTAs per SM: at most 72 registers per thread. float32: 32
// KiB, 3 CTAs per SM. Reasons: docs/kernels/append-and-merge.md.
#include "mha/append_kv_cache/params.cuh"
#include "mha/append_kv_cache/places.cuh"
#include "mha/append_kv_cache/rotate.cuh"
#include "rows/elements.cuh"
#include "rows/quantize.cuh"
#include "rows/slots.cuh"
#include "ptx/copy.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"

namespace cumla::mha {

using namespace ptx;
using namespace rows;

constexpr int kThreads = 128;
constexpr int kMaxHeads = 4;  // of a chunk
template <typename T>
constexpr bool kIsFp32 = false;
template <>
constexpr bool kIsFp32<Fp32> = true;

// The octets of one thread; second < 0: none.
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

// Scales of the heads of a chunk, for one request.
struct Factors {
  const Scales* scales;
  i64 request;
  int head;

  __device__ __forceinline__ float inverse(int i) const {
    const float* const at = reinterpret_cast<const float*>(scales->data + request * scales->stride_request +
                                                           (head + i) * scales->stride_head);
    return 1.0f / (scales->data != nullptr ? *at : scales->value);
  }
};

// The rows of one team.
struct Chunk {
  char* rows;
  i64 stride;
  int heads;
};

// Two octets of each row of a chunk, in shared memory. Each thread reads only its own copies.
template <typename T>
struct Held {
  static constexpr int kBytes = kIsFp32<T> ? 32 : 16;  // of an octet
  char* memory;

  __device__ __forceinline__ void copy_octet_async(int i, const char* row, int octet) const {
    const u32 to = shared_address(memory) + (i * kThreads + threadIdx.x) * kBytes;
    copy_16_async(to, row + octet * kBytes, true);
    if constexpr (kIsFp32<T>) copy_16_async(to + 16, row + octet * kBytes + 16, true);
  }

  __device__ __forceinline__ void copy_async(const Chunk& chunk, const Share& share) const {
#pragma unroll
    for (int i = 0; i < kMaxHeads; ++i) {
      if (i >= chunk.heads) break;
      const char* const row = chunk.rows + i * chunk.stride;
      copy_octet_async(2 * i, row, share.first);
      if (share.second >= 0) copy_octet_async(2 * i + 1, row, share.second);
    }
    copy_async_commit();
  }

  __device__ __forceinline__ Octet<T> octet(int i) const {
    Octet<T> found;
    found.load(memory, i * kThreads + threadIdx.x);
    return found;
  }

  template <bool kToFp8>
  __device__ __forceinline__ void store_copied(const Chunk& to, const Share& share, const Factors& factors) const {
#pragma unroll 2
    for (int i = 0; i < to.heads; ++i) {
      char* const row = to.rows + i * to.stride;
      const float inverse = kToFp8 ? factors.inverse(i) : 1.0f;
      store_octet<T, kToFp8>(row, share.first, octet(2 * i), inverse);
      if (share.second >= 0) store_octet<T, kToFp8>(row, share.second, octet(2 * i + 1), inverse);
    }
  }

  template <bool kToFp8, bool kInterleaved>
  __device__ __forceinline__ void store_turned(const Chunk& to, const Share& share, const Turn& turn,
                                               const Factors& factors) const {
#pragma unroll 2
    for (int i = 0; i < to.heads; ++i) {
      char* const row = to.rows + i * to.stride;
      const float inverse = kToFp8 ? factors.inverse(i) : 1.0f;
      Octet<Fp32> one, two;
      rotate<kInterleaved>(octet(2 * i), octet(2 * i + 1), turn, one, two);
      store_octet<T, kToFp8>(row, share.first, one, inverse);
      store_octet<T, kToFp8>(row, share.second, two, inverse);
    }
  }

  template <bool kToFp8>
  __device__ __forceinline__ void store_at(const AppendKvCacheParams& p, const Chunk& to, const Share& share, int unit,
                                           i64 position, const Factors& factors) const {
    if (!share.is_rotated || position < 0 || position >= p.max_position) {
      copy_async_wait<0>();
      store_copied<kToFp8>(to, share, factors);
      return;
    }
    const Turn turn = load_turn(p, position, unit);
    copy_async_wait<0>();
    if (p.interleaved)  // two loops: selecting per element would cost as much as the rotation
      store_turned<kToFp8, true>(to, share, turn, factors);
    else
      store_turned<kToFp8, false>(to, share, turn, factors);
  }
};

template <typename T, bool kToFp8>
__device__ __forceinline__ void append_kv_cache(const AppendKvCacheParams& p) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  grid_dependency_launch();
  grid_dependency_wait();
  // Teams have consecutive items; a tile has as many tokens as a CTA has teams.
  const int teams = kThreads * p.inverse_team >> 16, team = threadIdx.x * p.inverse_team >> 16;
  const u32 item = blockIdx.x * teams + team, token_of_tile = item / gridDim.x;
  const int piece = item - token_of_tile * gridDim.x, unit = threadIdx.x - team * p.team;
  const i64 token = (static_cast<i64>(blockIdx.z) * gridDim.y + blockIdx.y) * teams + token_of_tile;
  const bool is_query = piece < p.q_chunks, is_value = piece >= p.q_chunks + p.kv_chunks;
  const Division& division = is_value ? p.values : p.keys;
  if (team >= teams || unit >= division.units || token >= p.tokens) return;
  const int head = (piece - (is_query ? 0 : is_value ? p.q_chunks + p.kv_chunks : p.q_chunks)) * p.heads;
  const int heads = min(p.heads, (is_query ? p.q_heads : p.kv_heads) - head);
  const Share share = share_of(division, unit);

  Loaded position, given_slot;
  position.load(p.positions, token);
  given_slot.load(p.slots, token);
  const BatchedRows& from = is_query ? p.q : is_value ? p.v : p.k;
  const Held<T> held = {reinterpret_cast<char*>(shared_bytes)};
  held.copy_async({row_of(p, from, token, head), from.stride_head, heads}, share);
  const Token found = find_token(p, token, position, given_slot);
  Chunk to = {nullptr, p.q_out.stride_head, heads};
  if (is_query) {
    to.rows = row_of(p, p.q_out, token, head);
  } else {
    const bool is_known = p.max_position == 0 || p.page_size == 0 ||
                          (found.position >= 0 && found.position < p.max_position);
    const Slot slot = find_slot_of(p, token, found);
    if (slot.page < 0 || !is_known) {
      copy_async_wait<0>();  // no copy may outlive its CTA
      return;
    }
    const Pages& cache = is_value ? p.v_cache : p.k_cache;
    to = {cache.data + cache.offset(slot.page, slot.row, head), cache.stride_head, heads};
  }
  const Factors factors = {is_value ? &p.v_scale : &p.k_scale, found.request, head};
  if (kToFp8 && !is_query)
    held.template store_at<kToFp8>(p, to, share, unit, found.position, factors);
  else
    held.template store_at<false>(p, to, share, unit, found.position, factors);
}

}  // namespace cumla::mha
