// SPDX-License-Identifier: Apache-2.0
// MLA attention of each query token over its own list of packed FP8 rows: mla/mla_decode_fp8_64/kernel.cuh, with
// lists in place of pages. Rows have 656 bytes, or 528 without RoPE columns, or
// 512 without their own scales, too.
//
// grid = (row tiles of up to 16, 32 or 64 heads, parts, 1). Roles, time line, barriers and budget: kernel.cuh.
#include "mla/mla_decode_fp8_64/kernel.cuh"
#include "mla/mla_decode_fp8_64/one_factor.cuh"
#include "sparse/lists.cuh"
#include "sparse/selected.cuh"
#include "ptx/copy.cuh"
#include "ptx/types.cuh"

namespace cumla::sparse {

using namespace ptx;

struct MlaSparsePackedParams {
  MlaDecodeParams decode;  // latent: whole rows
  Lists lists;
};

struct MlaSparseE4m3Params : MlaSparsePackedParams {
  const float* kv_scale;  // factor of all columns; null: kv_scale_value
  float kv_scale_value;
  int unused;
};

template <bool kRope, int kTileHeads>
struct PackedTile : ListTile<kTileHeads> {
  using Held = PackedTile;
  static constexpr bool kHasRope = kRope;
  __device__ __forceinline__ explicit PackedTile(const MlaDecodeParams& p)
      : ListTile<kTileHeads>(p, p.row_groups * kRowGroup) {}
};

// AnyParams: MlaSparsePackedParams, or without scales MlaSparseE4m3Params.
template <bool kScales, bool kRope, typename AnyParams, int kTileHeads>
struct ListRows {
  using Params = AnyParams;
  using Form = RowForm<kScales, false, false, kRope, kTileHeads>;
  using Consumer = typename ConsumerOf<Form>::Type;
  using Tile = PackedTile<kRope, kTileHeads>;

  __device__ __forceinline__ static void prefetch(const Params& params, int thread, int threads) {
    prefetch_lists(params.decode, params.lists, params.decode.max_tokens, thread, threads);
  }

  __device__ __forceinline__ static float kv_scale(const Params& params) {
    if constexpr (kScales)
      return 1.0f;
    else
      return params.kv_scale == nullptr ? params.kv_scale_value : *params.kv_scale;
  }

  __device__ __forceinline__ static void load(const Params& params, const typename Form::Layout& shared, Tile& tile,
                                              const Part& part, int last_place, int warp) {
    const MlaDecodeParams& p = params.decode;
    const int own = warp * kGranuleRows + threadIdx.x % kGranuleRows;
    GranulePlace<typename Form::Layout> at(warp);
#pragma unroll 1
    for (int place = part.place; place <= last_place; ++place) {
      const Segment segment = segment_of(p, tile, part, place);
      const int first = segment.begin * kBlockTokens + own;
      ListWalk walk(params.lists, List(params.lists, segment.request, tile.q_begin), first, segment.tokens);
#pragma unroll 1
      for (int blocks = segment.blocks; blocks > 0; --blocks) {
        const int row = walk.next(params.lists);
        load_granule<Form>(shared, at, __ballot_sync(0xffffffffu, row >= 0), [&](u32 to, u32 barrier) {
          const char* const zeros = reinterpret_cast<const char*>(zero_row);
          copy_bulk_async(to, row >= 0 ? p.latent.base + row * p.latent.stride_page : zeros, Form::kBytes, barrier);
        });
        at.advance();
      }
    }
  }
};

// kTileHeads: heads of a tile, at most: 16, 32 or 64.
template <bool kRope, int kTileHeads>
__device__ __forceinline__ void mla_sparse_packed(const MlaSparsePackedParams& p) {
  attend_64_heads<ListRows<true, kRope, MlaSparsePackedParams, kTileHeads>>(p);
}

template <int kTileHeads>
__device__ __forceinline__ void mla_sparse_e4m3(const MlaSparseE4m3Params& p) {
  attend_64_heads<ListRows<false, false, MlaSparseE4m3Params, kTileHeads>>(p);
}

}  // namespace cumla::sparse
