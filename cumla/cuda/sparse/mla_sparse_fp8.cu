// SPDX-License-Identifier: Apache-2.0
// MLA attention of each query token to its own list of cache rows, for caches with e4m3 columns: mla/mla_decode_fp8.cu,
// whose rows come one by one (kRows), with lists in place of pages (sparse/selected.cuh). Roles, time line, shared
// memory and registers are those of that kernel.
#include "mla/mla_decode_fp8.cu"
#include "sparse/selected.cuh"

namespace cumla::sparse {

// kForm: kRows, or kPackedRows where rows are packed and heads at most 16.
template <int kQueryRows, bool kGrouped, PageForm kForm>
__device__ __forceinline__ void mla_sparse_fp8(const MlaDecodeFp8Params& p) {
  mla_decode_fp8<kQueryRows, kGrouped, kForm, SelectedTile<kQueryRows>>(p);
}

}  // namespace cumla::sparse
