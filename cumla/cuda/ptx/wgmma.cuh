// SPDX-License-Identifier: Apache-2.0
// Warpgroup matrix products. D is float32 in registers; A is in registers or shared memory, B in shared memory.
// Operands in shared memory are addressed by matrix descriptors.
#pragma once
#include "ptx/types.cuh"

// Operand lists for asm statements, whose strings must be literals. CUMLA_D<n> names the first n operands;
// CUMLA_D<n>_OPERANDS binds them to the array `d`.
#define CUMLA_D8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define CUMLA_D16 CUMLA_D8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define CUMLA_D32 \
  CUMLA_D16 ", " \
  "%16, %17, %18, %19, %20, %21, %22, %23, " \
  "%24, %25, %26, %27, %28, %29, %30, %31"
#define CUMLA_D64 \
  CUMLA_D32 ", " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define CUMLA_D128 \
  CUMLA_D64 ", " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

#define CUMLA_F4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define CUMLA_F16(i) CUMLA_F4(i), CUMLA_F4(i + 4), CUMLA_F4(i + 8), CUMLA_F4(i + 12)
#define CUMLA_D8_OPERANDS CUMLA_F4(0), CUMLA_F4(4)
#define CUMLA_D16_OPERANDS CUMLA_F16(0)
#define CUMLA_D32_OPERANDS CUMLA_F16(0), CUMLA_F16(16)
#define CUMLA_D64_OPERANDS CUMLA_D32_OPERANDS, CUMLA_F16(32), CUMLA_F16(48)
#define CUMLA_D128_OPERANDS CUMLA_D64_OPERANDS, CUMLA_F16(64), CUMLA_F16(80), CUMLA_F16(96), CUMLA_F16(112)

// PTX ISA: Asynchronous Warpgroup Level Matrix Instructions: wgmma.mma_async
// The wgmma of `shape` and `types`, whose accumulators are the first n operands. `begin` is the text before it, `end`
// the text after D.
#define CUMLA_WGMMA(begin, shape, types, n, end, ...)                                          \
  asm volatile(begin "wgmma.mma_async.sync.aligned." shape ".f32." types " {" CUMLA_D##n "}, " end \
               : CUMLA_D##n##_OPERANDS                                                         \
               : __VA_ARGS__                                                                   \
               : "memory")
#define CUMLA_WGMMA_16(T, begin, shape, n, ...)                 \
  if constexpr (kIsBf16<T>)                                     \
    CUMLA_WGMMA(begin, shape, "bf16.bf16", n, __VA_ARGS__);     \
  else                                                          \
    CUMLA_WGMMA(begin, shape, "f16.f16", n, __VA_ARGS__)
// Sets the predicate `accumulate` from an operand. The asm text must close the brace.
#define CUMLA_IF(operand) "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, " operand ", 0;\n"
#define CUMLA_AB_IF "l"(a), "l"(b), "r"(static_cast<int>(accumulate))
#define CUMLA_REGISTERS_B "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)

namespace cumla::ptx {

// PTX ISA: Asynchronous Warpgroup Level Matrix Instructions: Matrix Descriptor Format
// Descriptor of an operand at `address` + `offset`, a multiple of 16. Rows have kRowBytes (128, 64 or 32) and the
// swizzle of that width, so groups of eight rows are 8 kRowBytes apart. kLeading is for operands contiguous in M or
// N: the bytes between 64-column blocks. Shared-memory addresses fit the address field, so one addition advances a
// descriptor. Not those of a cluster: from bit 24 on they hold the CTA's rank, which must not reach the descriptor.
template <int kRowBytes, int kLeading = 0>
__device__ __forceinline__ u64 descriptor_of_rows(u32 address, u32 offset) {
  static_assert(kRowBytes == 128 || kRowBytes == 64 || kRowBytes == 32, "a row is as wide as a swizzle");
  constexpr u64 kSwizzle = kRowBytes == 128 ? 1 : kRowBytes == 64 ? 2 : 3;
  constexpr u64 kUpper = kSwizzle << 30 | kRowBytes * 8 >> 4;
  return kUpper << 32 | ((address >> 4) + (offset >> 4) + (kLeading >> 4 << 16));
}

// Returns the index in its row at which the swizzle stores a 16-byte chunk.
template <int kRowBytes>
__device__ __forceinline__ int swizzled_chunk(int row, int chunk) {
  return chunk ^ ((row * kRowBytes / 128) & (kRowBytes / 16 - 1));
}

// PTX ISA: Asynchronous Warpgroup Level Matrix Instructions: wgmma.fence
__device__ __forceinline__ void warpgroup_arrive() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// PTX ISA: Asynchronous Warpgroup Level Matrix Instructions: wgmma.commit_group
__device__ __forceinline__ void warpgroup_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// PTX ISA: Asynchronous Warpgroup Level Matrix Instructions: wgmma.wait_group
// Returns when at most kPending committed groups of this warp are still running.
template <int kPending>
__device__ __forceinline__ void warpgroup_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps reads of the accumulators after the wait for their product.
template <int kCount>
__device__ __forceinline__ void keep_behind_wait(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Keeps writes of these fragments or accumulators before the fence of the product that reads them.
template <int kCount>
__device__ __forceinline__ void keep_before_products(u32 (&a)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(a[i])::"memory");
}
template <int kCount>
__device__ __forceinline__ void keep_before_products(float (&d)[kCount]) {
  keep_behind_wait(d);
}

// D (64 x 64) = A (64 x 16) B^T (64 x 16) + (accumulate ? D : 0); A and B in shared memory, contiguous in K.
template <typename T>
__device__ __forceinline__ void wgmma_m64n64k16_async(float (&d)[32], u64 a, u64 b, bool accumulate) {
  CUMLA_WGMMA_16(T, CUMLA_IF("%34"), "m64n64k16", 32, "%32, %33, accumulate, 1, 1, 0, 0;\n}", CUMLA_AB_IF);
}

// D (64 x 128) = A (64 x 16) B^T (128 x 16) + (accumulate ? D : 0); A and B in shared memory, contiguous in K.
template <typename T>
__device__ __forceinline__ void wgmma_m64n128k16_async(float (&d)[64], u64 a, u64 b, bool accumulate) {
  CUMLA_WGMMA_16(T, CUMLA_IF("%66"), "m64n128k16", 64, "%64, %65, accumulate, 1, 1, 0, 0;\n}", CUMLA_AB_IF);
}

// D (64 x 256) += A (64 x 16) B (16 x 256); A in shared memory, contiguous in K; B in shared memory, contiguous in N.
template <typename T>
__device__ __forceinline__ void wgmma_m64n256k16_async(float (&d)[128], u64 a, u64 b) {
  CUMLA_WGMMA_16(T, "", "m64n256k16", 128, "%128, %129, 1, 1, 1, 0, 1;", "l"(a), "l"(b));
}

// As above, with A in registers: a[0..1] are columns 2t, 2t+1 of rows g and g + 8, a[2..3] the same 8 columns later.
template <typename T>
__device__ __forceinline__ void wgmma_m64n256k16_async(float (&d)[128], const u32* a, u64 b) {
  CUMLA_WGMMA_16(T, "", "m64n256k16", 128, "{%128, %129, %130, %131}, %132, 1, 1, 1, 1;", CUMLA_REGISTERS_B);
}

// D (64 x 64) += A (64 x 16) B (16 x 64); A in registers, B in shared memory, contiguous in N.
template <typename T>
__device__ __forceinline__ void wgmma_values_async(float (&d)[32], const u32* a, u64 b) {
  CUMLA_WGMMA_16(T, "", "m64n64k16", 32, "{%32, %33, %34, %35}, %36, 1, 1, 1, 1;", CUMLA_REGISTERS_B);
}

// D (64 x 128) += A (64 x 16) B (16 x 128); A in registers, B in shared memory, contiguous in N.
template <typename T>
__device__ __forceinline__ void wgmma_values_async(float (&d)[64], const u32* a, u64 b) {
  CUMLA_WGMMA_16(T, "", "m64n128k16", 64, "{%64, %65, %66, %67}, %68, 1, 1, 1, 1;", CUMLA_REGISTERS_B);
}

// As above, with A in shared memory, contiguous in K.
template <typename T>
__device__ __forceinline__ void wgmma_values_async(float (&d)[64], u64 a, u64 b) {
  CUMLA_WGMMA_16(T, "", "m64n128k16", 64, "%64, %65, 1, 1, 1, 0, 1;", "l"(a), "l"(b));
}

template <typename T>
__device__ __forceinline__ void wgmma_values_async(float (&d)[128], const u32* a, u64 b) {
  wgmma_m64n256k16_async<T>(d, a, b);
}

// D (64 x 16) = A (64 x 16) B^T (16 x 16) + (accumulate ? D : 0); both in shared memory. B is contiguous in K, A in K
// or, with kTransposedA, in M.
template <typename T, bool kTransposedA>
__device__ __forceinline__ void wgmma_m64n16k16_async(float (&d)[8], u64 a, u64 b, bool accumulate) {
  CUMLA_WGMMA_16(T, CUMLA_IF("%10"), "m64n16k16", 8, "%8, %9, accumulate, 1, 1, %11, 0;\n}", CUMLA_AB_IF,
                 "n"(static_cast<int>(kTransposedA)));
}

// D (64 x 2 kCount) = A (64 x 16) B^T + (accumulate ? D : 0); 2 kCount is 16 or 32; A in registers, B in shared
// memory, contiguous in K.
template <typename T, int kCount>
__device__ __forceinline__ void wgmma_narrow_async(float (&d)[kCount], const u32* a, u64 b, bool accumulate) {
  if constexpr (kCount == 8)
    CUMLA_WGMMA_16(T, CUMLA_IF("%13"), "m64n16k16", 8, "{%8, %9, %10, %11}, %12, accumulate, 1, 1, 0;\n}",
                   CUMLA_REGISTERS_B, "r"(static_cast<int>(accumulate)));
  else
    CUMLA_WGMMA_16(T, CUMLA_IF("%21"), "m64n32k16", 16, "{%16, %17, %18, %19}, %20, accumulate, 1, 1, 0;\n}",
                   CUMLA_REGISTERS_B, "r"(static_cast<int>(accumulate)));
}

// D (64 x 64) = A (64 x 16) B^T (64 x 16) + (accumulate ? D : 0); A in registers, B in shared memory, contiguous in K.
template <typename T>
__device__ __forceinline__ void wgmma_m64n64k16_async(float (&d)[32], const u32* a, u64 b, bool accumulate) {
  CUMLA_WGMMA_16(T, CUMLA_IF("%37"), "m64n64k16", 32, "{%32, %33, %34, %35}, %36, accumulate, 1, 1, 0;\n}",
                 CUMLA_REGISTERS_B, "r"(static_cast<int>(accumulate)));
}

// D (64 x 2 kCount) = A (64 x 32) B^T + (accumulate ? D : 0); 2 kCount is 64, 128 or 256; both in shared memory,
// contiguous in K.
template <int kCount>
__device__ __forceinline__ void wgmma_e4m3_async(float (&d)[kCount], u64 a, u64 b, bool accumulate) {
  if constexpr (kCount == 32)
    CUMLA_WGMMA(CUMLA_IF("%34"), "m64n64k32", "e4m3.e4m3", 32, "%32, %33, accumulate, 1, 1;\n}", CUMLA_AB_IF);
  else if constexpr (kCount == 64)
    CUMLA_WGMMA(CUMLA_IF("%66"), "m64n128k32", "e4m3.e4m3", 64, "%64, %65, accumulate, 1, 1;\n}", CUMLA_AB_IF);
  else
    CUMLA_WGMMA(CUMLA_IF("%130"), "m64n256k32", "e4m3.e4m3", 128, "%128, %129, accumulate, 1, 1;\n}", CUMLA_AB_IF);
}

// D (64 x 64) = A (64 x 32) B^T (64 x 32) + (accumulate ? D : 0); A in registers, B in shared memory, contiguous in K.
// a[0] and a[1] hold columns 4t to 4t + 3 of rows g and g + 8; a[2..3] the same 16 columns later.
__device__ __forceinline__ void wgmma_e4m3_async(float (&d)[32], const u32* a, u64 b, bool accumulate) {
  CUMLA_WGMMA(CUMLA_IF("%37"), "m64n64k32", "e4m3.e4m3", 32, "{%32, %33, %34, %35}, %36, accumulate, 1, 1;\n}",
              CUMLA_REGISTERS_B, "r"(static_cast<int>(accumulate)));
}

}  // namespace cumla::ptx

#undef CUMLA_WGMMA
#undef CUMLA_WGMMA_16
#undef CUMLA_IF
#undef CUMLA_AB_IF
#undef CUMLA_REGISTERS_B
#undef CUMLA_F4
#undef CUMLA_F16
#undef CUMLA_D8
#undef CUMLA_D8_OPERANDS
#undef CUMLA_D16
#undef CUMLA_D16_OPERANDS
#undef CUMLA_D32
#undef CUMLA_D32_OPERANDS
#undef CUMLA_D64
#undef CUMLA_D64_OPERANDS
#undef CUMLA_D128
#undef CUMLA_D128_OPERANDS
