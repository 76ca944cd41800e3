// SPDX-License-Identifier: Apache-2.0
// mbarriers. Addresses are in the shared window; a barrier has 8 bytes.
#pragma once
#include "ptx/types.cuh"

namespace cumla::ptx {

// PTX ISA: Parallel Synchronization and Communication Instructions: mbarrier.init
__device__ __forceinline__ void mbarrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// PTX ISA: Parallel Synchronization and Communication Instructions: fence (mbarrier_init)
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// PTX ISA: Parallel Synchronization and Communication Instructions: mbarrier.arrive
__device__ __forceinline__ void mbarrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// PTX ISA: Parallel Synchronization and Communication Instructions: mbarrier.arrive (expect_tx)
__device__ __forceinline__ void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// PTX ISA: Data Movement and Conversion Instructions: cp.async.mbarrier.arrive
// This thread's arrival is triggered when all of its earlier cp.async copies have completed. The barrier counts it
// among the expected arrivals (noinc).
__device__ __forceinline__ void mbarrier_arrive_after_copies(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// PTX ISA: Parallel Synchronization and Communication Instructions: mbarrier.try_wait
__device__ __forceinline__ bool mbarrier_try_wait(u32 barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{\n"
      ".reg .pred complete;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 complete, [%1], %2;\n"
      "selp.u32 %0, 1, 0, complete;\n"
      "}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

// PTX ISA: Parallel Synchronization and Communication Instructions: mbarrier.test_wait
// Returns at once, unlike try_wait.
__device__ __forceinline__ bool mbarrier_test(u32 barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{\n"
      ".reg .pred complete;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 complete, [%1], %2;\n"
      "selp.u32 %0, 1, 0, complete;\n"
      "}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

// Returns once the phase with this parity has completed. A debug build reports `name` when it traps.
__device__ __forceinline__ void mbarrier_wait(u32 barrier, u32 parity, const char* name) {
#ifdef CUMLA_DEBUG
  const long long start = clock64();
  while (!mbarrier_try_wait(barrier, parity)) {
    if (clock64() - start > 2000000000ll) {  // about one second
      printf("cumla: block (%d,%d,%d) thread %d waited too long for %s, parity %u\n", (int)blockIdx.x,
             (int)blockIdx.y, (int)blockIdx.z, (int)threadIdx.x, name, parity);
      __trap();
    }
  }
#else
  (void)name;
  while (!mbarrier_try_wait(barrier, parity)) {
  }
#endif
}

// A slot of a ring with barriers per slot, and the parity of the current round.
template <u32 kSlots>
struct RingPlace {
  u32 slot = 0, phase = 0;

  __device__ __forceinline__ void advance(u32 slots) {
    slot += slots;
    if (slot >= kSlots) {
      slot -= kSlots;
      phase ^= 1;
    }
  }
  __device__ __forceinline__ RingPlace ahead(u32 slots) const {
    RingPlace place = *this;
    place.advance(slots);
    return place;
  }
};

}  // namespace cumla::ptx
