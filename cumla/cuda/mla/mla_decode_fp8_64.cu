// SPDX-License-Identifier: Apache-2.0
// MLA attention over caches with e4m3 latent columns, for a multiple of 64 heads per kv head: paged caches of any
// form and page size. mla/mla_decode_fp8_64/kernel.cuh has the roles, time line, barriers and budget.
#include "mla/mla_decode/masked.cuh"
#include "mla/mla_decode_fp8_64/kernel.cuh"
#include "mla/mla_decode_fp8_64/page_rows.cuh"

namespace cumla::mla {

// AnyTile is Tile, or RaggedTile if query lengths differ; or a WidthTile of them for rows without RoPE columns.
template <bool kGrouped, bool kRopeIsFp8, typename AnyTile>
__device__ __forceinline__ void mla_decode_fp8_64(const MlaDecodeFp8Params& p) {
  attend_64_heads<PageRows<RowForm<kGrouped, kRopeIsFp8, false, AnyTile::kHasRope>, AnyTile>>(p);
}

}  // namespace cumla::mla
