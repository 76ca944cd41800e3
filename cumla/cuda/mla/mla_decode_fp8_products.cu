// SPDX-License-Identifier: Apache-2.0
// MLA attention over caches with e4m3 latent columns under one factor, for a multiple of 64 heads per kv head, with
// e4m3 tensor-core products. It is mla_decode_fp8_64 with another consumer role
// (mla/mla_decode_fp8_products/compute.cuh). Loaders and barriers are those of mla/mla_decode_fp8_64/kernel.cuh, with
// 16 slots and 4 turns of probabilities. A lane per consumer warp frees the probabilities of up to two blocks at
// once.
//
// Shared memory:  query 40,960 + P of four blocks 16,384 + ring of 16 granules 167,936 + references, factors and sums
//                 3,584 + words 88 + barriers 320 = 229,272 B of 232,448
// Registers:      consumers 240 (output 128, scores 32, sums 16), loaders 24
// Tensor work:    18 + 16 products m64n64k32 per block, 1,088 clocks
#include "mla/mla_decode/masked.cuh"
#include "mla/mla_decode_fp8_64/kernel.cuh"
#include "mla/mla_decode_fp8_64/page_rows.cuh"
#include "mla/mla_decode_fp8_products/compute.cuh"

namespace cumla::mla {

template <bool kRopeIsFp8, typename AnyTile, int kText>
struct ProductRows : PageRows<RowForm<false, kRopeIsFp8, true>, AnyTile> {
  using Consumer = E4m3Consumer<RowForm<false, kRopeIsFp8, true>, kText>;
};

// AnyTile is Tile, or RaggedTile if query lengths differ.
template <bool kRopeIsFp8, typename AnyTile, int kText = 0>
__device__ __forceinline__ void mla_decode_fp8_products(const MlaDecodeFp8Params& p) {
  attend_64_heads<ProductRows<kRopeIsFp8, AnyTile, kText>>(p);
}

}  // namespace cumla::mla
