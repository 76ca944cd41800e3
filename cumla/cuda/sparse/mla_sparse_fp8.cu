// SPDX-License-Identifier: Apache-2.0
// MLA attention of each query token over its own list of rows of an e4m3 cache: mla/mla_decode_fp8.cu with single
// rows (kRows), and lists in place of pages (sparse/selected.cuh). Rows have 576 columns.
//
// Roles, time line, barriers, shared memory and registers: mla/mla_decode_fp8.cu.
#include "mla/mla_decode_fp8/kernel.cuh"
#include "sparse/selected.cuh"

namespace cumla::sparse {

template <int kQueryRows, bool kGrouped>
__device__ __forceinline__ void mla_sparse_fp8(const MlaDecodeFp8Params& p) {
  mla_decode_fp8<kQueryRows, kGrouped, kRows, SelectedTile<kQueryRows>>(p);
}

}  // namespace cumla::sparse
