// SPDX-License-Identifier: Apache-2.0
// MLA attention of each query token to its own list of cache rows, for caches in 16 bits: mla/mla_decode.cu, whose
// rows come one by one (kRows), with lists in place of pages (sparse/selected.cuh). Roles, time line, shared memory
// and registers are those of that kernel.
#include "mla/mla_decode.cu"
#include "sparse/selected.cuh"

namespace cumla::sparse {

// kSharedBlocks: several row tiles read the same rows.
template <typename T, bool kSharedBlocks>
__device__ __forceinline__ void mla_sparse(const MlaDecodeParams& p) {
  mla_decode<T, kSharedBlocks, kRows, SelectedTile<kRowTile>>(p);
}

}  // namespace cumla::sparse
