// SPDX-License-Identifier: Apache-2.0
// Rows of a paged cache of any form and page size, for kernel.cuh.
#pragma once
#include "mla/mla_decode_fp8_64/compute.cuh"
#include "mla/mla_decode_fp8_64/load.cuh"
#include "mla/mla_decode_fp8_64/one_factor.cuh"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "ptx/tma.cuh"
#include "ptx/types.cuh"

namespace cumla::mla {

using namespace ptx;
using namespace split;

// Of a CTA with as many blocks, rows under one factor come one by one: nothing waits for a tensor map then.
constexpr int kFewBlocks = 4;

// A row tile has heads of one query token, which all see the same tokens. Each separate array of a row is one copy.
// Absent pages have rows of zeros, as in all MLA kernels.
template <typename RowsForm, typename AnyTile>
struct PageRows {
  using Params = MlaDecodeFp8Params;
  using Form = RowsForm;
  using Tile = AnyTile;
  using Consumer = typename ConsumerOf<Form>::Type;

  __device__ __forceinline__ static void prefetch(const Params& params, int thread, int) {
    if (thread == 0 && params.decode.box_rows) prefetch_tensor_map(&params.decode.latent_map);
  }

  __device__ __forceinline__ static float kv_scale(const Params& params) {
    return params.kv_scale == nullptr ? params.kv_scale_value : *params.kv_scale;
  }

  __device__ __forceinline__ static const char* row_of(const CacheColumns& columns, int page, int row) {
    return columns.base + page * columns.stride_page + row * columns.stride_row + blockIdx.z * columns.stride_head;
  }

  __device__ __forceinline__ static void load(const Params& params, const typename Form::Layout& shared, AnyTile& tile,
                                              const Part& part, int last_place, int warp) {
    const MlaDecodeParams& p = params.decode;
    const int own = warp * kGranuleRows + threadIdx.x % kGranuleRows;
    GranulePlace<typename Form::Layout> at(warp);
#pragma unroll 1
    for (int place = part.place; place <= last_place; ++place) {
      const Segment segment = segment_of(p, tile, part, place);
      const int visible = segment.tokens - tile.least_shift;
      const bool row_by_row = !Form::kGrouped && part.place == last_place && segment.blocks <= kFewBlocks;
      int token = segment.begin * kBlockTokens + own;
      auto page_at = [&](int token) {
        return token < segment.tokens ? page_of(p, tile, segment, quotient(token, p.by_page_size)) : -1;
      };
      int next_page = page_at(token);
#pragma unroll 1
      for (int blocks = segment.blocks; blocks > 0; --blocks, token += kBlockTokens) {
        const int page = next_page, row = token - quotient(token, p.by_page_size) * p.page_size;
        next_page = page_at(token + kBlockTokens);
        const bool sees = token < visible;
        const bool there = sees && static_cast<u32>(page) < p.num_pages;
        if (p.box_rows && !row_by_row && __all_sync(0xffffffffu, there)) {
          load_whole_granule(shared, at, [&](u32 to, u32 barrier) {
            tma_load_4d_async(to, &p.latent_map, barrier, 0, row, blockIdx.z, page);
          });
          at.advance();
          continue;
        }
        load_granule<Form>(shared, at, __ballot_sync(0xffffffffu, sees), [&](u32 to, u32 barrier) {
          const char* const zeros = reinterpret_cast<const char*>(zero_row);
          const char* const latent = there ? row_of(p.latent, page, row) : zeros;
          if (!p.rope_is_apart) {
            copy_bulk_async(to, latent, Form::kBytes, barrier);
          } else {
            copy_bulk_async(to, latent, kValueDim, barrier);
            if constexpr (Form::kHasRope)
              copy_bulk_async(to + Form::kRope, there ? row_of(p.rope, page, row) : zeros, Form::kRopeBytes, barrier);
            if constexpr (Form::kGrouped)
              copy_bulk_async(to + kPackedScales, there ? row_of(params.scales, page, row) : zeros, Form::kScaleBytes,
                              barrier);
          }
        });
        at.advance();
      }
    }
  }
};

}  // namespace cumla::mla
