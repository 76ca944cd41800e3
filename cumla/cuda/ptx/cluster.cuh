// SPDX-License-Identifier: Apache-2.0
// Thread block clusters: their barrier, and accesses to the shared memory of another CTA of the cluster.
#pragma once
#include "ptx/types.cuh"

namespace cumla::ptx {

// PTX ISA: Parallel Synchronization and Communication Instructions: barrier.cluster
// Waits for all threads of the cluster, and makes their earlier writes visible, also those to shared memory.
__device__ __forceinline__ void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}

// PTX ISA: Parallel Synchronization and Communication Instructions: barrier.cluster
// The same without an order of memory: what threads have loaded is loaded.
__device__ __forceinline__ void cluster_sync_relaxed() {
  asm volatile(
      "barrier.cluster.arrive.relaxed.aligned;\n"
      "barrier.cluster.wait.aligned;" ::
          : "memory");
}

// PTX ISA: Data Movement and Conversion Instructions: mapa
// Maps a shared-memory address of this CTA to the same offset in CTA `rank` of the cluster.
__device__ __forceinline__ u32 shared_address_in(u32 address, u32 rank) {
  u32 there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

// PTX ISA: Data Movement and Conversion Instructions: ld
__device__ __forceinline__ u32 load_cluster_u32(u32 source) {
  u32 value;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(source) : "memory");
  return value;
}

// PTX ISA: Data Movement and Conversion Instructions: ld
__device__ __forceinline__ float4 load_cluster_float4(u32 source) {
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(source)
               : "memory");
  return v;
}

// PTX ISA: Data Movement and Conversion Instructions: st
// Stores to this CTA's shared memory.
__device__ __forceinline__ void store_shared_u64(u32 destination, u64 value) {
  asm volatile("st.shared.u64 [%0], %1;" ::"r"(destination), "l"(value) : "memory");
}

// PTX ISA: Data Movement and Conversion Instructions: st
__device__ __forceinline__ void store_cluster_u64(u32 destination, u64 value) {
  asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(destination), "l"(value) : "memory");
}

// PTX ISA: Parallel Synchronization and Communication Instructions: mbarrier.arrive
// Arrives at a barrier of a CTA of the cluster, at a mapped address.
__device__ __forceinline__ void mbarrier_arrive_cluster(u32 barrier) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// PTX ISA: Data Movement and Conversion Instructions: st.async
// Stores to the shared memory of a CTA of the cluster, at a mapped address, and counts 16 bytes on its barrier.
__device__ __forceinline__ void store_cluster_16_async(u32 destination, u32 a, u32 b, u32 c, u32 d, u32 barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                   destination),
               "r"(a), "r"(b), "r"(c), "r"(d), "r"(barrier)
               : "memory");
}

// PTX ISA: Data Movement and Conversion Instructions: cp.async.bulk
// Copies from this CTA's shared memory to that of a CTA of the cluster, and counts the bytes on its barrier.
__device__ __forceinline__ void copy_bulk_cluster_async(u32 destination, u32 source, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   destination),
               "r"(source), "r"(bytes), "r"(barrier)
               : "memory");
}

}  // namespace cumla::ptx
