// SPDX-License-Identifier: Apache-2.0
// Split-KV MLA attention for sm_90a over caches whose latent columns are e4m3, where the heads of a kv head are a
// multiple of 64: mla_decode_fp8_64/kernel.cuh over paged caches of any form and page size.
#include "mla/mla_decode_fp8_64/kernel.cuh"
#include "mla/mla_decode_fp8_64/page_rows.cuh"

namespace cumla::mla {

// AnyTile is Tile, or RaggedTile where query lengths differ.
template <bool kGrouped, bool kRopeIsFp8, typename AnyTile>
__device__ __forceinline__ void mla_decode_fp8_64(const MlaDecodeFp8Params& p) {
  attend_64_heads<PageRows<RowForm<kGrouped, kRopeIsFp8>, AnyTile>>(p);
}

}  // namespace cumla::mla
