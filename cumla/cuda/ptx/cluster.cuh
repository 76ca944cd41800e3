// SPDX-License-Identifier: Apache-2.0
// Thread-block clusters: CTAs that reach each other's shared memory. A launch without a cluster is a cluster of one.
#pragma once
#include "ptx/types.cuh"

namespace cumla {

// PTX ISA: Special Registers: %cluster_ctarank
__device__ __forceinline__ u32 cluster_rank() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// PTX ISA: Special Registers: %cluster_nctarank
__device__ __forceinline__ u32 cluster_size() {
  u32 size;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}

// PTX ISA: Data Movement and Conversion Instructions: mapa
// The address in the cluster's window of what lies at `address` in the shared memory of CTA `rank`.
__device__ __forceinline__ u32 map_to_rank(u32 address, u32 rank) {
  u32 mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}

// PTX ISA: Parallel Synchronization and Communication Instructions: mbarrier.arrive
// `barrier` is an address that map_to_rank gave. Release at CTA scope, the default: what is announced here are finished
// wgmma reads, and .release.cluster costs a MEMBAR.ALL.GPU, which made the decode kernel 1.4 times slower.
__device__ __forceinline__ void mbarrier_arrive_cluster(u32 barrier) {
  asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// PTX ISA: Parallel Synchronization and Communication Instructions: barrier.cluster
// Every thread of every CTA of the cluster. Orders no memory but initialised mbarriers (after fence_mbarrier_init).
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

}  // namespace cumla
