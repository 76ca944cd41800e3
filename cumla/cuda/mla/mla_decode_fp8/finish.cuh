// SPDX-License-Identifier: Apache-2.0
// The end of a segment in mla_decode_fp8: both consumers' results are added up, half of V's columns each, and stored
// as out and log-sum-exp, or as a partial result.
#pragma once
#include "mla/mla_decode_fp8/compute.cuh"
#include "attend/reduce.cuh"
#include "split/join.cuh"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/types.cuh"

namespace cumla::mla {

using namespace attend;
using namespace ptx;
using namespace split;

template <int kQueryRows, bool kGrouped, PageForm kForm, typename AnyTile>
struct Fp8Finisher {
  using Consumer = Fp8Consumer<kQueryRows, kGrouped, kForm, AnyTile>;
  using Layout = typename Consumer::Layout;
  static constexpr int kOwn = Consumer::kOwn, kHalfTiles = Consumer::kHalfTiles;
  static constexpr int kRounds = kQueryRows / 16;      // in which consumers exchange halves
  static constexpr int kSets = kGrouped ? 2 : 1;       // of factors: one per group of columns in a half

  Consumer& of;
  const Segment& segment;
  const Layout& shared = of.shared;
  const MlaDecodeParams& p = of.p;
  const AnyTile& tile = of.tile;
  const int consumer = of.consumer, warp = of.warp, lane = of.lane;

  // Called by all threads of both consumers. `more`: the CTA has another segment.
  // model: fp8_segments
  __device__ __forceinline__ void finish(bool more) {
    leave_sums();
    consumers_sync();  // query and probabilities are no longer used
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
#pragma unroll
      for (int i = 0; i < Layout::kExchanged; ++i) {
        const float* const v = of.output[kHalfTiles + i / 2] + round * 8 + i % 2 * 4;
        store_shared_float4(shared.exchange(of.n, consumer, i), {v[0], v[1], v[2], v[3]});
      }
      consumers_sync();
      float own[kSets][4], other[kSets][4];
      find_factors(round * 4, own, other);  // plant: exchange
      add_up(round, own, other);
      if (round + 1 < kRounds) consumers_sync();
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(shared.query_free(of.n));  // plant: query read
    write_output();
    if (segment.split())
      LatentJoiner<Bf16, AnyTile, (kHalfTiles < 4)>(
          p,
          {shared.words, shared.probabilities, shared.maxima, shared.ring, shared.ring + 4 * kJoinSpace},
          tile, segment)
          .join(more);
  }

  // model: fp8_segments, fp8_data
  __device__ __forceinline__ void leave_sums() const {
    sum_over_column(of.sum);
    if (lane >= 4) return;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int row = of.row_of(i);
      store_shared_float(shared.sum(row, consumer * 4 + warp), of.sum[i]);
      if (warp > 0) continue;
      keep(shared.reference(consumer, row), shared.last_reference(consumer, row));
      if constexpr (kGrouped) {
#pragma unroll
        for (int group = 0; group < kScaleGroups; ++group)
          keep(shared.group_reference(consumer, group, row), shared.last_group_reference(consumer, group, row));
      }
    }
  }
  __device__ __forceinline__ static void keep(u32 from, u32 to) { store_shared_float(to, load_shared_float(from)); }

  // Computes the factors of this consumer's sums and of those that it receives, with normalisation and scale, and the
  // log-sum-exp.
  __device__ __forceinline__ void find_factors(int first, float (&own)[kSets][4], float (&other)[kSets][4]) const {
    const bool writes = consumer == 0 && warp == 0 && lane < 4;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int row = of.row_of(first + k);
      const float ours = load_shared_float(shared.last_reference(consumer, row));
      const float theirs = load_shared_float(shared.last_reference(1 - consumer, row));
      const float highest = fmaxf(ours, theirs);
      const float total = exp2_approx(ours - highest) * sum_of_four(shared.sum(row, consumer * 4)) +
                          exp2_approx(theirs - highest) * sum_of_four(shared.sum(row, (1 - consumer) * 4));
      float inverse = total == 0.0f ? 0.0f : of.kv_scale / total;
      float with_sink = 0.0f;
      if constexpr (AnyTile::kHasSinks) {
        with_sink = log_sum_exp(highest, total);
        if (!segment.split()) take_sink(p, sink_of(p, tile, row), inverse, with_sink);
      }
#pragma unroll
      for (int set = 0; set < kSets; ++set) {
        own[set][k] = exp2_approx(reference_of(consumer, set, row) - highest) * inverse;
        other[set][k] = exp2_approx(reference_of(1 - consumer, set, row) - highest) * inverse;
      }
      if (writes)
        write_lse(row, AnyTile::kHasSinks ? with_sink : log_sum_exp(highest, total));
    }
  }

  // The reference of a consumer's sums for the columns of this consumer's half.
  __device__ __forceinline__ float reference_of(int whose, int set, int row) const {
    return load_shared_float(kGrouped ? shared.last_group_reference(whose, consumer * 2 + set, row)
                                      : shared.last_reference(whose, row));
  }

  __device__ __forceinline__ static float sum_of_four(u32 source) {
    const float4 v = load_shared_float4(source);
    return (v.x + v.y) + (v.z + v.w);
  }

  // Adds the other consumer's output to this consumer's half, for 16 query rows.
  // model: fp8_segments
  __device__ __forceinline__ void add_up(int round, const float (&all_own)[kSets][4],
                                         const float (&all_other)[kSets][4]) const {
#pragma unroll
    for (int i = 0; i < Layout::kExchanged; ++i) {
      float* const v = of.output[i / 2] + round * 8 + i % 2 * 4;
      const float4 theirs = load_shared_float4(shared.exchange(of.n, 1 - consumer, i));
      const int row = i % 2 * 2, set = kGrouped ? i / 4 : 0;  // 64 columns are two float4
      const float(&own)[4] = all_own[set], (&other)[4] = all_other[set];
      v[0] = v[0] * own[row] + theirs.x * other[row];
      v[1] = v[1] * own[row + 1] + theirs.y * other[row + 1];
      v[2] = v[2] * own[row] + theirs.z * other[row];
      v[3] = v[3] * own[row + 1] + theirs.w * other[row + 1];
    }
  }

  __device__ __forceinline__ void write_lse(int row, float lse) const {
    if (segment.split())
      p.partial_rows[piece_index(p, tile, blockIdx.y, segment.slot) * kQueryRows + row] = {lse, 1.0f};
    else if (row < tile.rows)
      store_lse(p, tile, segment.request, Row(p, tile, row), lse);
  }

  // A thread has two adjacent columns of each 64: 2 (lane / 4) of its warp's 16.
  __device__ __forceinline__ void write_output() const {
    if (segment.split())
      write_transposed_piece<kRounds, true>(p, tile, segment, of.output, consumer, warp, lane);
    else
#pragma unroll
      for (int i = 0; i < 2 * kRounds; ++i) write_rows(8 * i, 4 * i);
  }

  // Stores this thread's two rows from `first` on, whose accumulators begin at `at`: v[0] and v[2] of one row, v[1]
  // and v[3] of the next. With 16 bits, lanes with adjacent columns exchange words: eight bytes per lane, full
  // sectors of 32 bytes.
  // model: fp8_data
  __device__ __forceinline__ void write_rows(int first, int at) const {
    const bool odd = lane / 4 % 2;
    const int row = first + 2 * (lane % 4), column = consumer * (Layout::kValueDim / 2) + warp * 16 + lane / 4 * 2;
    if (p.out_is_float) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (row + j >= tile.rows) continue;
        char* const to = address_of(row + j) + column * 4;
#pragma unroll
        for (int d = 0; d < kHalfTiles; ++d)
          store_global_float2(to + d * 256, of.output[d][at + j], of.output[d][at + j + 2]);
      }
    } else {
      const bool exists = row + odd < tile.rows;
      char* const to = address_of(exists ? row + odd : 0) + (column - 2 * odd) * 2;
#pragma unroll
      for (int d = 0; d < kHalfTiles; ++d) {
        const float* const v = of.output[d] + at;
        const u32 first_row = pack_pair<Bf16>(v[0], v[2]), second_row = pack_pair<Bf16>(v[1], v[3]);
        const u32 received = __shfl_xor_sync(0xffffffffu, odd ? first_row : second_row, 4);
        if (exists) store_global_8(to + d * 128, odd ? received : first_row, odd ? second_row : received);
      }
    }
  }

  __device__ __forceinline__ char* address_of(int row) const {
    const Row to(p, tile, row);
    return p.out + segment.request * p.out_stride_batch + to.token * p.out_stride_token + to.head * p.out_stride_head;
  }
};

}  // namespace cumla::mla
