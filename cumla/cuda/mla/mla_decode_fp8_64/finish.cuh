// SPDX-License-Identifier: Apache-2.0
// The end of a segment in mla_decode_fp8_64: sums of all warps, then out and log-sum-exp, or a partial result.
#pragma once
#include "mla/mla_decode_fp8_64/compute.cuh"
#include "split/join.cuh"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "ptx/types.cuh"

namespace cumla::mla {

using namespace attend;
using namespace ptx;

template <typename Form, typename AnyTile>
struct Heads64Finisher {
  using Consumer = Heads64Consumer<Form>;
  static constexpr int kValueHalf = Consumer::kValueHalf, kHeads = Form::kHeads, kHeadsOfThread = kHeads / 4;

  Consumer& of;
  const AnyTile& tile;
  const Segment& segment;
  const typename Form::Layout& shared = of.shared;
  const MlaDecodeParams& p = of.p;
  const int consumer = of.consumer, warp = of.warp, lane = of.lane;

  // Called by all threads of both consumers. `more`: the CTA has another segment.
  __device__ __forceinline__ void finish(bool more) {
    of.leave_for_all_warps(of.sum, [](float a, float b) { return a + b; });
    consumers_sync();
    find_factors();
    if (segment.split()) {
      write_transposed_piece<kHeads / kRowGroup, false>(p, tile, segment, of.output, consumer, warp, lane);
      LatentJoiner<Bf16, AnyTile>(
          p,
          {shared.words, shared.probabilities(0), shared.of_warp(0, 0), shared.join_space(),
           shared.join_space() + 4 * kJoinSpace},
          tile, segment)
          .join(more);
    } else {
      of.change_output(0);
      write_rows();
    }
  }

  // A thread per head computes the log-sum-exp and the factor of the output.
  __device__ __forceinline__ void find_factors() const {
    const int head = threadIdx.x - kWarpgroup;
    if (head < kHeads) {
      float total = load_shared_float(shared.of_warp(0, head));
#pragma unroll
      for (int w = 1; w < 8; ++w) total += load_shared_float(shared.of_warp(w, head));
      float factor = total == 0.0f ? 0.0f : (Form::kGrouped ? 1.0f : of.kv_scale) / total;
      float with_sink = 0.0f;
      if constexpr (AnyTile::kHasSinks) {
        with_sink = total == 0.0f ? -kInfinity : lse_of(load_shared_float(shared.reference(head)), total);
        if (!segment.split()) take_sink(p, sink_of(p, tile, head), factor, with_sink);
      }
      store_shared_float(shared.factor(0, head), factor);
      if constexpr (AnyTile::kHasSinks)
        write_lse(head, with_sink, factor);
      else
        write_lse(head, total == 0.0f ? -kInfinity : lse_of(load_shared_float(shared.reference(head)), total), factor);
    }
    consumers_sync();
  }

  // A large sum and a low reference would cancel badly. So their whole exponents are added first.
  __device__ __forceinline__ static float lse_of(float reference, float total) {
    const u32 bits = __float_as_uint(total), exponent = bits >> 23;
    if (exponent == 0 || exponent >= 255) return reference + log2_approx(total);
    const float mantissa = __uint_as_float((bits & 0x7fffff) | 127 << 23);
    return reference + static_cast<float>(static_cast<int>(exponent) - 127) + log2_approx(mantissa);
  }

  __device__ __forceinline__ void write_lse(int row, float lse, float factor) const {
    if (segment.split()) {
      if (row < p.row_groups * kRowGroup)
        p.partial_rows[piece_index(p, tile, blockIdx.y, segment.slot) * p.row_groups * kRowGroup + row] = {lse, factor};
    } else if (row < tile.rows) {
      store_lse(p, tile, segment.request, Row(p, tile, row), lse);
    }
  }

  // Stores eight heads at a time, two per thread. With 16 bits, lanes with adjacent columns exchange words: eight
  // bytes per lane, full sectors of 32 bytes.
  __device__ __forceinline__ void write_rows() const {
    const bool odd = lane / 4 % 2;
    const int column = consumer * 256 + warp * 16 + lane / 4 * 2, own = 2 * (lane % 4);
    char* to = row_of_out(p, tile, segment.request, 0);
    if (p.out_is_float)
      to += own * p.out_stride_head + column * 4;
    else
      to += (own + odd) * p.out_stride_head + (column - 2 * odd) * 2;
#pragma unroll
    for (int i = 0; i < kHeads / 8; ++i, to += 8 * p.out_stride_head) {
      if (p.out_is_float) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          if (8 * i + own + j >= tile.rows) continue;
#pragma unroll
          for (int d = 0; d < kValueHalf; ++d)
            store_global_float2(to + j * p.out_stride_head + d * 256, of.output[d][4 * i + j],
                                of.output[d][4 * i + j + 2]);
        }
      } else {
#pragma unroll
        for (int d = 0; d < kValueHalf; ++d) {
          const float* const v = of.output[d] + 4 * i;
          const u32 first_row = pack_pair<Bf16>(v[0], v[2]), second_row = pack_pair<Bf16>(v[1], v[3]);
          const u32 received = __shfl_xor_sync(0xffffffffu, odd ? first_row : second_row, 4);
          if (8 * i + own + odd < tile.rows)
            store_global_8(to + d * 128, odd ? received : first_row, odd ? second_row : received);
        }
      }
    }
  }
};

}  // namespace cumla::mla
