// SPDX-License-Identifier: Apache-2.0
// What a kernel's text needs to run on a CPU: threads as fibers of one process. Asynchronous copies and products happen
// when they are issued. Whoever waits gives the others of its block their turn, and when all wait for another block, the
// next block gets its turn; if nobody goes on, the run ends and says who waits for what. Variables that a function
// declares as shared are those of all blocks: kernels that have some must not wait for another block.
// runtime.cpp has the bodies. It is compiled once, this with each kernel: hence no containers here.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>

#define __device__
#define __forceinline__ inline
#define __global__
#define __grid_constant__
#define __shared__ static
#define __align__(bytes) alignas(bytes)
#define __launch_bounds__(...)
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct dim3 { unsigned x, y, z; };
extern dim3 blockIdx, threadIdx, gridDim, blockDim;
using std::max;
using std::min;

namespace host {

extern unsigned char* shared;      // of the block whose turn it is
extern unsigned rank_bits;         // of its addresses: the rank of a block in its cluster, from bit 24 on
extern unsigned long long writes;  // to global memory that others look for

// Runs the grid: what went wrong, or an empty text.
const char* run_grid(dim3 grid, int threads, int cluster_size);
void kernel_of_thread();  // defined with the kernel
void fail(const char* text);

void yield_until_changed(const unsigned& watched, unsigned value, const char* reason);
void yield();  // before a look at what another block may write
void pause();  // lets the others go on

// Threads that meet: each gives a value and gets those of all, which stay until it has met the others once more.
const uint64_t* meet_warp(unsigned mask, uint64_t value, const char* reason = "its warp");
const uint64_t* meet_block(uint64_t value);
bool meet_named(unsigned barrier, int count, bool vote);  // whether any vote is true
void arrive_named(unsigned barrier, int count);
void set_registers(unsigned count);  // of each thread of the warp; more are those that other warps of the block gave up
void meet_cluster();
unsigned char* shared_of(unsigned rank);  // of a block of the cluster

inline unsigned lane() { return threadIdx.x % 32; }

template <typename T>
inline uint64_t bits_of(T value) {
  static_assert(sizeof(T) <= 8);
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  return bits;
}
template <typename T>
inline T value_of(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

// Shared memory.

inline unsigned char* at(unsigned address) { return shared + static_cast<int>(address - rank_bits); }

struct Barrier {
  unsigned phase = 0, expected = 0, pending = 0;
  long long bytes = 0;

  void complete() {
    if (pending == 0 && bytes == 0) {
      pending = expected;
      ++phase;
    }
  }
};
void initialise_barrier(unsigned address, unsigned arrivals);
void invalidate_barrier(unsigned address);
Barrier& barrier_at(unsigned address);
unsigned cluster_size();
Barrier& barrier_of_cluster(unsigned address);  // which may be another block's
void copy_box(unsigned destination, const void* map, unsigned barrier, std::initializer_list<long long> corner);

// Numbers.

unsigned bits16(float x, int exponent_bits, int mantissa_bits, bool saturates);
float half(unsigned bits);
float e4m3(unsigned bits);
inline float bfloat(unsigned bits) { return value_of<float>(bits << 16); }

// Products.

enum Type { kBf16, kFp16, kE4m3 };

// An operand of a product in shared memory.
struct Operand {
  uint64_t descriptor;
  Type type;
  bool is_transposed;  // contiguous in M or N
};

// D (64 x columns) = A B + (accumulate ? D : 0), by a warpgroup. A is in shared memory, or in registers.
struct Product {
  float* d;
  const unsigned* a_registers;  // null: A is in shared memory
  Operand a, b;
  bool accumulate;
};
void multiply(int columns, int depth, const Product& mine);

}  // namespace host

// Built-in functions.

static inline float __uint_as_float(unsigned bits) { return host::value_of<float>(bits); }
static inline float __int_as_float(int bits) { return host::value_of<float>(static_cast<unsigned>(bits)); }
static inline unsigned __float_as_uint(float value) { return static_cast<unsigned>(host::bits_of(value)); }
static inline int __float_as_int(float value) { return static_cast<int>(__float_as_uint(value)); }
static inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline unsigned atomicAdd(unsigned* address, unsigned count) {
  const unsigned before = *address;
  *address = before + count;
  return before;
}
static inline unsigned atomicOr(unsigned* address, unsigned bits) {
  const unsigned before = *address;
  *address = before | bits;
  return before;
}
static inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
  return (static_cast<uint64_t>(high) << 32 | low) >> (by & 31);
}
static inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<uint64_t>(a) * b >> 32; }
static inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const uint64_t both = static_cast<uint64_t>(y) << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= (both >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return result;
}
static inline uint64_t __cvta_generic_to_shared(const void* pointer) {
  return static_cast<uint64_t>(static_cast<const unsigned char*>(pointer) - host::shared) + host::rank_bits;
}
static inline long long clock64() { return 0; }
static inline void __trap() { host::fail("trap"); host::yield(); }

template <typename T>
static inline T __shfl_sync(unsigned mask, T value, int from) {
  return host::value_of<T>(host::meet_warp(mask, host::bits_of(value))[from & 31]);
}
template <typename T>
static inline T __shfl_xor_sync(unsigned mask, T value, int other) {
  return host::value_of<T>(host::meet_warp(mask, host::bits_of(value))[host::lane() ^ other]);
}
template <typename T>
static inline T __shfl_up_sync(unsigned mask, T value, unsigned by) {
  const uint64_t* all = host::meet_warp(mask, host::bits_of(value));
  return host::lane() < by ? value : host::value_of<T>(all[host::lane() - by]);
}
static inline unsigned __ballot_sync(unsigned mask, int vote) {
  const uint64_t* all = host::meet_warp(mask, vote != 0);
  unsigned votes = 0;
  for (int i = 0; i < 32; ++i)
    if (mask >> i & 1) votes |= static_cast<unsigned>(all[i]) << i;
  return votes;
}
static inline int __reduce_add_sync(unsigned mask, int value) {
  for (int apart = 1; apart < 32; apart *= 2) value += __shfl_xor_sync(mask, value, apart);
  return value;
}
static inline int __any_sync(unsigned mask, int vote) { return __ballot_sync(mask, vote) != 0; }
static inline int __all_sync(unsigned mask, int vote) { return __ballot_sync(mask, !vote) == 0; }
template <typename T>
static inline unsigned __match_any_sync(unsigned mask, T value) {
  const uint64_t* all = host::meet_warp(mask, host::bits_of(value));
  unsigned same = 0;
  for (int i = 0; i < 32; ++i)
    if (mask >> i & 1) same |= static_cast<unsigned>(all[i] == host::bits_of(value)) << i;
  return same;
}
template <typename T, typename Join>
static inline T reduced(unsigned mask, T value, Join join) {
  const uint64_t* all = host::meet_warp(mask, host::bits_of(value));
  T result = value;
  bool is_first = true;
  for (int i = 0; i < 32; ++i)
    if (mask >> i & 1) {
      const T other = host::value_of<T>(all[i]);
      result = is_first ? other : join(result, other);
      is_first = false;
    }
  return result;
}
template <typename T>
static inline T __reduce_add_sync(unsigned mask, T value) {
  return reduced(mask, value, [](T a, T b) { return T(a + b); });
}
template <typename T>
static inline T __reduce_min_sync(unsigned mask, T value) {
  return reduced(mask, value, [](T a, T b) { return std::min(a, b); });
}
template <typename T>
static inline T __reduce_max_sync(unsigned mask, T value) {
  return reduced(mask, value, [](T a, T b) { return std::max(a, b); });
}
template <typename T>
static inline T __reduce_or_sync(unsigned mask, T value) {
  return reduced(mask, value, [](T a, T b) { return T(a | b); });
}
static inline void __syncwarp(unsigned mask = 0xffffffffu) { host::meet_warp(mask, 0); }
static inline void __syncthreads() { host::meet_block(0); }
static inline int __syncthreads_or(int vote) {
  const uint64_t* votes = host::meet_block(vote != 0);
  return std::any_of(votes, votes + blockDim.x, [](uint64_t one) { return one != 0; });
}
