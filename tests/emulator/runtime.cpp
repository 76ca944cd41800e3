// SPDX-License-Identifier: Apache-2.0
// The bodies of runtime.hpp, and the turns of the threads.
#include <setjmp.h>
#include <ucontext.h>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

dim3 blockIdx, threadIdx, gridDim, blockDim;

namespace host {

constexpr size_t kStack = 256 << 10, kSharedBytes = 256 << 10, kOpenBlocks = 256;
constexpr unsigned kRegisterFile = 64 << 10;  // registers of a multiprocessor; a block gets them all at launch

// One after the other it runs threads: those of a block, then those of another one.
struct Fiber {
  jmp_buf state;
  bool has_begun = false;
  bool is_done = false;  // its thread
  const unsigned* watched = nullptr;  // it waits while this is `value`
  unsigned value = 0;
  const char* reason = "";
  std::unique_ptr<char[]> stack{new char[kStack]};
};

unsigned char* shared;
unsigned rank_bits;
unsigned long long writes;
static jmp_buf scheduler;
static Fiber* now;
static std::string failure;
static bool asks_others;  // whether a thread has looked for what another block writes

void fail(const char* text) { failure = text; }

// Gives the turn back. Switches by longjmp ask the system for nothing; those by swapcontext ask it twice.
[[gnu::noinline]] static void leave() {
  if (_setjmp(now->state) == 0) _longjmp(scheduler, 1);
}

void yield_until_changed(const unsigned& watched, unsigned value, const char* reason) {
  now->watched = &watched;
  now->value = value;
  now->reason = reason;
  while (watched == value) leave();
  now->watched = nullptr;
}

void yield() {
  asks_others = true;
  leave();
}
void pause() { leave(); }

// Some threads that meet, again and again: each gives a value and gets those of all. A value stays until its owner has
// met the others once more.
struct Meeting {
  int arrived = 0;
  unsigned generation = 0;
  std::vector<uint64_t> values[2];

  const uint64_t* meet(int count, int place, int places, uint64_t value, const char* reason) {
    const unsigned mine = generation;
    auto& all = values[mine & 1];
    all.resize(places);
    all[place] = value;
    ++arrived;
    if (!complete(count)) yield_until_changed(generation, mine, reason);
    return all.data();
  }

  bool complete(int count) {
    if (arrived != count) return false;
    arrived = 0;
    ++generation;
    return true;
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
  std::vector<std::unique_ptr<Fiber>> fibers;
  int threads = 0;              // that have not returned
  std::vector<unsigned> lanes;  // of each warp, those that have not returned
  unsigned char* shared;
  unsigned rank_bits = 0;
  std::map<std::pair<unsigned, unsigned>, Meeting> warps;  // by warp and mask
  std::map<unsigned, Meeting> warpgroups, named;
  std::map<unsigned, Barrier> barriers;
  Meeting all;
  std::vector<unsigned> registers;  // of each warp, for one thread
  unsigned unused_registers = 0, register_changes = 0;
  bool is_done = false, is_backward = false;  // threads get their turns in both orders: who forgets to wait is seen
};
static Block* block;  // whose turn it is

// Threads that have not returned, of a warp and a mask.
static int alive(unsigned warp, unsigned mask) { return __builtin_popcount(block->lanes[warp] & mask); }

const uint64_t* meet_warp(unsigned mask, uint64_t value, const char* reason) {
  const unsigned warp = threadIdx.x / 32;
  return block->warps[{warp, mask}].meet(alive(warp, mask), lane(), 32, value, reason);
}

static const uint64_t* meet_warpgroup(uint64_t value) {
  return block->warpgroups[threadIdx.x / 128].meet(128, threadIdx.x % 128, 128, value, "its warpgroup");
}

const uint64_t* meet_block(uint64_t value) {
  return block->all.meet(block->threads, threadIdx.x, blockDim.x, value, "__syncthreads");
}

bool meet_named(unsigned barrier, int count, bool vote) {
  Meeting& meeting = block->named[barrier];
  if (meeting.arrived == 0) meeting.values[meeting.generation & 1].assign(blockDim.x, 0);
  const uint64_t* votes = meeting.meet(count, threadIdx.x, blockDim.x, vote, "a named barrier");
  return std::any_of(votes, votes + blockDim.x, [](uint64_t one) { return one != 0; });
}

void set_registers(unsigned count) {
  meet_warp(0xffffffffu, count, "its warp");
  unsigned& mine = block->registers[threadIdx.x / 32];
  while (mine != count) {
    const unsigned seen = block->register_changes;
    if (count > mine + block->unused_registers) {
      yield_until_changed(block->register_changes, seen, "registers that other warps hold");
      continue;
    }
    block->unused_registers += mine - count;
    mine = count;
    ++block->register_changes;
  }
}

void arrive_named(unsigned barrier, int count) {
  Meeting& meeting = block->named[barrier];
  ++meeting.arrived;
  meeting.complete(count);
}

void meet_cluster() {
  Cluster& cluster = *block->cluster;
  const unsigned mine = cluster.generation;
  ++cluster.arrived;
  cluster.complete();
  while (cluster.generation == mine && failure.empty()) {
    now->reason = "its cluster";
    yield();
  }
}

unsigned char* shared_of(unsigned rank) { return block->cluster->blocks[rank]->shared; }

// Shared memory.

void initialise_barrier(unsigned address, unsigned arrivals) { block->barriers[address] = {0, arrivals, arrivals, 0}; }
void invalidate_barrier(unsigned address) {
  barrier_at(address);
  block->barriers.erase(address);
}

Barrier& barrier_at(unsigned address) {
  const auto found = block->barriers.find(address);
  if (found == block->barriers.end() && failure.empty()) failure = "a barrier is used before it is initialised";
  return block->barriers[address];
}

unsigned cluster_size() { return static_cast<unsigned>(block->cluster->blocks.size()); }

Barrier& barrier_of_cluster(unsigned address) {
  for (Block* other : block->cluster->blocks) {
    const auto away = static_cast<unsigned>(other->shared - block->shared) + rank_bits - other->rank_bits;
    const auto found = other->barriers.find(address - away);
    if (found != other->barriers.end()) return found->second;
  }
  return barrier_at(address);
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

void copy_box(unsigned destination, const void* map, unsigned barrier, std::initializer_list<long long> corner) {
  const Map& m = *static_cast<const Map*>(map);
  long long count = 1;
  for (int i = 0; i < m.rank; ++i) count *= m.box[i];
  for (long long n = 0; n < count; ++n) {
    long long rest = n, offset = 0;
    bool inside = true;
    for (int i = 0; i < m.rank; ++i) {
      const long long place = corner.begin()[i] + rest % m.box[i];
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

unsigned bits16(float x, int exponent_bits, int mantissa_bits, bool saturates) {
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

template <int kExponentBits, int kMantissaBits, bool kHasInfinity>
static float looked_up(unsigned bits) {
  constexpr int kCount = 2 << (kExponentBits + kMantissaBits);
  static const std::vector<float> all = [] {
    std::vector<float> numbers(kCount);
    for (int i = 0; i < kCount; ++i) numbers[i] = number(i, kExponentBits, kMantissaBits, kHasInfinity);
    return numbers;
  }();
  return all[bits & (kCount - 1)];
}
float half(unsigned bits) { return looked_up<5, 10, true>(bits); }
float e4m3(unsigned bits) { return looked_up<4, 3, false>(bits); }

// Products.

static float decoded(Type type, const unsigned char* from) {
  uint16_t word = from[0];
  if (type == kE4m3) return e4m3(word);
  std::memcpy(&word, from, 2);
  return type == kBf16 ? bfloat(word) : half(word);
}

// Element (k, m or n).
static float element(const Operand& of, int k, int n) {
  const unsigned start = (of.descriptor & 0x3fff) << 4, leading = (of.descriptor >> 16 & 0x3fff) << 4;
  const unsigned stride = (of.descriptor >> 32 & 0x3fff) << 4;
  const int mode = of.descriptor >> 62, width = mode == 1 ? 128 : mode == 2 ? 64 : 32;
  const int bytes = of.type == kE4m3 ? 1 : 2;
  const unsigned address =
      of.is_transposed ? start + n / 64 * leading + k / 8 * stride + k % 8 * 128 + n % 64 * 2
                       : start + n / 8 * stride + n % 8 * width + k * bytes;
  return decoded(of.type, shared + swizzled(address, width));
}

void multiply(int columns, int depth, const Product& mine) {
  const uint64_t* const all = meet_warpgroup(bits_of(&mine));
  if (threadIdx.x % 128 == 0) {
    static double b[32][256], sums[256];
    for (int k = 0; k < depth; ++k)
      for (int n = 0; n < columns; ++n) b[k][n] = element(mine.b, k, n);
    for (int row = 0; row < 64; ++row) {
      const int first = row / 16 * 32 + row % 8 * 4;  // of the four threads that have the row
      const auto thread = [&](int i) -> const Product& { return *value_of<const Product*>(all[first + i]); };
      const auto place = [&](int column) { return column / 8 * 4 + row / 8 % 2 * 2 + column % 2; };
      for (int n = 0; n < columns; ++n) {
        const Product& of = thread(n % 8 / 2);
        sums[n] = of.accumulate ? of.d[place(n)] : 0.0;
      }
      for (int k = 0; k < depth; ++k) {
        double a;
        if (mine.a_registers == nullptr) {
          a = element(mine.a, k, row);
        } else {
          const int units = depth / 8;  // of a register
          const unsigned word = thread(k % (4 * units) / units).a_registers[k / (4 * units) * 2 + row / 8 % 2];
          const uint16_t bits = word >> k % units * (32 / units);
          a = decoded(mine.b.type, reinterpret_cast<const unsigned char*>(&bits));
        }
        for (int n = 0; n < columns; ++n) sums[n] += a * b[k][n];
      }
      for (int n = 0; n < columns; ++n) thread(n % 8 / 2).d[place(n)] = static_cast<float>(sums[n]);
    }
  }
  meet_warpgroup(0);
}

static void run_thread() {
  kernel_of_thread();
  now->is_done = true;
  --block->threads;
  --block->cluster->threads;
  if (block->cluster->arrived) block->cluster->complete();
  const unsigned warp = threadIdx.x / 32;
  block->lanes[warp] &= ~(1u << lane());
  for (auto& [key, meeting] : block->warps)  // nobody waits for who has returned
    if (key.first == warp && meeting.arrived) meeting.complete(alive(warp, key.second));
  leave();
}

static void run_threads() {
  for (;;) run_thread();
}

[[gnu::noinline]] static void resume(Fiber& fiber) {
  now = &fiber;
  if (_setjmp(scheduler) != 0) return;
  if (fiber.has_begun) _longjmp(fiber.state, 1);
  fiber.has_begun = true;
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = fiber.stack.get();
  context.uc_stack.ss_size = kStack;
  context.uc_link = nullptr;
  makecontext(&context, run_threads, 0);
  setcontext(&context);
}

// Near the variables that functions declare as shared: 32 bits hold the distance.
alignas(1024) static unsigned char memory[kOpenBlocks][kSharedBytes];
static std::vector<unsigned char*> unused;
static std::vector<std::unique_ptr<Fiber>> unused_fibers;

static void begin(Block& of, dim3 index, int threads) {
  of.index = index;
  if (unused.empty()) {
    failure = "more blocks wait than there is memory for";
    return;
  }
  of.shared = unused.back();
  unused.pop_back();
  std::memset(of.shared, 0xff, kSharedBytes);
  of.threads = threads;
  of.registers.assign((threads + 31) / 32, kRegisterFile / threads / 8 * 8);
  of.lanes.assign((threads + 31) / 32, 0xffffffffu);
  if (threads % 32) of.lanes.back() = (1u << threads % 32) - 1;
  for (int i = 0; i < threads; ++i) {
    if (unused_fibers.empty()) unused_fibers.emplace_back(new Fiber);
    of.fibers.push_back(std::move(unused_fibers.back()));
    unused_fibers.pop_back();
    of.fibers.back()->is_done = false;
  }
}

static std::string waiting(const Block& of) {
  std::map<std::string, std::pair<int, int>> by_reason;  // how many, the first
  for (size_t i = 0; i < of.fibers.size(); ++i)
    if (!of.fibers[i]->is_done && by_reason[of.fibers[i]->reason].first++ == 0)
      by_reason[of.fibers[i]->reason].second = i;
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
  rank_bits = of.rank_bits;
  blockIdx = of.index;
  for (int idle = 0; idle < 2 && failure.empty();) {
    asks_others = false;
    bool goes_on = false;
    of.is_done = true;
    of.is_backward = !of.is_backward;
    for (size_t k = 0; k < of.fibers.size(); ++k) {
      const size_t i = of.is_backward ? of.fibers.size() - 1 - k : k;
      Fiber& fiber = *of.fibers[i];
      if (fiber.is_done) continue;
      of.is_done = false;
      if (fiber.watched != nullptr && *fiber.watched == fiber.value) continue;
      threadIdx = {static_cast<unsigned>(i), 0, 0};
      const bool before = asks_others;
      asks_others = false;
      resume(fiber);
      goes_on = goes_on || !asks_others;
      asks_others = asks_others || before;
    }
    if (of.is_done) {
      for (auto& fiber : of.fibers) unused_fibers.push_back(std::move(fiber));
      of.fibers.clear();
      unused.push_back(of.shared);
      return;
    }
    idle = goes_on ? 0 : idle + 1;
  }
}

const char* run_grid(dim3 grid, int threads, int cluster_size) {
  std::vector<std::unique_ptr<Block>> open;
  std::shared_ptr<Cluster> cluster;
  failure.clear();
  unused.clear();
  for (auto& each : memory) unused.push_back(each);
  for (unsigned n = 0; n < grid.x * grid.y * grid.z && failure.empty(); ++n) {
    open.emplace_back(new Block);
    if (n % cluster_size == 0) {
      cluster = std::make_shared<Cluster>();
      cluster->threads = cluster_size * threads;
    }
    open.back()->cluster = cluster;
    open.back()->rank_bits = n % cluster_size << 24;
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
  unused_fibers.clear();
  return failure.c_str();
}

}  // namespace host
