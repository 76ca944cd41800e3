// SPDX-License-Identifier: Apache-2.0
// MLA attention of each query token over its own list of rows of a 16-bit cache: mla/mla_decode.cu, or for at most 16
// heads mla/mla_decode_swapped.cu, with single rows (kRows), and lists in place of pages (sparse/selected.cuh).
//
// Roles, time line, barriers, shared memory and registers: those files. Rows have 576 columns, or 512, which are all
// values. Over 512 columns more than 16 heads have a ring of five half blocks (RingLayout) in the place of two stages:
// barriers full(slot), at which the 128 copying threads arrive, and free(slot), at which a lane per warp of a consumer
// does (4). Forms that read lists themselves (sparse/listed.cuh) use barriers for bits of the rows that exist: four
// bits_full of the ring, at which the 128 copying threads arrive after they stored a block's bits, and begun of
// mla_decode_swapped, at which a lane of each copying warp does (2). With the ring they take 64 B more shared memory,
// 232,224 B, and a loader's thread has 72 registers, a consumer's 216. Forms with max_logits, which are those of
// mla_decode, take 256 B more shared memory, 232,416 B, and two more registers of a consumer's thread.
#include "mla/mla_decode/kernel.cuh"
#include "mla/mla_decode_swapped/kernel.cuh"
#include "sparse/listed.cuh"
#include "sparse/selected.cuh"

namespace cumla::sparse {

struct MlaSparseMaxLogitsParams : MlaDecodeParams {
  float* max_logits;          // layout of lse, natural units
  float* partial_max_logits;  // [row tile][part][slot][row], base 2
};

// Tiles whose largest score per row is an output. Params are MlaSparseMaxLogitsParams.
template <typename AnyTile>
struct MaxLogitsTile : AnyTile {
  using Held = MaxLogitsTile;
  static constexpr bool kHasMaxLogits = true;
  using AnyTile::AnyTile;

  // Lists have no causal mask. As a constant it keeps bfloat16 kernels with one row tile from spilling registers.
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

// kSharedBlocks: as in mla_decode. AnyTile: SelectedTile<kRowTile>, ValueTile of it, or MaxLogitsTile of either;
// SelectedTile<kSwappedRows>; ListedTile of either number of rows.
template <typename T, bool kSharedBlocks, typename AnyTile>
__device__ __forceinline__ void mla_sparse(const MlaDecodeParams& p) {
  if constexpr (AnyTile::kMostRows == kSwappedRows)
    mla_decode_swapped<T, kRows, AnyTile>(p);
  else
    mla_decode<T, kSharedBlocks, kRows, AnyTile>(p);
}

}  // namespace cumla::sparse
