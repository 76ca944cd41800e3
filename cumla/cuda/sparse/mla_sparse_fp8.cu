// SPDX-License-Identifier: Apache-2.0
// MLA attention of each query token over its own list of rows of an e4m3 cache: mla/mla_decode_fp8.cu with single
// rows (kRows, kPackedRows), and lists in place of pages (sparse/selected.cuh). Rows have 576 columns, or 512, which
// are all values.
//
// Roles, time line, barriers, shared memory and registers: mla/mla_decode_fp8.cu.
#include "mla/mla_decode_fp8.cu"
#include "sparse/lists.cuh"
#include "sparse/selected.cuh"
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/types.cuh"

namespace cumla::sparse {

using namespace ptx;

// AnyTile: SelectedTile<kQueryRows>, or ValueTile of it.
template <int kQueryRows, bool kGrouped, typename AnyTile = SelectedTile<kQueryRows>>
__device__ __forceinline__ void mla_sparse_fp8(const MlaDecodeFp8Params& p) {
  mla_decode_fp8<kQueryRows, kGrouped, kRows, AnyTile>(p);
}

struct MlaSparseFp8Params : MlaDecodeFp8Params {
  Lists lists;
};

// The caller's lists of packed rows: of 656 bytes, or of 528 without RoPE columns. Each of two warps loads half of the
// rows of every block, one bulk copy per lane.
template <int kTileRows, bool kRope>
struct PackedListTile : ListTile<kTileRows> {
  using Held = PackedListTile;
  using ListTile<kTileRows>::ListTile;
  static constexpr bool kHasRope = kRope;
  static constexpr int kBytes = kRope ? kPackedBytes : kPackedRope;

  template <typename Layout>
  __device__ __forceinline__ void load_rows(const MlaDecodeFp8Params& params, const Layout& shared, const Part& part,
                                            int last_place, int warp) {
    constexpr int kShare = kBlockTokens / 2;
    const MlaDecodeParams& p = params.decode;
    const Lists& lists = static_cast<const MlaSparseFp8Params&>(params).lists;
    const int lane = threadIdx.x % 32, own = warp * kShare + lane;
    u32 t = 0;
#pragma unroll 1
    for (int place = part.place; place <= last_place; ++place) {
      const Segment segment = segment_of(p, *this, part, place);
      const int first = segment.begin * kBlockTokens + own;
      ListWalk walk(lists, List(lists, segment.request, this->q_begin), first, segment.tokens);
#pragma unroll 1
      for (int blocks = segment.blocks; blocks > 0; --blocks, ++t) {
        const int row = walk.next(lists);
        const u32 s = t % Layout::kSlots, full = shared.full(s);
        mbarrier_wait(shared.free(s), t / Layout::kSlots % 2 ^ 1, "a free KV slot");
        const u32 exist = __ballot_sync(0xffffffffu, row >= 0);
        if (lane == 0) {
          store_shared_u32(shared.exist(s, warp), exist);
          mbarrier_arrive_expect_tx(full, kShare * kBytes);
        }
        __syncwarp();
        copy_bulk_async(shared.slot(s) + own * kPackedBytes,
                        row >= 0 ? p.latent.base + row * p.latent.stride_page : p.rope.base, kBytes, full);
      }
    }
  }
};

template <int kQueryRows, bool kRope>
__device__ __forceinline__ void mla_sparse_fp8_packed(const MlaSparseFp8Params& p) {
  mla_decode_fp8<kQueryRows, true, kPackedRows, PackedListTile<kQueryRows, kRope>>(p);
}

}  // namespace cumla::sparse
