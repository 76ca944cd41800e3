// SPDX-License-Identifier: Apache-2.0
// TMA: boxes of tensor maps, and bulk copies, into shared memory or L2.
#pragma once
#include "ptx/types.cuh"

namespace cumla::ptx {

// PTX ISA: Data Movement and Conversion Instructions: prefetch, prefetchu (tensormap)
__device__ __forceinline__ void prefetch_tensor_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// PTX ISA: Data Movement and Conversion Instructions: cp.async.bulk.tensor
// Out-of-range coordinates give zeros, and still count their bytes on the barrier.
__device__ __forceinline__ void tma_load_2d_async(u32 destination, const TensorMap* map, u32 barrier, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
          destination),
      "l"(map), "r"(barrier), "r"(x), "r"(y)
      : "memory");
}

// PTX ISA: Data Movement and Conversion Instructions: cp.async.bulk.tensor
__device__ __forceinline__ void tma_load_3d_async(u32 destination, const TensorMap* map, u32 barrier, int x, int y,
                                                  int z, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(destination),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "l"(policy)
      : "memory");
}

// PTX ISA: Data Movement and Conversion Instructions: cp.async.bulk.tensor
// Out-of-range coordinates give zeros, and still count their bytes on the barrier.
__device__ __forceinline__ void tma_load_4d_async(u32 destination, const TensorMap* map, u32 barrier,
                                                  int x, int y, int z, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(destination),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}

// PTX ISA: Data Movement and Conversion Instructions: cp.async.bulk.prefetch.tensor
// Prefetches the box into L2.
__device__ __forceinline__ void tma_prefetch_4d(const TensorMap* map, int x, int y, int z, int w) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global [%0, {%1, %2, %3, %4}];" ::"l"(map), "r"(x),
               "r"(y), "r"(z), "r"(w)
               : "memory");
}

// PTX ISA: Data Movement and Conversion Instructions: cp.async.bulk
// Addresses and `bytes` must be multiples of 16.
__device__ __forceinline__ void copy_bulk_async(u32 destination, const void* source, u32 bytes, u32 barrier,
                                                u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1], %2, [%3], %4;" ::"r"(destination),
      "l"(source), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

// PTX ISA: Data Movement and Conversion Instructions: cp.async.bulk
// Without an L2 policy.
__device__ __forceinline__ void copy_bulk_async(u32 destination, const void* source, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   destination),
               "l"(source), "r"(bytes), "r"(barrier)
               : "memory");
}

// PTX ISA: Data Movement and Conversion Instructions: cp.async.bulk.prefetch
// Prefetches contiguous bytes into L2. `address` and `bytes` must be multiples of 16.
__device__ __forceinline__ void prefetch_bulk_l2(const void* address, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(address), "r"(bytes) : "memory");
}

}  // namespace cumla::ptx
