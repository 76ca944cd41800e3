// SPDX-License-Identifier: Apache-2.0
// Shared memory of mla_decode.
#pragma once
#include "mla/mla_decode/layout.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/types.cuh"

namespace cumla::mla {

using namespace ptx;
using namespace split;

constexpr int kStages = 2;

// kLatentTiles: of 64 columns of a row. Rows of half the width have twice the stages. kHalves: this CTA has half of the
// columns of a row, and the RoPE columns of the query are in registers (mla/mla_decode/halves.cuh).
template <int kLatentTiles, bool kHalves = false>
struct SharedLayoutOf : Widths<kLatentTiles> {
  using Own = Widths<kLatentTiles>;
  using Own::kTiles, Own::kHalfTiles;
  static constexpr int kRopeBytes = kHalves ? kTileBytes / 2 : kTileBytes;
  static constexpr int kStages = 16 / kLatentTiles, kStageBytes = kLatentTiles * kTileBytes + kRopeBytes;
  static constexpr int kExchangeBytes = kHalves ? kRowTile * kBlockTokens * 4 : 0;  // scores of a block
  static_assert(4 * kJoinSpace <= kStages / 2 * kStageBytes, "half of the stages for four combining warps");

  u32 query, stages, probabilities, maxima, sums, barriers;

  __device__ __forceinline__ explicit SharedLayoutOf(u32 base)
      : query(base),
        stages(query + (kHalves ? kLatentTiles * kTileBytes : kStageBytes)),
        probabilities(stages + kStages * kStageBytes),
        maxima(probabilities + kTileBytes + kExchangeBytes),
        sums(maxima + 2 * kRowTile * 4),
        barriers(sums + 4 * kRowTile * 4) {}

  // Stage of block t, which consumer `owner` scores.
  __device__ __forceinline__ static int stage_of(int t, int owner) { return kStages == 2 ? owner : t % kStages; }
  // Parity of the uses of that stage
  __device__ __forceinline__ static u32 phase_of(int t) { return (t / kStages) & 1; }
  __device__ __forceinline__ u32 stage(int s) const { return stages + s * kStageBytes; }
  // The same of the half that the other consumer multiplies
  __device__ __forceinline__ static int other_stage_of(int t, int owner) { return stage_of(t, owner); }
  __device__ __forceinline__ u32 maximum(int owner, int row) const { return maxima + (owner * kRowTile + row) * 4; }
  __device__ __forceinline__ u32 sum(int consumer, int row) const { return sums + (consumer * kRowTile + row) * 4; }
  __device__ __forceinline__ u32 weight(int consumer, int row) const { return sum(2 + consumer, row); }
  // Barriers (table: mla/mla_decode.cu). full: a tile is loaded; with Consumer::kByHalves, the half that begins with
  // it. free: halves 0 and 1 of V, and 2, the RoPE tile.
  __device__ __forceinline__ u32 full(int s, int tile) const { return barriers + (s * kTiles + tile) * 8; }
  __device__ __forceinline__ u32 free(int s, int half) const { return full(kStages, 0) + (s * 3 + half) * 8; }
  __device__ __forceinline__ u32 probabilities_full(int owner) const { return free(kStages, 0) + owner * 8; }
  __device__ __forceinline__ u32 query_full() const { return probabilities_full(2); }
  __device__ __forceinline__ u32 query_free() const { return query_full() + 8; }
  // kHalves: scores that the other CTA left, 16 bytes of a thread each, and whether it may leave others there.
  __device__ __forceinline__ u32 exchange(int i) const {
    return probabilities + kTileBytes + (i * kWarpgroup + threadIdx.x % kWarpgroup) * 16;
  }
  __device__ __forceinline__ u32 exchange_full() const { return query_free() + 8; }
  __device__ __forceinline__ u32 exchange_free(int owner) const { return exchange_full() + 8 + owner * 8; }
  // Written only, within a segment: see Consumer::own_block. Between segments the first two words belong to
  // JoinSpace.
  __device__ __forceinline__ u32 pacer(int thread) const {
    return query_free() + (kHalves ? 32 : 8) + thread * 4;
  }
  // max_logits: those of consumer 1, at the end of a segment.
  __device__ __forceinline__ u32 max_logit(int row) const { return pacer(2 * kWarpgroup) + row * 4; }
};

using SharedLayout = SharedLayoutOf<kRopeTile>;

// Rows of 512 columns: a ring of five slots of 64 rows x 256 columns. Block t takes slots 2 t and 2 t + 1, the first of
// them for its owner's half of V. Consumers have the last tile of the query in registers.
struct RingLayout : SharedLayout {
  static constexpr int kSlots = 5, kSlotBytes = kHalfTiles * kTileBytes;

  __device__ __forceinline__ explicit RingLayout(u32 base) : SharedLayout(base) {
    stages = query + (kRopeTile - 1) * kTileBytes;
    probabilities = stages + kSlots * kSlotBytes;
    maxima = probabilities + kTileBytes;
    sums = maxima + 2 * kRowTile * 4;
    barriers = sums + 4 * kRowTile * 4;
  }
  __device__ __forceinline__ static int slot_of(int n) { return static_cast<u32>(n) % kSlots; }
  __device__ __forceinline__ static u32 phase_of_use(int n) { return (static_cast<u32>(n) / kSlots) & 1; }
  __device__ __forceinline__ static int stage_of(int t, int) { return slot_of(2 * t); }
  __device__ __forceinline__ static int other_stage_of(int t, int) { return slot_of(2 * t + 1); }
  __device__ __forceinline__ static u32 phase_of(int t) { return phase_of_use(2 * t); }
  __device__ __forceinline__ u32 slot(int s) const { return stages + s * kSlotBytes; }
  __device__ __forceinline__ u32 full(int slot, int) const { return barriers + slot * 8; }
  __device__ __forceinline__ u32 free(int slot, int) const { return SharedLayout::free(0, 0) + slot * 8; }
  // Of lists that the kernel reads, of block t: 16 bits a word, set if the row exists, and their barrier.
  static constexpr int kBits = 4;  // blocks
  __device__ __forceinline__ u32 bits(int t) const { return pacer(2 * kWarpgroup) + t % kBits * 16; }
  __device__ __forceinline__ u32 bits_full(int t) const { return SharedLayout::full(1, t % kBits); }
  __device__ __forceinline__ static u32 bits_phase(int t) { return t / kBits & 1; }
};

template <typename AnyTile, bool kHalves, bool kRing = AnyTile::kRing>
struct LayoutOfTile {
  using Type = SharedLayoutOf<AnyTile::kLatentTiles, kHalves>;
};
template <typename AnyTile, bool kHalves>
struct LayoutOfTile<AnyTile, kHalves, true> {
  using Type = RingLayout;
};
template <typename AnyTile>
using LayoutOf = typename LayoutOfTile<AnyTile, kHasHalf<AnyTile>>::Type;

// One thread initialises all barriers, because the hardware serialises such stores. `first` and `second`: arrivals
// for a tile of either half; `query`: for query rows.
template <int kLatentTiles, bool kHalves>
__device__ __forceinline__ void initialise_barriers(const SharedLayoutOf<kLatentTiles, kHalves>& shared, int first,
                                                    int second, int query) {
  using Layout = SharedLayoutOf<kLatentTiles, kHalves>;
#pragma unroll
  for (int s = 0; s < Layout::kStages; ++s) {
#pragma unroll
    for (int tile = 0; tile < Layout::kTiles; ++tile)
      mbarrier_init(shared.full(s, tile), tile < Layout::kHalfTiles ? first : second);
#pragma unroll
    for (int half = 0; half < 3; ++half) mbarrier_init(shared.free(s, half), 4);
  }
#pragma unroll
  for (int owner = 0; owner < 2; ++owner) mbarrier_init(shared.probabilities_full(owner), kWarpgroup / 4);
  mbarrier_init(shared.query_full(), query);
  mbarrier_init(shared.query_free(), 8);
  fence_mbarrier_init();
}

}  // namespace cumla::mla
