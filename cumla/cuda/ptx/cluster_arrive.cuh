// SPDX-License-Identifier: Apache-2.0
// Thread block clusters: arrivals at an mbarrier of another CTA.
#pragma once
#include "ptx/types.cuh"

namespace cumla::ptx {

// PTX ISA: Parallel Synchronization and Communication Instructions: mbarrier.arrive
__device__ __forceinline__ void mbarrier_arrive_cluster(u32 barrier) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

}  // namespace cumla::ptx
