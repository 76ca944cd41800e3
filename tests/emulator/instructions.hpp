// SPDX-License-Identifier: Apache-2.0
// The instructions that cumla/cuda/ptx writes in PTX, for a CPU. Follows the kernel's text, in which they are declared.
namespace cumla::ptx {

// convert.cuh
float canonical(float x) { return std::isnan(x) ? __uint_as_float(0x7fffffff) : x + 0.0f; }
u32 copy_of(u32 value) { return value; }
template <typename Pointee>
Pointee* copy_of(Pointee* pointer) { return pointer; }
template <typename T>
T choose(bool first, T one, T other) { return first ? one : other; }
template <>
u32 pack_pair<Bf16>(float low, float high) {
  return host::bits16(low, 8, 7, false) | host::bits16(high, 8, 7, false) << 16;
}
template <>
u32 pack_pair<Fp16>(float low, float high) {
  return host::bits16(low, 5, 10, false) | host::bits16(high, 5, 10, false) << 16;
}
template <>
float2 unpack_pair<Fp16>(u32 packed) {
  const auto one = [](float x) { return std::isnan(x) ? canonical(x) : x; };
  return {one(host::half(packed & 0xffff)), one(host::half(packed >> 16))};
}
u32 pack_e4m3x4(float a, float b, float c, float d) {
  return host::bits16(a, 4, 3, true) | host::bits16(b, 4, 3, true) << 8 | host::bits16(c, 4, 3, true) << 16 |
         host::bits16(d, 4, 3, true) << 24;
}
void expand_e4m3x4(u32 packed, u32& low, u32& high) {
  const auto one = [&](int i) { return host::bits16(host::e4m3(packed >> 8 * i & 0xff), 5, 10, false); };
  low = one(0) | one(1) << 16;
  high = one(2) | one(3) << 16;
}
float larger_or_nan(float a, float b) { return std::isnan(a) || std::isnan(b) ? canonical(NAN) : std::fmax(a, b); }
u32 highest_f16x2(u32 a, u32 b) {
  const auto one = [](u32 x, u32 y) { return host::bits16(std::fmax(host::half(x), host::half(y)), 5, 10, false); };
  return one(a & 0xffff, b & 0xffff) | one(a >> 16, b >> 16) << 16;
}
u32 add_f16x2(u32 a, u32 b) {
  const auto one = [](u32 x, u32 y) { return host::bits16(host::half(x) + host::half(y), 5, 10, false); };
  return one(a & 0xffff, b & 0xffff) | one(a >> 16, b >> 16) << 16;
}
template <typename T>
u32 multiply_pairs(u32 a, u32 b) {
  const float2 x = unpack_pair<T>(a), y = unpack_pair<T>(b);
  return pack_pair<T>(x.x * y.x, x.y * y.y);
}
float exp2_approx(float x) { return std::exp2(x); }
float reciprocal_approx(float x) { return 1.0f / x; }
float log2_approx(float x) { return std::log2(x); }

// copy.cuh
void prefetch_l2(const void*) {}
u64 evict_first_policy() { return 0; }
u64 evict_normal_policy() { return 0; }
void copy_4_async(u32 destination, const void* source, bool valid) {
  if (valid) std::memcpy(host::at(destination), source, 4);
  else std::memset(host::at(destination), 0, 4);
}
static void needs_16(const void* address) {
  if (reinterpret_cast<uintptr_t>(address) % 16 != 0) host::fail("16 bytes at an address that is no multiple of 16");
}
void copy_16_async(u32 destination, const void* source, bool valid) {
  if (valid) needs_16(source);
  if (valid) std::memcpy(host::at(destination), source, 16);
  else std::memset(host::at(destination), 0, 16);
}
void copy_16_async(u32 destination, const void* source, bool valid, u64) { copy_16_async(destination, source, valid); }
void copy_async_commit() {}
template <int kPending>
void copy_async_wait() {}

struct Registers {
  u32* d;
  u32 address;
};

// Matrices of eight rows of eight units: register i of a lane holds two units of the i-th.
static void move_matrices(u32 (&d)[4], u32 address, bool is_transposed, bool is_load) {
  Registers mine = {d, address};
  const uint64_t* all = host::meet_warp(0xffffffffu, host::bits_of(&mine), "a matrix of its warp");
  for (int i = 0; i < 4; ++i)
    for (int half = 0; half < 2; ++half) {
      const int lane = static_cast<int>(host::lane());
      const int row = is_transposed ? 2 * (lane % 4) + half : lane / 4;
      const int column = is_transposed ? lane / 4 : 2 * (lane % 4) + half;
      const u32 at = host::value_of<const Registers*>(all[8 * i + row])->address + 2 * column;
      uint16_t unit = half ? d[i] >> 16 : d[i];
      if (is_load) {
        std::memcpy(&unit, host::at(at), 2);
        d[i] = half ? (d[i] & 0xffff) | static_cast<u32>(unit) << 16 : (d[i] & 0xffff0000u) | unit;
      } else {
        std::memcpy(host::at(at), &unit, 2);
      }
    }
  __syncwarp();
}
void store_matrix_x4(u32 destination, u32 a, u32 b, u32 c, u32 d) {
  u32 words[4] = {a, b, c, d};
  move_matrices(words, destination, false, false);
}
void store_matrix_x4_transposed(u32 destination, u32 a, u32 b, u32 c, u32 d) {
  u32 words[4] = {a, b, c, d};
  move_matrices(words, destination, true, false);
}
void load_matrix_x4(u32 (&d)[4], u32 source) { move_matrices(d, source, false, true); }
void load_matrix_x4_transposed(u32 (&d)[4], u32 source) { move_matrices(d, source, true, true); }

template <typename V>
static V load_shared(u32 source) {
  V value;
  std::memcpy(&value, host::at(source), sizeof value);
  return value;
}
template <typename V>
static void store_shared(u32 destination, const V& value) { std::memcpy(host::at(destination), &value, sizeof value); }
void store_shared_zero_16(u32 destination) { std::memset(host::at(destination), 0, 16); }
void store_shared_float(u32 destination, float value) { store_shared(destination, value); }
float load_shared_float(u32 source) { return load_shared<float>(source); }
void store_shared_u32(u32 destination, u32 value) { store_shared(destination, value); }
u32 load_shared_u32(u32 source) { return load_shared<u32>(source); }
void store_shared_low_half(u32 destination, u32 word) { store_shared<uint16_t>(destination, word); }
uint2 load_shared_8(u32 source) { return load_shared<uint2>(source); }
void store_shared_float2(u32 destination, const float2& v) { store_shared(destination, v); }
float2 load_shared_float2(u32 source) { return load_shared<float2>(source); }
void store_shared_float4(u32 destination, const float4& v) { store_shared(destination, v); }
float4 load_shared_float4(u32 source) { return load_shared<float4>(source); }
void store_shared_16(u32 destination, const uint4& v) { store_shared(destination, v); }
uint4 load_shared_16(u32 source) { return load_shared<uint4>(source); }
void store_global_8(void* destination, u32 low, u32 high) {
  const u32 words[2] = {low, high};
  std::memcpy(destination, words, 8);
}
void store_global_16(void* destination, u32 a, u32 b, u32 c, u32 d, AnyPolicy) {
  needs_16(destination);
  const u32 words[4] = {a, b, c, d};
  std::memcpy(destination, words, 16);
}
void store_global_16(void* destination, u32 a, u32 b, u32 c, u32 d, u64) {
  store_global_16(destination, a, b, c, d, AnyPolicy{});
}
void store_global_float2(void* destination, float low, float high) {
  const float words[2] = {low, high};
  std::memcpy(destination, words, 8);
}
void store_global_float4(void* destination, float a, float b, float c, float d) {
  const float words[4] = {a, b, c, d};
  std::memcpy(destination, words, 16);
}
float load_global_float_if(bool valid, const float* source, float otherwise) { return valid ? *source : otherwise; }
void store_global_float_if(bool valid, u64 destination, float value) {
  if (valid) *reinterpret_cast<float*>(destination) = value;
}
void store_global_low_half_if(bool valid, u64 destination, u32 word) {
  if (valid) *reinterpret_cast<uint16_t*>(destination) = word;
}
float4 load_l2_float4(const float4* source) { return *source; }
float load_l2_float(const float* source) { return *source; }
uint4 load_global_16(const uint4* address) { return *address; }
float4 load_global_16(const float4* address) { return *address; }

// cluster.cuh
void cluster_sync() { host::meet_cluster(); }
void cluster_sync_relaxed() { host::meet_cluster(); }
void cluster_arrive_relaxed() {}
void cluster_wait() { host::meet_cluster(); }
u32 shared_address_in(u32 address, u32 rank) {
  return address + static_cast<u32>(host::shared_of(rank) - host::shared);
}
u32 load_cluster_u32(u32 source) { return load_shared<u32>(source); }
float2 load_cluster_float2(u32 source) { return load_shared<float2>(source); }
float4 load_cluster_float4(u32 source) { return load_shared<float4>(source); }
void store_shared_u64(u32 destination, u64 value) { store_shared(destination, value); }
void store_cluster_u64(u32 destination, u64 value) { store_shared(destination, value); }
void store_cluster_async(u32 destination, const float4& v, u32 barrier) {
  if (host::cluster_size() == 1) host::fail("st.async in a launch without clusters");
  store_shared(destination, v);
  host::Barrier& of = host::barrier_of_cluster(barrier);
  of.bytes -= 16;
  of.complete();
}

void mbarrier_arrive_cluster(u32 barrier) {
  host::Barrier& of = host::barrier_of_cluster(barrier);
  if (of.pending-- == 0) host::fail("more arrivals than a barrier expects");
  of.complete();
  ++host::writes;
}

// mbarrier.cuh
void mbarrier_init(u32 barrier, u32 arrivals) { host::initialise_barrier(barrier, arrivals); }
void mbarrier_invalidate(u32 barrier) { host::invalidate_barrier(barrier); }
void fence_mbarrier_init() {}
void mbarrier_arrive(u32 barrier) {
  host::Barrier& of = host::barrier_at(barrier);
  if (of.pending-- == 0) host::fail("more arrivals than a barrier expects");
  of.complete();
}
void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes) {
  host::barrier_at(barrier).bytes += bytes;
  mbarrier_arrive(barrier);
}
void mbarrier_arrive_after_copies(u32 barrier) { mbarrier_arrive(barrier); }
bool mbarrier_test(u32 barrier, u32 parity) {  // most often it does not know yet, and others go on
  static unsigned asked;
  const bool done = (host::barrier_at(barrier).phase & 1) != parity;
  done ? host::pause() : host::yield();
  return done && ++asked % 16 == 0;
}
bool mbarrier_try_wait(u32 barrier, u32 parity) {
  const host::Barrier& of = host::barrier_at(barrier);
  if ((of.phase & 1) == parity) host::yield_until_changed(of.phase, of.phase, "a barrier in shared memory");
  return true;
}

// tma.cuh
void prefetch_tensor_map(const TensorMap*) {}
void tma_load_2d_async(u32 destination, const TensorMap* map, u32 barrier, int x, int y) {
  host::copy_box(destination, map, barrier, {x, y});
}
void tma_load_3d_async(u32 destination, const TensorMap* map, u32 barrier, int x, int y, int z, u64) {
  host::copy_box(destination, map, barrier, {x, y, z});
}
void tma_load_4d_async(u32 destination, const TensorMap* map, u32 barrier, int x, int y, int z, int w) {
  host::copy_box(destination, map, barrier, {x, y, z, w});
}
void tma_prefetch_4d(const TensorMap*, int, int, int, int) {}
void copy_bulk_async(u32 destination, const void* source, u32 bytes, u32 barrier) {
  std::memcpy(host::at(destination), source, bytes);
  host::Barrier& of = host::barrier_at(barrier);
  of.bytes -= bytes;
  of.complete();
}
void copy_bulk_async(u32 destination, const void* source, u32 bytes, u32 barrier, u64) {
  copy_bulk_async(destination, source, bytes, barrier);
}
void prefetch_bulk_l2(const void*, u32) {}

// sync.cuh
bool elect_one() { return host::lane() == 0; }
void fence_proxy_async_shared() {}
template <int kBarrier, int kThreads>
void named_barrier_sync() { host::meet_named(kBarrier, kThreads, false); }
template <int kBarrier, int kThreads>
void named_barrier_arrive() { host::arrive_named(kBarrier, kThreads); }
template <int kBarrier, int kThreads>
bool named_barrier_any(bool vote) { return host::meet_named(kBarrier, kThreads, vote); }
u32 atomic_add_acq_rel(u32* address, u32 value) {
  const u32 before = *address;
  *address += value;
  ++host::writes;
  return before;
}
u32 load_acquire(const u32* address) {
  host::yield();
  return *address;
}
void store_relaxed(u32* address, u32 value) {
  *address = value;
  ++host::writes;
}
u32 load_acquire_system(const u32* address) { return load_acquire(address); }
void add_release_system(u32* address, u32 value) { atomic_add_acq_rel(address, value); }
u64 nanoseconds() { return 0; }
void count_shared(u32 counter) { store_shared(counter, load_shared<u32>(counter) + 1); }
void fence_sc_gpu() {}
void grid_dependency_wait() {}
void grid_dependency_launch() {}
template <int kRegisters>
void registers_increase() { host::set_registers(kRegisters); }
template <int kRegisters>
void registers_decrease() { host::set_registers(kRegisters); }

// mma.cuh
struct Fragments {
  u32 a[4], b[2];
};
static void multiply_fragments(float (&d)[4], host::Type type, const Fragments& mine) {
  const uint64_t* all = host::meet_warp(0xffffffffu, host::bits_of(&mine), "a product of its warp");
  const auto unit = [&](const u32* words, int k) {
    const unsigned bits = words[k / 8] >> k % 2 * 16 & 0xffff;
    return type == host::kBf16 ? host::bfloat(bits) : host::half(bits);
  };
  const int lane = static_cast<int>(host::lane());
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    float sum = d[i];
    for (int k = 0; k < 16; ++k) {
      const auto* a = host::value_of<const Fragments*>(all[row % 8 * 4 + k % 8 / 2]);
      const auto* b = host::value_of<const Fragments*>(all[column * 4 + k % 8 / 2]);
      const u32 of_row[2] = {a->a[row / 8], a->a[row / 8 + 2]};
      sum += unit(of_row, k) * unit(b->b, k);
    }
    d[i] = sum;
  }
  __syncwarp();
}
template <typename T>
constexpr host::Type kType = kIsBf16<T> ? host::kBf16 : host::kFp16;

template <typename T>
void mma_m16n8k16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  multiply_fragments(d, kType<T>, {{a0, a1, a2, a3}, {b0, b1}});
}
u32 transpose_matrix(u32 units) {
  const uint64_t* all = host::meet_warp(0xffffffffu, units, "a matrix of its warp");
  const int lane = static_cast<int>(host::lane());
  const auto unit = [&](int row) { return static_cast<u32>(all[row * 4 + lane / 8] >> lane / 4 % 2 * 16 & 0xffff); };
  return unit(lane % 4 * 2) | unit(lane % 4 * 2 + 1) << 16;
}

// wgmma.cuh
void warpgroup_arrive() {}
void warpgroup_commit() {}
template <int kPending>
void warpgroup_wait() {}
template <int kCount>
void keep_behind_wait(float (&)[kCount]) {}
template <int kCount>
void keep_before_products(u32 (&)[kCount]) {}

template <int kCount>
static void multiply(float (&d)[kCount], int depth, host::Type type, u64 a, bool a_is_transposed, u64 b,
                     bool b_is_transposed, bool accumulate) {
  host::multiply(2 * kCount, depth, {d, nullptr, {a, type, a_is_transposed}, {b, type, b_is_transposed}, accumulate});
}
template <int kCount>
static void multiply(float (&d)[kCount], host::Type type, const u32* a, u64 b, bool b_is_transposed,
                     bool accumulate) {
  const int depth = type == host::kE4m3 ? 32 : 16;
  host::multiply(2 * kCount, depth, {d, a, {}, {b, type, b_is_transposed}, accumulate});
}
template <typename T>
void wgmma_m64n64k16_async(float (&d)[32], u64 a, u64 b, bool accumulate) {
  multiply(d, 16, kType<T>, a, false, b, false, accumulate);
}
template <typename T>
void wgmma_m64n256k16_async(float (&d)[128], u64 a, u64 b) { multiply(d, 16, kType<T>, a, false, b, true, true); }
template <typename T>
void wgmma_m64n256k16_async(float (&d)[128], const u32* a, u64 b) { multiply(d, kType<T>, a, b, true, true); }
template <typename T>
void wgmma_m64n256k16_async(float (&d)[128], const u32* a, u64 b, bool accumulate) {
  multiply(d, kType<T>, a, b, false, accumulate);
}
template <typename T>
void wgmma_m64n64k16_async(float (&d)[32], const u32* a, u64 b, bool accumulate) {
  multiply(d, kType<T>, a, b, false, accumulate);
}
template <typename T>
void wgmma_values_async(float (&d)[32], const u32* a, u64 b) { multiply(d, kType<T>, a, b, true, true); }
template <typename T>
void wgmma_values_async(float (&d)[64], const u32* a, u64 b) { multiply(d, kType<T>, a, b, true, true); }
template <typename T>
void wgmma_values_async(float (&d)[64], u64 a, u64 b) { multiply(d, 16, kType<T>, a, false, b, true, true); }
template <typename T>
void wgmma_m64n128k16_async(float (&d)[64], u64 a, u64 b, bool accumulate) {
  multiply(d, 16, kType<T>, a, false, b, false, accumulate);
}
template <typename T, bool kTransposedA>
void wgmma_m64n16k16_async(float (&d)[8], u64 a, u64 b, bool accumulate) {
  multiply(d, 16, kType<T>, a, kTransposedA, b, false, accumulate);
}
template <typename T, bool kTransposedA>
void wgmma_m64n32k16_async(float (&d)[16], u64 a, u64 b, bool accumulate) {
  multiply(d, 16, kType<T>, a, kTransposedA, b, false, accumulate);
}
template <typename T, int kCount>
void wgmma_narrow_async(float (&d)[kCount], const u32* a, u64 b, bool accumulate) {
  multiply(d, kType<T>, a, b, false, accumulate);
}
template <int kCount>
void wgmma_e4m3_async(float (&d)[kCount], u64 a, u64 b, bool accumulate) {
  multiply(d, 32, host::kE4m3, a, false, b, false, accumulate);
}
void wgmma_e4m3_async(float (&d)[32], const u32* a, u64 b, bool accumulate) {
  multiply(d, host::kE4m3, a, b, false, accumulate);
}

}  // namespace cumla::ptx

static const void* parameters;

void host::kernel_of_thread() { ENTRY(*static_cast<const PARAMS*>(parameters)); }

extern "C" [[gnu::visibility("default")]] const char* run(const void* params, int x, int y, int z, int threads, int cluster) {
  parameters = params;
  gridDim = {unsigned(x), unsigned(y), unsigned(z)};
  blockDim = {unsigned(threads), 1, 1};
  return host::run_grid(gridDim, threads, cluster);
}
