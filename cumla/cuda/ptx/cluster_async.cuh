// SPDX-License-Identifier: Apache-2.0
// Thread block clusters: the halves of their barrier, and stores to another CTA that an mbarrier counts.
#pragma once
#include "ptx/types.cuh"

namespace cumla::ptx {

// PTX ISA: Parallel Synchronization and Communication Instructions: barrier.cluster
// Arrives without an order of memory, for a later cluster_wait.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

// PTX ISA: Parallel Synchronization and Communication Instructions: barrier.cluster
// Waits until all threads of the cluster have arrived.
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}

// PTX ISA: Data Movement and Conversion Instructions: st.async
// Stores to a CTA of the cluster, whose mbarrier gets the 16 bytes. Neither the CTA that stores nor the one that waits
// needs a fence, which release and acquire of barrier.cluster are: MEMBAR.ALL.GPU.
__device__ __forceinline__ void store_cluster_async(u32 destination, const float4& v, u32 barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                   destination),
               "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(barrier)
               : "memory");
}

}  // namespace cumla::ptx
