// SPDX-License-Identifier: Apache-2.0
// Warpgroup matrix products. D is float32 in registers; A is in registers or shared memory, B in shared memory.
// Operands in shared memory are addressed by matrix descriptors.
#pragma once
#include "ptx/types.cuh"

// The accumulators as an asm statement needs them, whose strings must be literals: CUMLA_D<n> names the first n
// operands, CUMLA_D<n>_OPERANDS binds them to the array `d`.
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

#define CUMLA_D8_OPERANDS \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define CUMLA_D16_OPERANDS \
  CUMLA_D8_OPERANDS, \
  "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define CUMLA_D32_OPERANDS \
  CUMLA_D16_OPERANDS, \
  "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
  "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define CUMLA_D64_OPERANDS \
  CUMLA_D32_OPERANDS, \
  "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), \
  "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), \
  "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), \
  "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define CUMLA_D128_OPERANDS \
  CUMLA_D64_OPERANDS, \
  "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]), \
  "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]), \
  "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), \
  "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]), \
  "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]), \
  "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]), \
  "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]), \
  "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])

namespace cumla::ptx {

// PTX ISA: Asynchronous Warpgroup Level Matrix Instructions: Matrix Descriptor Format
// `leading` and `stride` are byte offsets: for an operand contiguous in K, stride = 8 rows (1024) and leading is
// unused; for one contiguous in M or N, leading = from one 64-column block to the next, stride = 8 rows of K (1024).
__device__ __forceinline__ u64 matrix_descriptor(u32 address, u32 leading, u32 stride) {
  constexpr u64 kSwizzle128Bytes = 1ull << 62;
  return static_cast<u64>((address & 0x3ffff) >> 4) | (static_cast<u64>(leading >> 4) << 16) |
         (static_cast<u64>(stride >> 4) << 32) | kSwizzle128Bytes;
}

// PTX ISA: Asynchronous Warpgroup Level Matrix Instructions: Matrix Descriptor Format
// Of rows of kRowBytes (128, 64 or 32) from column `k` on, with the swizzle of that width: eight rows are 8 kRowBytes
// apart. An address in shared memory has no bits that the format would have to lose.
template <int kRowBytes>
__device__ __forceinline__ u64 descriptor_of_rows(u32 address, int k) {
  static_assert(kRowBytes == 128 || kRowBytes == 64 || kRowBytes == 32, "a row is as wide as a swizzle");
  constexpr u64 kSwizzle = kRowBytes == 128 ? 1 : kRowBytes == 64 ? 2 : 3;
  constexpr u64 kUpper = kSwizzle << 30 | kRowBytes * 8 >> 4;
  return kUpper << 32 | ((address >> 4) + k / 16);
}

// Where the 16-byte chunk of a row lies within it.
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

// After a wait for the product: what reads the accumulators stays there.
template <int kCount>
__device__ __forceinline__ void keep_behind_wait(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Before the fence of the products that read them: what makes these fragments, or accumulators, stays there.
template <int kCount>
__device__ __forceinline__ void keep_before_products(u32 (&a)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(a[i])::"memory");
}
template <int kCount>
__device__ __forceinline__ void keep_before_products(float (&d)[kCount]) {
  keep_behind_wait(d);
}

// PTX ISA: Asynchronous Warpgroup Level Matrix Instructions: wgmma.mma_async
// D (64 x 64) = A (64 x 16) B^T (64 x 16) + (accumulate ? D : 0); A and B in shared memory, contiguous in K.
template <typename T>
__device__ __forceinline__ void wgmma_m64n64k16_async(float (&d)[32], u64 a, u64 b, bool accumulate);

// PTX ISA: Asynchronous Warpgroup Level Matrix Instructions: wgmma.mma_async
template <>
__device__ __forceinline__ void wgmma_m64n64k16_async<Bf16>(float (&d)[32], u64 a, u64 b, bool accumulate) {
  asm volatile(
      "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" CUMLA_D32 "}, %32, %33, accumulate, 1, 1, 0, 0;\n}"
      : CUMLA_D32_OPERANDS
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate))
      : "memory");
}

// PTX ISA: Asynchronous Warpgroup Level Matrix Instructions: wgmma.mma_async
template <>
__device__ __forceinline__ void wgmma_m64n64k16_async<Fp16>(float (&d)[32], u64 a, u64 b, bool accumulate) {
  asm volatile(
      "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" CUMLA_D32 "}, %32, %33, accumulate, 1, 1, 0, 0;\n}"
      : CUMLA_D32_OPERANDS
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate))
      : "memory");
}

// PTX ISA: Asynchronous Warpgroup Level Matrix Instructions: wgmma.mma_async
// D (64 x 128) = A (64 x 16) B^T (128 x 16) + (accumulate ? D : 0); A and B in shared memory, contiguous in K.
template <typename T>
__device__ __forceinline__ void wgmma_m64n128k16_async(float (&d)[64], u64 a, u64 b, bool accumulate) {
  if constexpr (kIsBf16<T>)
    asm volatile(
        "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" CUMLA_D64 "}, %64, %65, accumulate, 1, 1, 0, 0;\n}"
        : CUMLA_D64_OPERANDS
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate))
        : "memory");
  else
    asm volatile(
        "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" CUMLA_D64 "}, %64, %65, accumulate, 1, 1, 0, 0;\n}"
        : CUMLA_D64_OPERANDS
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate))
        : "memory");
}

// PTX ISA: Asynchronous Warpgroup Level Matrix Instructions: wgmma.mma_async
// D (64 x 256) += A (64 x 16) B (16 x 256); A in shared memory, contiguous in K; B in shared memory, contiguous in N.
template <typename T>
__device__ __forceinline__ void wgmma_m64n256k16_async(float (&d)[128], u64 a, u64 b);

// PTX ISA: Asynchronous Warpgroup Level Matrix Instructions: wgmma.mma_async
// The same with A in registers: a[0..1] columns 2t, 2t+1 of rows g and g + 8, a[2..3] the same eight columns later.
template <typename T>
__device__ __forceinline__ void wgmma_m64n256k16_async(float (&d)[128], const u32* a, u64 b);

// PTX ISA: Asynchronous Warpgroup Level Matrix Instructions: wgmma.mma_async
template <>
__device__ __forceinline__ void wgmma_m64n256k16_async<Bf16>(float (&d)[128], u64 a, u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" CUMLA_D128 "}, %128, %129, 1, 1, 1, 0, 1;"
      : CUMLA_D128_OPERANDS
      : "l"(a), "l"(b)
      : "memory");
}

// PTX ISA: Asynchronous Warpgroup Level Matrix Instructions: wgmma.mma_async
template <>
__device__ __forceinline__ void wgmma_m64n256k16_async<Bf16>(float (&d)[128], const u32* a, u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" CUMLA_D128 "}, {%128, %129, %130, %131}, %132, "
      "1, 1, 1, 1;"
      : CUMLA_D128_OPERANDS
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)
      : "memory");
}

// PTX ISA: Asynchronous Warpgroup Level Matrix Instructions: wgmma.mma_async
template <>
__device__ __forceinline__ void wgmma_m64n256k16_async<Fp16>(float (&d)[128], u64 a, u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {" CUMLA_D128 "}, %128, %129, 1, 1, 1, 0, 1;"
      : CUMLA_D128_OPERANDS
      : "l"(a), "l"(b)
      : "memory");
}

// PTX ISA: Asynchronous Warpgroup Level Matrix Instructions: wgmma.mma_async
template <>
__device__ __forceinline__ void wgmma_m64n256k16_async<Fp16>(float (&d)[128], const u32* a, u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {" CUMLA_D128 "}, {%128, %129, %130, %131}, %132, "
      "1, 1, 1, 1;"
      : CUMLA_D128_OPERANDS
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)
      : "memory");
}

// PTX ISA: Asynchronous Warpgroup Level Matrix Instructions: wgmma.mma_async
// D (64 x 64) += A (64 x 16) B (16 x 64); A in registers, B in shared memory, contiguous in N.
template <typename T>
__device__ __forceinline__ void wgmma_values_async(float (&d)[32], const u32* a, u64 b) {
  if constexpr (kIsBf16<T>)
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" CUMLA_D32 "}, {%32, %33, %34, %35}, %36, "
        "1, 1, 1, 1;"
        : CUMLA_D32_OPERANDS
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)
        : "memory");
  else
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" CUMLA_D32 "}, {%32, %33, %34, %35}, %36, "
        "1, 1, 1, 1;"
        : CUMLA_D32_OPERANDS
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)
        : "memory");
}

// PTX ISA: Asynchronous Warpgroup Level Matrix Instructions: wgmma.mma_async
// D (64 x 128) += A (64 x 16) B (16 x 128); A in registers, B in shared memory, contiguous in N.
template <typename T>
__device__ __forceinline__ void wgmma_values_async(float (&d)[64], const u32* a, u64 b) {
  if constexpr (kIsBf16<T>)
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" CUMLA_D64 "}, {%64, %65, %66, %67}, %68, "
        "1, 1, 1, 1;"
        : CUMLA_D64_OPERANDS
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)
        : "memory");
  else
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" CUMLA_D64 "}, {%64, %65, %66, %67}, %68, "
        "1, 1, 1, 1;"
        : CUMLA_D64_OPERANDS
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)
        : "memory");
}

// PTX ISA: Asynchronous Warpgroup Level Matrix Instructions: wgmma.mma_async
// The same with A in shared memory, contiguous in K.
template <typename T>
__device__ __forceinline__ void wgmma_values_async(float (&d)[64], u64 a, u64 b) {
  if constexpr (kIsBf16<T>)
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" CUMLA_D64 "}, %64, %65, 1, 1, 1, 0, 1;"
        : CUMLA_D64_OPERANDS
        : "l"(a), "l"(b)
        : "memory");
  else
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" CUMLA_D64 "}, %64, %65, 1, 1, 1, 0, 1;"
        : CUMLA_D64_OPERANDS
        : "l"(a), "l"(b)
        : "memory");
}

template <typename T>
__device__ __forceinline__ void wgmma_values_async(float (&d)[128], const u32* a, u64 b) {
  wgmma_m64n256k16_async<T>(d, a, b);
}

// PTX ISA: Asynchronous Warpgroup Level Matrix Instructions: wgmma.mma_async
// D (64 x 16) = A (64 x 16) B^T (16 x 16) + (accumulate ? D : 0); both in shared memory, B contiguous in K, A
// contiguous in K or, with kTransposedA, in M.
template <typename T, bool kTransposedA>
__device__ __forceinline__ void wgmma_m64n16k16_async(float (&d)[8], u64 a, u64 b, bool accumulate) {
  if constexpr (kIsBf16<T>)
    asm volatile(
        "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %10, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {" CUMLA_D8 "}, %8, %9, accumulate, 1, 1, %11, 0;\n}"
        : CUMLA_D8_OPERANDS
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(static_cast<int>(kTransposedA))
        : "memory");
  else
    asm volatile(
        "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %10, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {" CUMLA_D8 "}, %8, %9, accumulate, 1, 1, %11, 0;\n}"
        : CUMLA_D8_OPERANDS
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(static_cast<int>(kTransposedA))
        : "memory");
}

// PTX ISA: Asynchronous Warpgroup Level Matrix Instructions: wgmma.mma_async
// D (64 x 16) = A (64 x 16) B^T (16 x 16) + (accumulate ? D : 0); A in registers, B in shared memory, contiguous in K.
__device__ __forceinline__ void wgmma_f16_async(float (&d)[8], const u32* a, u64 b, bool accumulate) {
  asm volatile(
      "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %13, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {" CUMLA_D8 "}, {%8, %9, %10, %11}, %12, "
      "accumulate, 1, 1, 0;\n}"
      : CUMLA_D8_OPERANDS
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate))
      : "memory");
}

// PTX ISA: Asynchronous Warpgroup Level Matrix Instructions: wgmma.mma_async
// The same with 32 columns.
__device__ __forceinline__ void wgmma_f16_async(float (&d)[16], const u32* a, u64 b, bool accumulate) {
  asm volatile(
      "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %21, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {" CUMLA_D16 "}, {%16, %17, %18, %19}, %20, "
      "accumulate, 1, 1, 0;\n}"
      : CUMLA_D16_OPERANDS
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate))
      : "memory");
}

// PTX ISA: Asynchronous Warpgroup Level Matrix Instructions: wgmma.mma_async
// D (64 x 16) as above, of bfloat16.
__device__ __forceinline__ void wgmma_bf16_async(float (&d)[8], const u32* a, u64 b, bool accumulate) {
  asm volatile(
      "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %13, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {" CUMLA_D8 "}, {%8, %9, %10, %11}, %12, "
      "accumulate, 1, 1, 0;\n}"
      : CUMLA_D8_OPERANDS
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate))
      : "memory");
}

// PTX ISA: Asynchronous Warpgroup Level Matrix Instructions: wgmma.mma_async
// The same with 32 columns.
__device__ __forceinline__ void wgmma_bf16_async(float (&d)[16], const u32* a, u64 b, bool accumulate) {
  asm volatile(
      "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %21, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {" CUMLA_D16 "}, {%16, %17, %18, %19}, %20, "
      "accumulate, 1, 1, 0;\n}"
      : CUMLA_D16_OPERANDS
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate))
      : "memory");
}

// PTX ISA: Asynchronous Warpgroup Level Matrix Instructions: wgmma.mma_async
// D (64 x 64) = A (64 x 16) B^T (64 x 16) + (accumulate ? D : 0); A in registers, B in shared memory, contiguous in K.
template <typename T>
__device__ __forceinline__ void wgmma_m64n64k16_async(float (&d)[32], const u32* a, u64 b, bool accumulate) {
  if constexpr (kIsBf16<T>)
    asm volatile(
        "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" CUMLA_D32 "}, {%32, %33, %34, %35}, %36, "
        "accumulate, 1, 1, 0;\n}"
        : CUMLA_D32_OPERANDS
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate))
        : "memory");
  else
    asm volatile(
        "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" CUMLA_D32 "}, {%32, %33, %34, %35}, %36, "
        "accumulate, 1, 1, 0;\n}"
        : CUMLA_D32_OPERANDS
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate))
        : "memory");
}

// PTX ISA: Asynchronous Warpgroup Level Matrix Instructions: wgmma.mma_async
// D (64 x 64) = A (64 x 32) B^T (64 x 32) + (accumulate ? D : 0); both in shared memory, contiguous in K.
__device__ __forceinline__ void wgmma_e4m3_async(float (&d)[32], u64 a, u64 b, bool accumulate) {
  asm volatile(
      "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {" CUMLA_D32 "}, %32, %33, accumulate, 1, 1;\n}"
      : CUMLA_D32_OPERANDS
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate))
      : "memory");
}

// PTX ISA: Asynchronous Warpgroup Level Matrix Instructions: wgmma.mma_async
// The same with 128 columns.
__device__ __forceinline__ void wgmma_e4m3_async(float (&d)[64], u64 a, u64 b, bool accumulate) {
  asm volatile(
      "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" CUMLA_D64 "}, %64, %65, accumulate, 1, 1;\n}"
      : CUMLA_D64_OPERANDS
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate))
      : "memory");
}

// PTX ISA: Asynchronous Warpgroup Level Matrix Instructions: wgmma.mma_async
// The same with 256 columns.
__device__ __forceinline__ void wgmma_e4m3_async(float (&d)[128], u64 a, u64 b, bool accumulate) {
  asm volatile(
      "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k32.f32.e4m3.e4m3 {" CUMLA_D128 "}, %128, %129, accumulate, 1, 1;\n}"
      : CUMLA_D128_OPERANDS
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate))
      : "memory");
}

}  // namespace cumla::ptx

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
