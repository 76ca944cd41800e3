// SPDX-License-Identifier: Apache-2.0
// MLA attention of each query token to its own list of cache rows, for caches in 16 bits: mla/mla_decode.cu, whose
// rows come one by one (kRows), with lists in place of pages (sparse/selected.cuh). Roles, time line, shared memory
// and registers are those of that kernel. Rows have 576 columns, or 512, all of which are values.
#include "mla/mla_decode.cu"
#include "sparse/selected.cuh"

namespace cumla::sparse {

// Rows of 512 columns.
struct ValueTile : SelectedTile<kRowTile> {
  using Held = ValueTile;
  static constexpr bool kHasRope = false;
  using SelectedTile<kRowTile>::SelectedTile;
};

// kSharedBlocks: several row tiles read the same rows. AnyTile: SelectedTile<kRowTile> or ValueTile.
template <typename T, bool kSharedBlocks, typename AnyTile>
__device__ __forceinline__ void mla_sparse(const MlaDecodeParams& p) {
  mla_decode<T, kSharedBlocks, kRows, AnyTile>(p);
}

}  // namespace cumla::sparse
