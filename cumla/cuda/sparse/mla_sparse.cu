// SPDX-License-Identifier: Apache-2.0
// MLA attention of each query token to its own list of cache rows, for caches in 16 bits: mla/mla_decode.cu, whose
// rows come one by one (kRows), with lists in place of pages (sparse/selected.cuh). Roles, time line, shared memory
// and registers are those of that kernel. Rows have 576 columns, or 512, all of which are values. Some forms give
// max_logits, too: 256 bytes of shared memory more, 232,416 in all, and two registers of a consumer's thread.
#include "mla/mla_decode.cu"
#include "sparse/selected.cuh"

namespace cumla::sparse {

// Rows of 512 columns.
struct ValueTile : SelectedTile<kRowTile> {
  using Held = ValueTile;
  static constexpr bool kHasRope = false;
  using SelectedTile<kRowTile>::SelectedTile;
};

struct MlaSparseMaxLogitsParams : MlaDecodeParams {
  float* max_logits;          // as lse lies, natural units
  float* partial_max_logits;  // [row tile][part][slot][row], base 2
};

// Rows whose largest score is an output, too. Params are those above.
template <typename AnyTile>
struct MaxLogitsTile : AnyTile {
  using Held = MaxLogitsTile;
  static constexpr bool kHasMaxLogits = true;
  using AnyTile::AnyTile;

  // Known when it is compiled, or bfloat16 kernels of one row tile spill registers: no list has a causal mask.
  __device__ __forceinline__ static int shift_of(const MlaDecodeParams&, int) { return 0; }
  __device__ __forceinline__ static float* partial_max_logit(const MlaDecodeParams& p, i64 piece, int row) {
    return static_cast<const MlaSparseMaxLogitsParams&>(p).partial_max_logits + piece * p.row_groups * kRowGroup + row;
  }
  __device__ __forceinline__ static void store_max_logit(const MlaDecodeParams& p, int request, const Row& to,
                                                         float highest) {
    float* const max_logits = static_cast<const MlaSparseMaxLogitsParams&>(p).max_logits;
    max_logits[request * p.lse_stride_batch + to.head * p.lse_stride_head + to.token * p.lse_stride_token] =
        highest * kLn2;
  }
};

// kSharedBlocks: as there. AnyTile: SelectedTile<kRowTile>, ValueTile, or MaxLogitsTile of either.
template <typename T, bool kSharedBlocks, typename AnyTile>
__device__ __forceinline__ void mla_sparse(const MlaDecodeParams& p) {
  mla_decode<T, kSharedBlocks, kRows, AnyTile>(p);
}

}  // namespace cumla::sparse
