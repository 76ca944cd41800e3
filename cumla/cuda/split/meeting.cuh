// SPDX-License-Identifier: Apache-2.0
// The CTAs of a split request meet at the ticket of its first part to combine their partial results.
// docs/kernels/schedule.md says who waits, who continues, and who combines the shares of CTAs that left.
#pragma once
#include "split/plan.cuh"
#include "split/tile.cuh"
#include "ptx/copy.cuh"
#include "ptx/sync.cuh"
#include "ptx/types.cuh"

namespace cumla::split {

using namespace ptx;

constexpr int kConsumersBarrier = 1;  // named barrier
constexpr long long kPatience = 40000;  // clocks, about 20 us; parts have similar cost, so all arrive soon

__device__ __forceinline__ void consumers_sync() { named_barrier_sync<kConsumersBarrier, 2 * kWarpgroup>(); }

// One split request. All threads of both consumers take part.
template <typename Params>
struct Meeting {
  enum Role : u32 { kGoOn, kOwnShare, kLast };
  // model: join
  static constexpr u32 kAll = 1u << 31;

  const Params& p;
  const Segment& segment;
  const u32 words;               // address of two words in shared memory that all threads read
  const int pieces, warp, lane;  // warp: 0 to 7 over both consumers

  // Returns which of the CTAs `from` to `from` + 31 left without waiting, as a mask that all threads agree on.
  // model: join
  __device__ __forceinline__ u32 who_left(Ticket* tickets, int from, int mine) const {
    consumers_sync();
    if (warp == 0) {
      const int i = from + lane;
      u32* const flag = &tickets[segment.first_part + i].left[slot_of(i)];
      const bool left = i < pieces && i != mine && load_acquire(flag) != 0;
      const u32 mask = __ballot_sync(0xffffffffu, left);
      if (left) store_relaxed(flag, 0);
      if (lane == 0) store_shared_u32(words + 4, mask);
    }
    consumers_sync();
    return load_shared_u32(words + 4);
  }

  // Called by one thread, after its CTA has stored its partial result.
  // model: join
  __device__ __forceinline__ Role arrive(u32* arrived, u32* left, bool more) const {
    const bool waits = !more && p.may_wait;  // plant: waiting
    if (!waits) store_relaxed(left, 1);
    const u32 step = segment.first_part == blockIdx.y ? kAll - (pieces - 1) : 1;
    const u32 before = atomic_add_acq_rel(arrived, step);
    auto all_arrived = [&](u32 now) { return ((now ^ before) & kAll) != 0; };
    if (all_arrived(before + step)) {
      fence_sc_gpu();  // orders the ticket before the flags: a CTA that gives up sees the ticket, or its flag is seen
      return kLast;
    }
    if (!waits) return kGoOn;
    const long long start = clock64();
    while (!all_arrived(load_acquire(arrived))) {  // plant: arrivals
      if (clock64() - start < kPatience) continue;  // plant: patience
      store_relaxed(left, 1);
      fence_sc_gpu();
      if (!all_arrived(load_acquire(arrived))) return kGoOn;
      // The last CTA may have read the flag and combine this share, too; it computes the same bits
      store_relaxed(left, 0);
      return kOwnShare;
    }
    return kOwnShare;
  }

  __device__ __forceinline__ int slot_of(int i) const { return i == 0 ? segment.first_slot : 0; }
};

}  // namespace cumla::split
