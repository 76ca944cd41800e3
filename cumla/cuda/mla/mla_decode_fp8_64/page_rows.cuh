// SPDX-License-Identifier: Apache-2.0
// Rows of a paged cache of any form and page size, for kernel.cuh.
#pragma once
#include "mla/mla_decode_fp8_64/compute.cuh"
#include "mla/mla_decode_fp8_64/load.cuh"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "ptx/types.cuh"

namespace cumla::mla {

using namespace ptx;
using namespace split;

// A row tile has heads of one query token, which all see the same tokens. Each separate array of a row is one copy.
// Absent pages have rows of zeros, as in all MLA kernels.
template <typename RowsForm, typename AnyTile>
struct PageRows {
  using Params = MlaDecodeFp8Params;
  using Form = RowsForm;
  using Tile = AnyTile;
  using Consumer = Heads64Consumer<Form>;

  __device__ __forceinline__ static void prefetch(const Params&, int, int) {}

  __device__ __forceinline__ static float kv_scale(const Params& params) {
    return params.kv_scale == nullptr ? params.kv_scale_value : *params.kv_scale;
  }

  __device__ __forceinline__ static bool lie_together(const CacheColumns& first, const CacheColumns& other,
                                                      int behind) {
    return other.base - first.base == behind && other.stride_page == first.stride_page &&
           other.stride_row == first.stride_row && other.stride_head == first.stride_head;
  }
  // True if a row is contiguous, in the order of shared memory.
  __device__ __forceinline__ static bool is_whole(const Params& params) {
    const MlaDecodeParams& p = params.decode;
    return Form::kRope + Form::kRopeBytes == Form::kBytes && lie_together(p.latent, p.rope, Form::kRope) &&
           (!Form::kGrouped || lie_together(p.latent, params.scales, kPackedScales));
  }

  __device__ __forceinline__ static const char* row_of(const CacheColumns& columns, int page, int row) {
    return columns.base + page * columns.stride_page + row * columns.stride_row + blockIdx.z * columns.stride_head;
  }

  __device__ __forceinline__ static void load(const Params& params, const typename Form::Layout& shared, AnyTile& tile,
                                              const Part& part, int last_place, int warp) {
    const MlaDecodeParams& p = params.decode;
    const bool whole = is_whole(params);
    const int own = warp * kGranuleRows + threadIdx.x % kGranuleRows;
    GranulePlace<typename Form::Layout> at(warp);
#pragma unroll 1
    for (int place = part.place; place <= last_place; ++place) {
      const Segment segment = segment_of(p, tile, part, place);
      const int visible = segment.tokens - tile.least_shift;
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
        load_granule<Form>(shared, at, __ballot_sync(0xffffffffu, sees), [&](u32 to, u32 barrier) {
          const char* const zeros = reinterpret_cast<const char*>(zero_row);
          const char* const latent = there ? row_of(p.latent, page, row) : zeros;
          if (whole) {
            copy_bulk_async(to, latent, Form::kBytes, barrier);
          } else {
            copy_bulk_async(to, latent, kValueDim, barrier);
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
