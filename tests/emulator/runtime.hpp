// SPDX-License-Identifier: Apache-2.0
// What a kernel's text needs to run on a CPU: threads as fibers of one process. Asynchronous copies and products happen
// when they are issued. Whoever waits gives the others of its block their turn, and when all wait for another block, the
// next block gets its turn; if nobody goes on, the run ends and says who waits for what. Variables that a function
// declares as shared are those of all blocks: kernels that have some must not wait for another block.
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

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
static dim3 blockIdx, threadIdx, gridDim, blockDim;
using std::max;
using std::min;

namespace host {

constexpr size_t kStack = 256 << 10, kSharedBytes = 256 << 10, kOpenBlocks = 256;

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  bool is_done = false;
  const unsigned* watched = nullptr;  // it waits while this is `value`
  unsigned value = 0;
  const char* reason = "";
};

static ucontext_t scheduler;
static Fiber* now;
static std::string failure;
static unsigned char* shared;  // of the block whose turn it is
static bool asks_others;       // whether a thread has looked for what another block writes
static unsigned long long writes;  // to global memory that others look for

static void yield_until_changed(const unsigned& watched, unsigned value, const char* reason) {
  now->watched = &watched;
  now->value = value;
  now->reason = reason;
  while (watched == value) swapcontext(&now->context, &scheduler);
  now->watched = nullptr;
}

// Before a look at what another block may write.
static void yield() {
  asks_others = true;
  swapcontext(&now->context, &scheduler);
}

// Some threads that meet, again and again: each gives a value and gets those of all. A value stays until its owner has
// met the others once more.
struct Meeting {
  int arrived = 0;
  unsigned generation = 0;
  std::vector<uint64_t> values[2];

  const std::vector<uint64_t>& meet(int count, int place, int places, uint64_t value, const char* reason) {
    const unsigned mine = generation;
    auto& all = values[mine & 1];
    all.resize(places);
    all[place] = value;
    ++arrived;
    if (!complete(count)) yield_until_changed(generation, mine, reason);
    return all;
  }

  bool complete(int count) {
    if (arrived != count) return false;
    arrived = 0;
    ++generation;
    return true;
  }
};

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

struct Block;

// Blocks that wait for one another, and see one another's shared memory.
struct Cluster {
  std::vector<Block*> blocks;  // those that have begun
  int threads = 0, arrived = 0;  // threads that have not returned; those that wait
  unsigned generation = 0;

  void complete() {
    if (arrived < threads) return;
    arrived = 0;
    ++generation;
    ++writes;
  }
};

struct Block {
  dim3 index;
  std::shared_ptr<Cluster> cluster;
  std::vector<Fiber> fibers;
  unsigned char* shared;
  std::map<std::pair<unsigned, unsigned>, Meeting> warps;  // by warp and mask
  std::map<unsigned, Meeting> warpgroups, named;
  std::map<unsigned, Barrier> barriers;
  Meeting all;
  bool is_done = false, is_backward = false;  // threads get their turns in both orders: who forgets to wait is seen
};
static Block* block;  // whose turn it is

static unsigned lane() { return threadIdx.x % 32; }

// Threads that have not returned, of a warp and a mask.
static int alive(unsigned warp, unsigned mask) {
  int count = 0;
  for (int i = 0; i < 32; ++i)
    if (const size_t thread = 32 * warp + i; mask >> i & 1 && thread < block->fibers.size())
      count += !block->fibers[thread].is_done;
  return count;
}

static const std::vector<uint64_t>& meet_warp(unsigned mask, uint64_t value, const char* reason = "its warp") {
  const unsigned warp = threadIdx.x / 32;
  return block->warps[{warp, mask}].meet(alive(warp, mask), lane(), 32, value, reason);
}

static const std::vector<uint64_t>& meet_warpgroup(uint64_t value) {
  return block->warpgroups[threadIdx.x / 128].meet(128, threadIdx.x % 128, 128, value, "its warpgroup");
}

static const std::vector<uint64_t>& meet_block(uint64_t value) {
  int alive = 0;
  for (const Fiber& fiber : block->fibers) alive += !fiber.is_done;
  return block->all.meet(alive, threadIdx.x, blockDim.x, value, "__syncthreads");
}

static void meet_cluster() {
  Cluster& cluster = *block->cluster;
  const unsigned mine = cluster.generation;
  ++cluster.arrived;
  cluster.complete();
  while (cluster.generation == mine && failure.empty()) {
    now->reason = "its cluster";
    yield();
  }
}

template <typename T>
static uint64_t bits_of(T value) {
  static_assert(sizeof(T) <= 8);
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  return bits;
}
template <typename T>
static T value_of(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

// Shared memory.

static unsigned char* at(unsigned address) { return shared + static_cast<int>(address); }

static Barrier& barrier_at(unsigned address) {
  const auto found = block->barriers.find(address);
  if (found == block->barriers.end() && failure.empty()) failure = "a barrier is used before it is initialised";
  return block->barriers[address];
}

// What the launcher packs in the place of a tensor map.
struct Map {
  unsigned char* base;
  int64_t rank, element_bytes, swizzle, sizes[5], strides[5];
  int16_t box[5];
};
static_assert(sizeof(Map) <= 128);

static unsigned swizzled(unsigned address, int bytes) {
  return address ^ ((address >> 7 & (bytes / 16 - 1)) << 4);
}

static void copy_box(unsigned destination, const void* map, unsigned barrier, std::vector<long long> corner) {
  const Map& m = *static_cast<const Map*>(map);
  long long count = 1;
  for (int i = 0; i < m.rank; ++i) count *= m.box[i];
  for (long long n = 0; n < count; ++n) {
    long long rest = n, offset = 0;
    bool inside = true;
    for (int i = 0; i < m.rank; ++i) {
      const long long place = corner[i] + rest % m.box[i];
      rest /= m.box[i];
      inside = inside && place >= 0 && place < m.sizes[i];
      offset += place * m.strides[i];
    }
    const unsigned linear = destination + n * m.element_bytes;
    unsigned char* const to = at(m.swizzle ? swizzled(linear, m.swizzle) : linear);
    if (inside)
      std::memcpy(to, m.base + offset, m.element_bytes);
    else
      std::memset(to, 0, m.element_bytes);
  }
  Barrier& of = barrier_at(barrier);
  of.bytes -= count * m.element_bytes;
  of.complete();
}

// Numbers.

static unsigned bits16(float x, int exponent_bits, int mantissa_bits, bool saturates) {
  const int bias = (1 << (exponent_bits - 1)) - 1, width = exponent_bits + mantissa_bits;
  const unsigned sign = std::signbit(x);
  if (std::isnan(x)) return saturates ? 0x7f : (1u << width) - 1;
  double y = std::fabs(static_cast<double>(x));
  if (!std::isinf(y) && y != 0) {
    const int step = std::max(std::ilogb(y), 1 - bias) - mantissa_bits;
    y = std::ldexp(std::nearbyint(std::ldexp(y, -step)), step);
  }
  if (saturates) y = std::min(y, 448.0);
  unsigned bits = 0;
  if (!saturates && (std::isinf(y) || (y != 0 && std::ilogb(y) > bias))) {
    bits = ((1u << exponent_bits) - 1) << mantissa_bits;
  } else if (y != 0) {
    const int exponent = std::max(std::ilogb(y), 1 - bias);
    const auto digits = static_cast<unsigned>(std::ldexp(y, mantissa_bits - exponent));
    const bool is_normal = digits >> mantissa_bits;
    bits = is_normal ? ((exponent + bias) << mantissa_bits) + (digits - (1u << mantissa_bits)) : digits;
  }
  return bits | sign << width;
}

static float number(unsigned bits, int exponent_bits, int mantissa_bits, bool has_infinity) {
  const int bias = (1 << (exponent_bits - 1)) - 1, width = exponent_bits + mantissa_bits;
  const int exponent = bits >> mantissa_bits & ((1 << exponent_bits) - 1);
  const unsigned digits = bits & ((1u << mantissa_bits) - 1);
  float size;
  if (has_infinity && exponent == (1 << exponent_bits) - 1)
    size = digits ? NAN : INFINITY;
  else if (!has_infinity && (bits & 0x7f) == 0x7f)
    size = NAN;
  else if (exponent)
    size = std::ldexp(static_cast<float>(digits + (1u << mantissa_bits)), exponent - bias - mantissa_bits);
  else
    size = std::ldexp(static_cast<float>(digits), 1 - bias - mantissa_bits);
  return bits >> width & 1 ? -size : size;
}

static float half(unsigned bits) { return number(bits, 5, 10, true); }
static float bfloat(unsigned bits) {
  const unsigned word = bits << 16;
  float value;
  std::memcpy(&value, &word, 4);
  return value;
}
static float e4m3(unsigned bits) { return number(bits, 4, 3, false); }

enum Type { kBf16, kFp16, kE4m3 };
static float decoded(Type type, const unsigned char* from) {
  uint16_t word = from[0];
  if (type == kE4m3) return e4m3(word);
  std::memcpy(&word, from, 2);
  return type == kBf16 ? bfloat(word) : half(word);
}

// An operand of a product in shared memory: element (k, m or n).
struct Operand {
  uint64_t descriptor;
  Type type;
  bool is_transposed;  // contiguous in M or N

  float operator()(int k, int n) const {
    const unsigned start = (descriptor & 0x3fff) << 4, leading = (descriptor >> 16 & 0x3fff) << 4;
    const unsigned stride = (descriptor >> 32 & 0x3fff) << 4;
    const int mode = descriptor >> 62, width = mode == 1 ? 128 : mode == 2 ? 64 : 32;
    const int bytes = type == kE4m3 ? 1 : 2;
    const unsigned address =
        is_transposed ? start + n / 64 * leading + k / 8 * stride + k % 8 * 128 + n % 64 * 2
                      : start + n / 8 * stride + n % 8 * width + k * bytes;
    return decoded(type, at(swizzled(address, width)));
  }
};

// D (64 x kN) = A B + (accumulate ? D : 0), by a warpgroup. A is in shared memory, or in registers where `a` is null.
struct Product {
  float* d;
  const unsigned* a_registers;
  Operand a, b;
  bool accumulate;
};

static void multiply(int columns, int depth, const Product& mine) {
  const auto& all = meet_warpgroup(bits_of(&mine));
  if (threadIdx.x % 128 == 0) {
    std::vector<float> a(64 * depth), b(depth * columns);
    for (int row = 0; row < 64; ++row)
      for (int k = 0; k < depth; ++k) {
        if (mine.a_registers == nullptr) {
          a[row * depth + k] = mine.a(k, row);
        } else {
          const int of = row / 16 * 32 + row % 8 * 4 + k % 8 / 2, i = k / 8 * 2 + row / 8 % 2;
          const unsigned word = value_of<const Product*>(all[of])->a_registers[i];
          const uint16_t bits = k % 2 ? word >> 16 : word;
          a[row * depth + k] = decoded(mine.b.type, reinterpret_cast<const unsigned char*>(&bits));
        }
      }
    for (int k = 0; k < depth; ++k)
      for (int n = 0; n < columns; ++n) b[k * columns + n] = mine.b(k, n);
    for (int thread = 0; thread < 128; ++thread) {
      const Product& of = *value_of<const Product*>(all[thread]);
      for (int i = 0; i < columns / 2; ++i) {
        const int row = thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8;
        const int column = i / 4 * 8 + thread % 4 * 2 + i % 2;
        double sum = of.accumulate ? of.d[i] : 0.0;
        for (int k = 0; k < depth; ++k) sum += double(a[row * depth + k]) * b[k * columns + column];
        of.d[i] = static_cast<float>(sum);
      }
    }
  }
  meet_warpgroup(0);
}

void kernel_of_thread();

static void run_thread() {
  kernel_of_thread();
  now->is_done = true;
  --block->cluster->threads;
  if (block->cluster->arrived) block->cluster->complete();
  const unsigned warp = threadIdx.x / 32;
  for (auto& [key, meeting] : block->warps)  // nobody waits for who has returned
    if (key.first == warp && meeting.arrived) meeting.complete(alive(warp, key.second));
  swapcontext(&now->context, &scheduler);
}

// Near the variables that functions declare as shared: 32 bits hold the distance.
alignas(1024) static unsigned char memory[kOpenBlocks][kSharedBytes];
static std::vector<unsigned char*> unused;

static void begin(Block& of, dim3 index, int threads) {
  of.index = index;
  if (unused.empty()) {
    failure = "more blocks wait than there is memory for";
    return;
  }
  of.shared = unused.back();
  unused.pop_back();
  std::memset(of.shared, 0xff, kSharedBytes);
  of.fibers.resize(threads);
  for (Fiber& fiber : of.fibers) {
    fiber.stack.reset(new char[kStack]);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStack;
    fiber.context.uc_link = &scheduler;
    makecontext(&fiber.context, run_thread, 0);
  }
}

static std::string waiting(const Block& of) {
  std::map<std::string, std::pair<int, int>> by_reason;  // how many, the first
  for (size_t i = 0; i < of.fibers.size(); ++i)
    if (!of.fibers[i].is_done && by_reason[of.fibers[i].reason].first++ == 0)
      by_reason[of.fibers[i].reason].second = i;
  std::string text = "block " + std::to_string(of.index.x) + " " + std::to_string(of.index.y) + " " +
                     std::to_string(of.index.z) + ":";
  for (const auto& [reason, who] : by_reason)
    text += " " + std::to_string(who.first) + " threads from " + std::to_string(who.second) + " on wait for " + reason +
            ";";
  return text;
}

// Until the block is done, or all of its threads wait.
static void run_block(Block& of) {
  block = &of;
  shared = of.shared;
  blockIdx = of.index;
  for (int idle = 0; idle < 2 && failure.empty();) {
    asks_others = false;
    bool goes_on = false;
    of.is_done = true;
    of.is_backward = !of.is_backward;
    for (size_t k = 0; k < of.fibers.size(); ++k) {
      const size_t i = of.is_backward ? of.fibers.size() - 1 - k : k;
      Fiber& fiber = of.fibers[i];
      if (fiber.is_done) continue;
      of.is_done = false;
      if (fiber.watched != nullptr && *fiber.watched == fiber.value) continue;
      now = &fiber;
      threadIdx = {static_cast<unsigned>(i), 0, 0};
      const bool before = asks_others;
      asks_others = false;
      swapcontext(&scheduler, &fiber.context);
      goes_on = goes_on || !asks_others;
      asks_others = asks_others || before;
    }
    if (of.is_done) {
      of.fibers.clear();
      unused.push_back(of.shared);
      return;
    }
    idle = goes_on ? 0 : idle + 1;
  }
}

static void run_grid(dim3 grid, int threads, int cluster_size) {
  std::vector<std::unique_ptr<Block>> open;
  std::shared_ptr<Cluster> cluster;
  unused.clear();
  for (auto& each : memory) unused.push_back(each);
  for (unsigned n = 0; n < grid.x * grid.y * grid.z && failure.empty(); ++n) {
    open.emplace_back(new Block);
    if (n % cluster_size == 0) {
      cluster = std::make_shared<Cluster>();
      cluster->threads = cluster_size * threads;
    }
    open.back()->cluster = cluster;
    cluster->blocks.push_back(open.back().get());
    begin(*open.back(), {n % grid.x, n / grid.x % grid.y, n / grid.x / grid.y}, threads);
    run_block(*open.back());
    if (open.back()->is_done) open.pop_back();
  }
  while (!open.empty() && failure.empty()) {
    const unsigned long long before = writes;
    const size_t count = open.size();
    for (auto& each : open)
      if (failure.empty()) run_block(*each);
    std::erase_if(open, [](const auto& each) { return each->is_done; });
    if (open.size() == count && writes == before && failure.empty()) failure = "nobody goes on; " + waiting(*open[0]);
  }
}

}  // namespace host

// Built-in functions.

static inline float __uint_as_float(unsigned bits) { return host::value_of<float>(bits); }
static inline float __int_as_float(int bits) { return host::value_of<float>(static_cast<unsigned>(bits)); }
static inline unsigned __float_as_uint(float value) { return static_cast<unsigned>(host::bits_of(value)); }
static inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<uint64_t>(a) * b >> 32; }
static inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const uint64_t both = static_cast<uint64_t>(y) << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= (both >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return result;
}
static inline uint64_t __cvta_generic_to_shared(const void* pointer) {
  return static_cast<uint64_t>(static_cast<const unsigned char*>(pointer) - host::shared);
}
static inline long long clock64() { return 0; }
static inline void __trap() { host::failure = "trap"; host::yield(); }

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
  const auto& all = host::meet_warp(mask, host::bits_of(value));
  return host::lane() < by ? value : host::value_of<T>(all[host::lane() - by]);
}
static inline unsigned __ballot_sync(unsigned mask, int vote) {
  const auto& all = host::meet_warp(mask, vote != 0);
  unsigned votes = 0;
  for (int i = 0; i < 32; ++i)
    if (mask >> i & 1) votes |= static_cast<unsigned>(all[i]) << i;
  return votes;
}
static inline int __any_sync(unsigned mask, int vote) { return __ballot_sync(mask, vote) != 0; }
static inline int __all_sync(unsigned mask, int vote) { return __ballot_sync(mask, !vote) == 0; }
template <typename T>
static inline unsigned __match_any_sync(unsigned mask, T value) {
  const auto& all = host::meet_warp(mask, host::bits_of(value));
  unsigned same = 0;
  for (int i = 0; i < 32; ++i)
    if (mask >> i & 1) same |= static_cast<unsigned>(all[i] == host::bits_of(value)) << i;
  return same;
}
template <typename T, typename Join>
static inline T reduced(unsigned mask, T value, Join join) {
  const auto& all = host::meet_warp(mask, host::bits_of(value));
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
  int any = 0;
  for (uint64_t one : host::meet_block(vote != 0)) any |= one != 0;
  return any;
}
