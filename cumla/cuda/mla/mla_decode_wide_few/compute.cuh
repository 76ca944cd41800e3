// SPDX-License-Identifier: Apache-2.0
// The computing warps of mla_decode_wide_few.
#pragma once
#include "attend/softmax.cuh"
#include "mla/mla_decode_wide_few/layout.cuh"
#include "split/output.cuh"
#include "ptx/cluster.cuh"
#include "ptx/cluster_async.cuh"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/mma.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"

namespace cumla::mla {

using namespace attend;

// One warp. As keys, it has a quarter of the columns for half of the keys of a chunk; in the softmax, two query rows;
// as values, 128 columns of all keys.
template <typename T>
struct FewConsumer {
  static constexpr int kSteps = 17;  // of 16 columns: latent ones, and one of RoPE
  static constexpr int kKeyTiles = kFewChunk / 16;  // of eight keys, in half of a chunk
  static constexpr int kColumns = 1024 / kFewWarps;
  using Layout = WideFewLayout;

  const MlaDecodeParams& p;
  const Layout& shared;
  FewTile tile;
  const FewShare& share;
  const int warp, lane, quarter, half, own_row;
  u32 query[4 * kSteps];
  float output[kColumns / 8][4];
  float maximum = kLowest, total = 0.0f, rounded = 0.0f;  // of the lane's row; sums of the lane's keys
  int first_key, end_key;  // those that the lane's row sees
  float sink;

  __device__ __forceinline__ FewConsumer(const MlaDecodeParams& p, const Layout& shared, const FewTile& tile,
                                         const FewShare& share, int warp)
      : p(p),
        shared(shared),
        tile(tile),
        share(share),
        warp(warp),
        lane(threadIdx.x % 32),
        quarter(warp % kFewKeyWarps),
        half(warp / kFewKeyWarps),
        own_row(2 * warp + lane / 16) {
    first_key = max(tile.first_of(p, own_row), share.begin);
    sink = sink_of(p, tile, own_row);  // early: it comes from memory
    end_key = min(share.tokens - tile.shift_of(p, own_row), share.end);
#pragma unroll
    for (int i = 0; i < kColumns / 8; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) output[i][e] = 0.0f;
  }

  // Byte of a row at which step s of this warp's columns begins.
  __device__ __forceinline__ int byte_of(int s) const {
    return s < kSteps - 1 ? quarter * 512 + s * 32 : kFewLatent + quarter * 32;
  }

  __device__ __forceinline__ void arrive(u32 barrier) const {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(barrier);
  }

  __device__ __forceinline__ void load_query() {
    mbarrier_wait(shared.query_full(), 0, "the query");
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      u32 words[4];
      load_matrix_x4(words, shared.query(lane % 16) + byte_of(s) + lane / 16 * 16);
#pragma unroll
      for (int i = 0; i < 4; ++i) query[4 * s + i] = words[i];
    }
    arrive(shared.query_free());
  }

  // Scores of half of the keys over this warp's columns, to shared memory.
  __device__ __forceinline__ void multiply_query(u32 stage) const {
    float scores[2][kKeyTiles][4] = {};
    const u32 rows = stage + (half * (kFewChunk / 2) + lane % 8) * Layout::kPitch;
#pragma unroll
    for (int s = 0; s < kSteps; s += 2) {
#pragma unroll
      for (int j = 0; j < kKeyTiles; ++j) {
        u32 keys[4];  // two steps; of the last one, the same twice
        const int chunk = s + 1 < kSteps ? lane / 8 : lane / 8 % 2;
        load_matrix_x4(keys, rows + j * (8 * Layout::kPitch) + byte_of(s) + chunk * 16);
#pragma unroll
        for (int i = 0; i < 2 && s + i < kSteps; ++i) {
          const u32* q = query + 4 * (s + i);
          mma_m16n8k16<T>(scores[i][j], q[0], q[1], q[2], q[3], keys[2 * i], keys[2 * i + 1]);
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kKeyTiles; ++j)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        store_shared_float2(
            shared.score(quarter, lane / 4 + 8 * r, half * (kFewChunk / 2) + 8 * j + lane % 4 * 2),
            {scores[0][j][2 * r] + scores[1][j][2 * r], scores[0][j][2 * r + 1] + scores[1][j][2 * r + 1]});
  }

  // Turns the scores of two rows into probabilities. A lane has keys 2 i, 2 i + 1 and 32 + i of one row.
  __device__ __forceinline__ void softmax(int key) {
    const int i = lane % 16;
    float scores[3] = {};
#pragma unroll
    for (int k = 0; k < kFewKeyWarps; ++k) {
      const float2 two = load_shared_float2(shared.score(k, own_row, 2 * i));
      scores[0] += two.x;
      scores[1] += two.y;
      scores[2] += load_shared_float(shared.score(k, own_row, 32 + i));
    }
    float highest = -kInfinity;
#pragma unroll
    for (int e = 0; e < 3; ++e) {
      const int at = key + (e < 2 ? 2 * i + e : 32 + i);
      scores[e] = at >= first_key && at < end_key ? scores[e] * p.scale_log2 : -kInfinity;
      highest = fmaxf(highest, scores[e]);
    }
#pragma unroll
    for (int apart = 8; apart > 0; apart /= 2) highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, apart));
    const float next = fmaxf(maximum, highest), factor = exp2_approx(maximum - next);
    maximum = next;
    float weights[3];
#pragma unroll
    for (int e = 0; e < 3; ++e) weights[e] = exp2_approx(scores[e] - next);
    const float later = __shfl_xor_sync(0xffffffffu, weights[2], 1);
    const u32 pair = pack_pair<T>(weights[0], weights[1]), third = pack_pair<T>(weights[2], later);
    total = total * factor + (weights[0] + weights[1] + weights[2]);
    rounded = rounded * factor + sum_of_pair<T>(pair) + (i % 2 == 0 ? sum_of_pair<T>(third) : 0.0f);
    store_shared_u32(shared.probability(own_row, 2 * i), pair);
    if (i % 2 == 0) store_shared_u32(shared.probability(own_row, 32 + i), third);
    if (i == 0) store_shared_float(shared.factor(own_row), factor);
  }

  // output = output x factor + probabilities x values, of this warp's columns.
  __device__ __forceinline__ void multiply_values(u32 stage, int count) {
    const float factors[2] = {load_shared_float(shared.factor(lane / 4)),
                              load_shared_float(shared.factor(lane / 4 + 8))};
    if (__any_sync(0xffffffffu, factors[0] != 1.0f || factors[1] != 1.0f)) {
#pragma unroll
      for (int i = 0; i < kColumns / 8; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) output[i][e] *= factors[e / 2];
    }
    const u32 values = stage + lane % 16 * Layout::kPitch + warp * (kColumns * 2) + lane / 16 * 16;
#pragma unroll
    for (int s = 0; s < kFewChunk / 16; ++s) {
      if (16 * s >= count) break;
      u32 a[4];
      load_matrix_x4(a, shared.probability(lane % 16, 16 * s + lane / 16 * 8));
#pragma unroll
      for (int i = 0; i < kColumns / 16; ++i) {
        u32 b[4];
        load_matrix_x4_transposed(b, values + s * (16 * Layout::kPitch) + i * 32);
        mma_m16n8k16<T>(output[2 * i], a[0], a[1], a[2], a[3], b[0], b[1]);
        mma_m16n8k16<T>(output[2 * i + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
      }
    }
  }

  __device__ __forceinline__ void attend() {
    load_query();
#pragma unroll 1
    for (int t = 0, key = share.begin; key < share.end; ++t, key += kFewChunk) {
      const int stage = t & 1;
      mbarrier_wait(shared.full(stage), t / 2 & 1, "keys");
      multiply_query(shared.stage(stage));
      consumers_sync();
      softmax(key);
      consumers_sync();
      multiply_values(shared.stage(stage), share.end - key);
      arrive(shared.free(stage));
    }
    add_up(total, rounded);
  }

  // Adds up what the lanes of a row have.
  __device__ __forceinline__ static void add_up(float& a, float& b) {
#pragma unroll
    for (int apart = 8; apart > 0; apart /= 2) {
      a += __shfl_xor_sync(0xffffffffu, a, apart);
      b += __shfl_xor_sync(0xffffffffu, b, apart);
    }
  }

  // Stores the log-sum-exp of the lane's row; returns what normalises its sums.
  __device__ __forceinline__ float finish_row(float highest, float sum, float rounded_sum, bool stores) const {
    float inverse = inverse_of_sum(rounded_sum), lse = log_sum_exp(highest, sum);
    take_sink(p, sink, inverse, lse);
    if (stores && own_row < tile.rows) store_lse(p, tile, share.request, Row(p, tile, own_row), lse);
    return inverse;
  }

  // Stores 16 columns of a row: two of the lane, and two that are eight columns later.
  __device__ __forceinline__ void store(int unit, int row, const float4& v) const {
    store_columns<T, 1>(p, tile, share.request, row, lane % 4, unit * 16, v.x, v.y, v.z, v.w);
  }

  // Without a cluster.
  __device__ __forceinline__ void finish_alone() const {
    const float inverse = finish_row(maximum, total, rounded, lane % 16 == 0);
    if (lane % 16 == 0) store_shared_float(shared.weight(0, own_row), inverse);
    consumers_sync();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float by = load_shared_float(shared.weight(0, lane / 4 + 8 * r));
#pragma unroll
      for (int i = 0; i < kColumns / 16; ++i)
        store(warp * (kColumns / 16) + i, lane / 4 + 8 * r,
              {output[2 * i][2 * r] * by, output[2 * i][2 * r + 1] * by, output[2 * i + 1][2 * r] * by,
               output[2 * i + 1][2 * r + 1] * by});
    }
  }

  // Sends sums to the CTAs of the cluster: the columns of each unit to the CTA that stores them. kGroups: of eight rows
  // that the tile has.
  template <int kGroups>
  __device__ __forceinline__ void send(int rank, int cluster_log2) const {
    const int each_log2 = 6 - cluster_log2;  // units of a CTA
    if (lane % 16 < 1 << cluster_log2)
      send_to(lane % 16, rank, shared.statistics(rank, own_row), {maximum, total, rounded, 0.0f});
#pragma unroll
    for (int i = 0; i < kColumns / 16; ++i) {
      const int unit = warp * (kColumns / 16) + i, to = unit >> each_log2, at = unit & (1 << each_log2) - 1;
#pragma unroll
      for (int r = 0; r < kGroups; ++r)
        send_to(to, rank, shared.part((rank << each_log2 | at) * kGroups + r) + lane * 16,
                {output[2 * i][2 * r], output[2 * i][2 * r + 1], output[2 * i + 1][2 * r],
                 output[2 * i + 1][2 * r + 1]});
    }
  }
  __device__ __forceinline__ void send_to(int to, int rank, u32 address, const float4& v) const {
    if (to == rank)
      store_shared_float4(address, v);
    else
      store_cluster_async(shared_address_in(address, to), v, shared_address_in(shared.sent(), to));
  }

  // Adds up what the CTAs of the cluster have sent, and stores the columns of this one.
  template <int kGroups>
  __device__ __forceinline__ void finish(int rank, int cluster_log2) const {
    const int count = 1 << cluster_log2, each_log2 = 6 - cluster_log2;
    mbarrier_wait(shared.sent(), 0, "sums of the cluster");
    __syncwarp();  // this CTA's statistics are those of another lane
    const int from = lane % 16;  // a CTA
    float4 own = {kLowest, 0.0f, 0.0f, 0.0f};
    if (from < count) own = load_shared_float4(shared.statistics(from, own_row));
    float highest = own.x;
#pragma unroll
    for (int apart = 8; apart > 0; apart /= 2) highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, apart));
    const float weight = exp2_approx(own.x - highest);
    float sum = own.y * weight, rounded_sum = own.z * weight;
    add_up(sum, rounded_sum);
    const float inverse = finish_row(highest, sum, rounded_sum, rank == 0 && from == 0);
    if (from < count) store_shared_float(shared.weight(from, own_row), weight * inverse);
    consumers_sync();
#pragma unroll 1
    for (int at = warp; at < 1 << each_log2; at += kFewWarps) {
      float4 sums[kGroups] = {};
#pragma unroll 8
      for (int i = 0; i < count; ++i)
#pragma unroll
        for (int r = 0; r < kGroups; ++r) {
          const float4 v = load_shared_float4(shared.part((i << each_log2 | at) * kGroups + r) + lane * 16);
          const float of = load_shared_float(shared.weight(i, lane / 4 + 8 * r));
          sums[r] = {sums[r].x + v.x * of, sums[r].y + v.y * of, sums[r].z + v.z * of, sums[r].w + v.w * of};
        }
#pragma unroll
      for (int r = 0; r < kGroups; ++r) store(rank << each_log2 | at, lane / 4 + 8 * r, sums[r]);
    }
  }
};

}  // namespace cumla::mla
