// SPDX-License-Identifier: Apache-2.0
// The end of a row tile of attention_prefill: out and log-sum-exp, or a partial result.
#pragma once
#include "mha/attention/layout.cuh"
#include "mha/attention_prefill/layout.cuh"
#include "mha/attention_prefill/softmax.cuh"
#include "mha/attention_prefill/split.cuh"
#include "attend/reduce.cuh"
#include "split/tile.cuh"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "ptx/types.cuh"

namespace cumla::mha {

template <typename T, int kKeyTiles, int kValueTiles, int kBlock, int kConsumers, typename Params, bool kSplit,
          bool kCaps>
__device__ __forceinline__ auto
PrefillSoftmax<T, kKeyTiles, kValueTiles, kBlock, kConsumers, Params, kSplit, kCaps>::end_rows(u32 n, bool exists) const
    -> Ending {
  const RaggedTile tile = tile_of(p, read_item(shared, n), consumer);
  const int of_warp = lane % 16, of_tile = warp * 16 + of_warp;
  const float added_up = of_rows(sum_of_quad(sum[0]), sum_of_quad(sum[1]));
  const float highest_score = of_rows(maximum[0], maximum[1]);
  const Query to(p, tile, of_tile);
  Ending ending;
  ending.rows = exists ? tile.rows : 0;
  const bool is_row = of_tile < ending.rows;
  // The sink is added last, so that the weight of a row's only key is exactly 1.
  bool has_sink = is_row && p.sinks != nullptr;
  Segment segment;
  if constexpr (kSplit) {
    segment = read_piece(shared, n).segment;
    ending.is_piece = exists && segment.split();
    has_sink = has_sink && (!segment.split() || segment.first_part == static_cast<int>(blockIdx.y));
  }
  const float given = load_global_float_if(has_sink, p.sinks + to.head, -kInfinity);
  float inverse = inverse_of_sum(added_up), found = log_sum_exp(highest_score, added_up);
  take_sink(p, bounded_sink(given), inverse, found);
  if constexpr (kHasScales<Params>) inverse *= scale_of_head(p.value_scale, tile.index);
  float* const lse =
      p.lse + to.at.batch * p.lse_stride_batch + to.head * p.lse_stride_head + to.at.token * p.lse_stride_token;
  if constexpr (kSplit) {
    const i64 first_row = piece_index(p, tile, blockIdx.y, segment.slot) * p.row_groups * kRowGroup;
    const u64 of_piece = reinterpret_cast<u64>(p.partial_rows + first_row + consumer * 64 + of_tile);
    // All rows of the groups: those behind the tile's rows have no keys.
    const bool is_stored = ending.is_piece ? consumer * 4 + warp < p.row_groups : is_row;
    store_global_float_if(is_stored && lane < 16, ending.is_piece ? of_piece : reinterpret_cast<u64>(lse),
                          !ending.is_piece ? natural_lse(p, given, found) : is_row ? found : -kInfinity);
    store_global_float_if(is_stored && lane < 16 && ending.is_piece, of_piece + 4, 1.0f);
  } else {
    store_global_float_if(is_row && lane < 16, reinterpret_cast<u64>(lse),
                          natural_lse(p, given, found));
  }
  ending.out = reinterpret_cast<u64>(p.out + to.at.batch * p.out_stride_batch + to.at.token * p.out_stride_token +
                                     to.head * p.out_stride_head);
#pragma unroll
  for (int r = 0; r < 2; ++r) ending.inverse[r] = __shfl_sync(0xffffffffu, inverse, lane / 4 + 8 * r);
  return ending;
}

// Returns the number of row lane % 16. `upper` and `lower` belong to the two rows of a quad.
template <typename T, int kKeyTiles, int kValueTiles, int kBlock, int kConsumers, typename Params, bool kSplit,
          bool kCaps>
__device__ __forceinline__ float
PrefillSoftmax<T, kKeyTiles, kValueTiles, kBlock, kConsumers, Params, kSplit, kCaps>::of_rows(
    float upper, float lower) const {
  const float of_upper = __shfl_sync(0xffffffffu, upper, lane % 8 * 4);
  const float of_lower = __shfl_sync(0xffffffffu, lower, lane % 8 * 4);
  return lane % 16 < 8 ? of_upper : of_lower;
}

template <typename T, int kKeyTiles, int kValueTiles, int kBlock, int kConsumers, typename Params, bool kSplit,
          bool kCaps>
__device__ __forceinline__ void
PrefillSoftmax<T, kKeyTiles, kValueTiles, kBlock, kConsumers, Params, kSplit, kCaps>::write(
    const Ending& ending, u32 n) const {
  if constexpr (kSplit)
    if (ending.is_piece) return store_piece<T, Layout, kValueTiles>(p, shared, n, consumer, output, ending.inverse);
  if constexpr (!kCaps) return write_rows(ending);
  if (__builtin_expect(!p.out_is_float, 1))
    write_rows(ending);
  else
    write_float_rows(ending);
}

template <typename T, int kKeyTiles, int kValueTiles, int kBlock, int kConsumers, typename Params, bool kSplit,
          bool kCaps>
__device__ __forceinline__ void
PrefillSoftmax<T, kKeyTiles, kValueTiles, kBlock, kConsumers, Params, kSplit, kCaps>::write_float_rows(
    const Ending& ending) const {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float* const destination =
        reinterpret_cast<float*>(__shfl_sync(0xffffffffu, ending.out, lane / 4 + 8 * r)) + lane % 4 * 2;
    const int columns = row + 8 * r < ending.rows ? p.value_columns : 0;
#pragma unroll
    for (int j = 0; j < kValueTiles * 8; ++j)
      if (j * 8 < columns)
        store_global_float2(destination + j * 8, output[4 * j + 2 * r] * ending.inverse[r],
                            output[4 * j + 2 * r + 1] * ending.inverse[r]);
  }
}

// Stores 64 columns at a time. In the layout of the products four lanes have 32 bytes of a row, so a store touches
// eight lines. Through shared memory eight lanes have a whole line.
template <typename T, int kKeyTiles, int kValueTiles, int kBlock, int kConsumers, typename Params, bool kSplit,
          bool kCaps>
__device__ __forceinline__ void
PrefillSoftmax<T, kKeyTiles, kValueTiles, kBlock, kConsumers, Params, kSplit, kCaps>::write_rows(
    const Ending& ending) const {
  const float (&inverse)[2] = ending.inverse;
  const u32 staged = shared.out(4 * consumer + warp);
  const int to_row = lane % 16, to_chunk = lane / 16, chunk = lane % 8;
#pragma unroll
  for (int v = 0; v < kValueTiles; ++v) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float* const o = output + 32 * v + 8 * k;
      store_matrix_x4(staged + to_row * 128 + (((2 * k + to_chunk) ^ (to_row & 7)) << 4),
                      pack_pair<T>(o[0] * inverse[0], o[1] * inverse[0]),
                      pack_pair<T>(o[2] * inverse[1], o[3] * inverse[1]),
                      pack_pair<T>(o[4] * inverse[0], o[5] * inverse[0]),
                      pack_pair<T>(o[6] * inverse[1], o[7] * inverse[1]));
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = 4 * i + lane / 8;
      char* const destination = reinterpret_cast<char*>(__shfl_sync(0xffffffffu, ending.out, at));
      const uint4 bits = load_shared_16(staged + at * 128 + ((chunk ^ (at & 7)) << 4));
      if (warp * 16 + at < ending.rows && v * 64 + chunk * 8 < p.value_columns)
        *reinterpret_cast<uint4*>(destination + v * 128 + chunk * 16) = bits;
    }
    __syncwarp();
  }
}

}  // namespace cumla::mha
