// SPDX-License-Identifier: Apache-2.0
// The consumer role of mla_decode_wide: from partial scores to the stored output.
#pragma once
#include "mla/mla_decode_wide/layout.cuh"
#include "attend/share.cuh"
#include "split/join.cuh"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"
#include "ptx/wgmma.cuh"
#include "ptx/wgmma_narrow.cuh"

namespace cumla::mla {

using namespace attend;
using namespace ptx;
using namespace split;

// One consumer warpgroup. It has half of the latent columns, and the softmax of 16 query rows. A lane's accumulators
// are of tokens, or columns of V, 16 warp + lane / 4 and 8 more; query rows 2 (lane % 4) and 1 more of each eight.
// kCopied: threads copied the tiles, not TMA.
template <typename T, bool kCopied, typename AnyTile>
struct WideConsumer {
  using Layout = WideLayout;
  static constexpr int kHalfTiles = Layout::kHalfTiles, kValueDim = Layout::kValueDim;
  static constexpr int kRopeTile = Layout::kRopeTile;
  static constexpr int kHeld = kWideRows / 4;  // query rows of whose output a thread has a part
  static constexpr int kOwn = kRowGroup / 4;   // query rows of whose softmax it has a part

  const MlaDecodeParams& p;
  const Layout& shared;
  const AnyTile& tile;
  const int consumer, warp, lane;
  float output[kHalfTiles][2 * kHeld];
  float scores[2 * kOwn];
  u32 probabilities[kOwn];
  float maximum[kOwn];  // base-2 running maximum
  float sum[kOwn];      // of exponentials of this thread's tokens, for the log-sum-exp
  float weight[kOwn];   // of the same as rounded 16-bit probabilities, which normalises the output

  __device__ __forceinline__ WideConsumer(const MlaDecodeParams& p, const Layout& shared, const AnyTile& tile,
                                          int consumer)
      : p(p),
        shared(shared),
        tile(tile),
        consumer(consumer),
        warp(threadIdx.x % kWarpgroup / 32),
        lane(threadIdx.x % 32) {}

  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int d = 0; d < kHalfTiles; ++d)
#pragma unroll
      for (int i = 0; i < 2 * kHeld; ++i) output[d][i] = 0.0f;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      maximum[i] = kLowest;
      sum[i] = 0.0f;
      weight[i] = 0.0f;
    }
  }

  __device__ __forceinline__ int held_row(int i) const { return 8 * (i / 2) + 2 * (lane % 4) + i % 2; }
  __device__ __forceinline__ int row_of(int i) const { return consumer * kRowGroup + held_row(i); }
  __device__ __forceinline__ int own_tile(int d) const { return consumer * kHalfTiles + d; }

  __device__ __forceinline__ void wait_for_tile(int k, u32 phase) const {
    mbarrier_wait(shared.full(k), phase, "a KV tile");
    if constexpr (kCopied) fence_proxy_async_shared();
  }

  // Scores of its own rows: each consumer multiplies half of the columns, also of the RoPE tile, with all rows.
  __device__ __forceinline__ void multiply_query(u32 phase) {
    float of_half[2 * kHeld];
    wait_for_tile(kRopeTile, phase);
    warpgroup_arrive();
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const u32 offset = consumer * 64 + k * 32;
      wgmma_m64n32k16_async<T, false>(
          of_half, descriptor_of_rows<128>(shared.tile(kRopeTile), offset),
          descriptor_of_rows<128>(shared.query + kRopeTile * Layout::kQueryTileBytes, offset), k > 0);
    }
#pragma unroll
    for (int i = 0; i < kHalfTiles; ++i) {
      wait_for_tile(own_tile(i), phase);
      warpgroup_arrive();
#pragma unroll
      for (int k = 0; k < 4; ++k)
        wgmma_m64n32k16_async<T, false>(
            of_half, descriptor_of_rows<128>(shared.tile(own_tile(i)), k * 32),
            descriptor_of_rows<128>(shared.query + own_tile(i) * Layout::kQueryTileBytes, k * 32), true);
    }
    warpgroup_commit();
    warpgroup_wait<0>();
    keep_behind_wait(of_half);
    __syncwarp();
    if (lane == 0) mbarrier_arrive(shared.free(kRopeTile));
#pragma unroll
    for (int i = 0; i < Layout::kExchanged; ++i) {
      const float* const low = of_half + 4 * i;
      const float* const high = low + 2 * kOwn;
      store_shared_float4(shared.exchange(consumer, i),
                          consumer ? float4{low[0], low[1], low[2], low[3]}
                                   : float4{high[0], high[1], high[2], high[3]});
    }
    consumers_sync();
#pragma unroll
    for (int i = 0; i < Layout::kExchanged; ++i) {
      const float* const low = of_half + 4 * i;
      const float* const high = low + 2 * kOwn;
      const float4 other = load_shared_float4(shared.exchange(1 - consumer, i));
      scores[4 * i] = (consumer ? high[0] : low[0]) + other.x;
      scores[4 * i + 1] = (consumer ? high[1] : low[1]) + other.y;
      scores[4 * i + 2] = (consumer ? high[2] : low[2]) + other.z;
      scores[4 * i + 3] = (consumer ? high[3] : low[3]) + other.w;
    }
  }

  // output += V x probabilities. Tiles are freed in pairs, as soon as their products are done.
  __device__ __forceinline__ void multiply_values() {
    warpgroup_arrive();
#pragma unroll
    for (int d = 0; d < kHalfTiles; ++d) {
#pragma unroll
      for (int k = 0; k < 4; ++k)
        wgmma_m64n32k16_async<T, true>(output[d], descriptor_of_rows<128>(shared.tile(own_tile(d)), k * 2048),
                                       descriptor_of_rows<128>(shared.probabilities, k * 32), true);
      if (d % 2 == 1) warpgroup_commit();
    }
    free_values<kHalfTiles / 2 - 1>();
  }
  template <int kPending>
  __device__ __forceinline__ void free_values() const {
    warpgroup_wait<kPending>();
    __syncwarp();
    if (lane < 2) mbarrier_arrive(shared.free(own_tile(kHalfTiles - 2 * kPending - 2 + lane)));
    if constexpr (kPending > 0) free_values<kPending - 1>();
  }

  // Zeroes rows [begin, end) of V, which no query row sees. They may hold NaN, and 0 x NaN is NaN.
  __device__ __forceinline__ void clear_values(int begin, int end) const {
    constexpr int kChunks = 8 * kHalfTiles;  // of 16 bytes, of a row
    for (int i = begin * kChunks + threadIdx.x % kWarpgroup; i < end * kChunks; i += kWarpgroup)
      store_shared_zero_16(shared.tile(own_tile(i % kChunks / 8)) + (i / kChunks) * 128 + (i % 8) * 16);
    fence_proxy_async_shared();
  }

  __device__ __forceinline__ void mask_scores(const Segment& segment, int block) {
    const int token = block * kBlockTokens + warp * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int first = tile.first_of(p, row_of(i)), limit = segment.tokens - tile.shift_of(p, row_of(i));
      if (token < first || token >= limit) scores[4 * (i / 2) + i % 2] = -kInfinity;
      if (token + 8 < first || token + 8 >= limit) scores[4 * (i / 2) + 2 + i % 2] = -kInfinity;
    }
  }

  // Joins a thread's number for each of its rows over the lanes of a warp, and leaves it for all warps.
  template <typename Join>
  __device__ __forceinline__ void leave_for_all_warps(const float (&values)[kOwn], int array, Join join) const {
    const auto own = share_over_column(values, join);
    store_shared_float(shared.of_warp(array, row_of(own.first), warp), own.values[0]);
  }

  // Raises the running maximum: over a thread's two tokens, then its warp's, then all. Leaves the factors of the output
  // for both consumers; there is rarely one.
  __device__ __forceinline__ void raise_maximum() {
    float next[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) next[i] = fmaxf(scores[4 * (i / 2) + i % 2], scores[4 * (i / 2) + 2 + i % 2]);
    leave_for_all_warps(next, 0, [](float a, float b) { return fmaxf(a, b); });
    consumer_sync(consumer);
    bool moved = false;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const float4 of = load_shared_float4(shared.of_warp(0, row_of(i), 0));
      const float highest = fmaxf(fmaxf(of.x, of.y), fmaxf(of.z, of.w)) * p.scale_log2;
      next[i] = highest > maximum[i] + kMaximumSlack ? highest : maximum[i];
      moved |= next[i] != maximum[i];
    }
    moved = __any_sync(0xffffffffu, moved);
    if (warp == 0 && lane == 0) store_shared_u32(shared.risen(consumer), moved);
    if (!moved) return;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const float factor = exp2_approx(maximum[i] - next[i]);
      if (warp == 0 && lane / 4 == 0) store_shared_float(shared.factor(row_of(i)), factor);
      sum[i] *= factor;
      weight[i] *= factor;
      maximum[i] = next[i];
    }
  }

  // Multiplies the output of a group's rows by the factors that begin there.
  __device__ __forceinline__ void rescale(int group, u32 factors) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const float factor = load_shared_float(factors + held_row(i) * 4);
#pragma unroll
      for (int d = 0; d < kHalfTiles; ++d) {
        float* const of = output[d] + group * 2 * kOwn + 4 * (i / 2) + i % 2;
        of[0] *= factor;
        of[2] *= factor;
      }
    }
  }

  // Turns scores into probabilities relative to the running maximum, and sums them before and after rounding (why
  // both: docs/kernels/mla.md).
  __device__ __forceinline__ void exponentiate() {
#pragma unroll
    for (int i = 0; i < 2 * kOwn; i += 2) {
      const int own = i / 4 * 2;
      const float low = exp2_approx(__fmaf_rn(scores[i], p.scale_log2, -maximum[own]));
      const float high = exp2_approx(__fmaf_rn(scores[i + 1], p.scale_log2, -maximum[own + 1]));
      sum[own] += low;
      sum[own + 1] += high;
      probabilities[i / 2] = pack_pair<T>(low, high);
      const float2 rounded = unpack_pair<T>(probabilities[i / 2]);
      weight[own] += rounded.x;
      weight[own + 1] += rounded.y;
    }
  }

  // Stores the transpose, for both consumers.
  __device__ __forceinline__ void store_probabilities() const {
    const int tokens = 2 * warp + lane / 8 % 2;  // index of eight tokens
    const int row = consumer * kRowGroup + lane / 16 * 8 + lane % 8;
    store_matrix_x4_transposed(shared.probabilities + row * 128 + ((tokens ^ (row & 7)) << 4), probabilities[0],
                               probabilities[1], probabilities[2], probabilities[3]);
    fence_proxy_async_shared();
  }

  // t: blocks of the earlier segments.
  __device__ __forceinline__ void compute(const Segment& segment, int t, u32 query_phase) {
    begin();
    mbarrier_wait(shared.query_full(), query_phase, "the query");
#pragma unroll 1
    for (int i = 0; i < segment.blocks; ++i) {
      multiply_query((t + i) & 1);
      const int block = segment.begin + i, first_token = block * kBlockTokens, last_token = first_token + kBlockTokens;
      if (first_token < tile.seen_by_all || last_token > segment.tokens - tile.most_shift) mask_scores(segment, block);
      raise_maximum();
      exponentiate();
      store_probabilities();
      if (first_token < tile.first_seen) clear_values(0, min(tile.first_seen - first_token, kBlockTokens));
      if (last_token > segment.tokens) clear_values(max(segment.tokens - first_token, 0), kBlockTokens);
      consumers_sync();
#pragma unroll
      for (int group = 0; group < 2; ++group)
        if (load_shared_u32(shared.risen(group))) rescale(group, shared.factor(group * kRowGroup));
      multiply_values();
    }
  }

  // Normalises the output. Then stores out and log-sum-exp, or a partial result.
  __device__ __forceinline__ void finish(const Segment& segment, bool more) {
    const bool split = segment.split();
    auto add = [](float a, float b) { return a + b; };
    leave_for_all_warps(sum, 0, add);
    leave_for_all_warps(weight, 1, add);
    consumer_sync(consumer);
    if (warp == 0 && lane / 4 == 0) end_rows(segment, split);
    consumers_sync();
    rescale(0, shared.inverse(0));
    rescale(1, shared.inverse(kRowGroup));
    __syncwarp();
    if (lane == 0) mbarrier_arrive(shared.query_free());  // sums and factors are read as well
    write_output(segment, split);
    if (split)
      LatentJoiner<T, AnyTile>(
          p, {shared.words, shared.exchanges, shared.of_warps, shared.block, shared.block + 4 * kJoinSpace}, tile,
          segment)
          .join(more);
  }

  // Stores the log-sum-exp of each row, and leaves the factor that normalises it: four lanes have a consumer's rows.
  __device__ __forceinline__ void end_rows(const Segment& segment, bool split) const {
    const int rows = p.row_groups * kRowGroup;
    float2* const of_piece = p.partial_rows + piece_index(p, tile, blockIdx.y, segment.slot) * rows;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int row = row_of(i);
      float lse = log_sum_exp(maximum[i], sum_of_warps(0, row)), inverse = inverse_of_sum(sum_of_warps(1, row));
      if (split) {
        if (row < rows) of_piece[row] = {lse, 1.0f};
      } else {
        take_sink(p, sink_of(p, tile, row), inverse, lse);
        if (row < tile.rows) store_lse(p, tile, segment.request, Row(p, tile, row), lse);
      }
      store_shared_float(shared.inverse(row), inverse);
    }
  }

  __device__ __forceinline__ float sum_of_warps(int array, int row) const {
    const float4 v = load_shared_float4(shared.of_warp(array, row, 0));
    return (v.x + v.y) + (v.z + v.w);
  }

  // Lanes 4 apart exchange values. Then a thread has the layout of a product with query rows on the M side: columns
  // c, c + 1 of query rows r and r + 8 of a group. `half`: of the 16 columns of a warp.
  __device__ __forceinline__ float4 columns_of(int d, int group, int half) const {
    const bool odd = lane / 4 % 2;
    const float* const of = output[d] + 2 * kOwn * group + 2 * half;  // of two rows; 4 further on, of those 8 later
    const float a = __shfl_xor_sync(0xffffffffu, odd ? of[0] : of[1], 4);
    const float b = __shfl_xor_sync(0xffffffffu, odd ? of[4] : of[5], 4);
    return odd ? float4{a, of[1], b, of[5]} : float4{of[0], a, of[4], b};
  }

  __device__ __forceinline__ void write_output(const Segment& segment, bool split) const {
    const int as_lane = ((lane % 4) * 2 + lane / 4 % 2) * 4 + lane / 8;  // of that layout
    const i64 piece = piece_index(p, tile, blockIdx.y, segment.slot);
#pragma unroll
    for (int group = 0; group < kWideRows / kRowGroup; ++group) {
      if (group >= p.row_groups) break;
      if (split) {
        // A unit of a lane has every second of its tiles.
#pragma unroll
        for (int first = 0; first < 2; ++first)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int unit = 8 * first + 2 * warp + half;
            store_short_unit(
                p.partial_out + piece_offset<kValueDim, kShortLines>(p, piece, consumer, group, unit, as_lane),
                {columns_of(first, group, half), columns_of(first + 2, group, half),
                 columns_of(first + 4, group, half), columns_of(first + 6, group, half)});
          }
      } else {
        const int row = group * kRowGroup + as_lane / 4;
#pragma unroll
        for (int d = 0; d < kHalfTiles; ++d) {
          const int column = consumer * (kValueDim / 2) + (8 * d + 2 * warp) * 8;
          const float4 low = columns_of(d, group, 0), high = columns_of(d, group, 1);
          store_columns<T, 8>(p, tile, segment.request, row, as_lane % 4, column, low.x, low.y, high.x, high.y);
          store_columns<T, 8>(p, tile, segment.request, row + 8, as_lane % 4, column, low.z, low.w, high.z, high.w);
        }
      }
    }
  }
};

}  // namespace cumla::mla
