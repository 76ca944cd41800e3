// SPDX-License-Identifier: Apache-2.0
// Groups of a thread's asynchronous copies into shared memory, which complete in their order.
#pragma once
#include "ptx/types.cuh"

namespace cumla::ptx {

// PTX ISA: Data Movement and Conversion Instructions: cp.async.commit_group
// What this thread copied since its last group is a group, though it may be nothing.
__device__ __forceinline__ void copy_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// PTX ISA: Data Movement and Conversion Instructions: cp.async.wait_group
// Waits until no more than the last kPending groups of this thread are on their way.
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace cumla::ptx
