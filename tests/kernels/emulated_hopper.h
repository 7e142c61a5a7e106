// A Hopper of one thread, so that csrc/cuda runs on the host: the kernels' own source, its interface included, is compiled with
// this in place of hopper.cuh and the CUDA headers.
//
// A CUDA thread is a fiber; clusters run one after the other, the two blocks of one side by side. Copies land late, in any order; products are computed only when they
// are waited for, from the bytes that then lie where their descriptors point: so a stage that is reused too early, a wrong
// phase, swizzle or fragment gives wrong numbers or a deadlock, which is reported. Accumulation is exact, not 14 bits.
#pragma once
#define PRL_CUDA_HOPPER_CUH

#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __shared__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__

struct dim3 {
  unsigned x;
  dim3(unsigned x = 1) : x(x) {}
};
inline struct Index {
  unsigned x;
} threadIdx, blockIdx, gridDim;
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
struct __nv_bfloat16 {
  uint16_t bits;
};

namespace emulated {

constexpr int FAILED = 99999;  // what a launch returns then; the words are `failure`
inline std::string failure;
[[noreturn]] inline void fail(const char* what) {
  throw std::runtime_error(what + (" (block " + std::to_string(blockIdx.x)) + ", thread " + std::to_string(threadIdx.x) + ")");
}

constexpr int STACK = 1 << 16;
constexpr unsigned CLUSTER = 2;
struct Product {
  uint64_t a, b;
  bool add;
};
struct Fiber {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(STACK);
  std::function<bool()> ready;  // empty: it can go on
  bool over = false;
  std::vector<Product> products;
  float* acc = nullptr;
  int exchanges = 0;
};
struct Barrier {
  int arrivals = 0, missing = 0;
  int64_t bytes = 0;
  uint32_t phase = 0;
};
struct Warp {
  uint64_t slots[2][32];
  int arrived[2] = {0, 0};
};
struct Block {
  std::vector<uint8_t> memory = std::vector<uint8_t>(232448, 0x7F);  // NaN
  std::map<uint32_t, Barrier> barriers;
  std::vector<Warp> warps;
  unsigned running = 0;
};
struct Machine {
  ucontext_t home;
  Block blocks[CLUSTER];
  std::vector<Fiber> fibers;  // block by block
  Fiber* current = nullptr;
  std::vector<std::function<void()>> copies;
  unsigned at_sync = 0;
  std::mt19937 random;
};
inline Machine* machine;
inline int processors = 1, seed = 0;
inline std::vector<std::pair<const char*, const char*>> readable;  // what `__ldg` and `load_bytes` may read; empty: anything

inline Fiber& self() { return *machine->current; }
inline unsigned rank() { return blockIdx.x % CLUSTER; }
inline Block& block(unsigned rank) {
  if (machine->blocks[rank].running == 0) fail("something is sent to a block that has ended");
  return machine->blocks[rank];
}
inline void wait_until(std::function<bool()> ready) {
  if (ready()) return;
  Fiber& fiber = self();
  fiber.ready = std::move(ready);
  swapcontext(&fiber.context, &machine->home);
}
inline void check_readable(const void* p, size_t bytes) {
  auto at = static_cast<const char*>(p);
  for (auto& [first, last] : readable) {
    if (first <= at && at + bytes <= last) return;
  }
  if (!readable.empty()) fail("a read outside the operands");
}
inline void settle(Barrier& barrier) {
  if (barrier.missing < 0) fail("more arrivals than a barrier has");
  if (barrier.missing == 0 && barrier.bytes == 0) {
    barrier.phase ^= 1;
    barrier.missing = barrier.arrivals;
  }
}
inline Barrier& barrier_at(unsigned rank, uint32_t address) {
  auto found = block(rank).barriers.find(address);
  if (found == block(rank).barriers.end()) fail("no barrier there");
  return found->second;
}
inline float decoded(int code) {
  int exponent = code >> 3 & 15, mantissa = code & 7;
  float value = exponent ? std::ldexp(1 + mantissa / 8.0f, exponent - 7) : std::ldexp(mantissa / 8.0f, -6);
  if ((code & 0x7F) == 0x7F) value = NAN;
  return code & 0x80 ? -value : value;
}
struct Codes {
  float values[256];
  Codes() {
    for (int code = 0; code < 256; ++code) values[code] = decoded(code);
  }
};
inline const Codes codes;

}  // namespace emulated

template <typename T>
T __ldg(const T* p) {
  emulated::check_readable(p, sizeof(T));
  return *p;
}

// The driver and the runtime, as far as the interface uses them.
using cuuint64_t = uint64_t;
using cuuint32_t = uint32_t;
enum CUresult { CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 1 };
enum {
  CU_TENSOR_MAP_DATA_TYPE_UINT8,
  CU_TENSOR_MAP_INTERLEAVE_NONE,
  CU_TENSOR_MAP_SWIZZLE_128B,
  CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE
};
struct alignas(64) CUtensorMap {
  const uint8_t* data;
  int64_t sizes[3], strides[2];
  int box[3];
};
inline CUresult cuTensorMapEncodeTiled(CUtensorMap* map, int, uint32_t rank, void* data, const uint64_t* sizes, const uint64_t* strides,
                                       const uint32_t* box, const uint32_t*, int, int, int, int) {
  if (rank != 3 || reinterpret_cast<uintptr_t>(data) % 16 || box[0] != 128) return CUDA_ERROR_INVALID_VALUE;
  map->data = static_cast<const uint8_t*>(data);
  for (int i = 0; i < 3; ++i) {
    if (box[i] < 1 || box[i] > 256 || sizes[i] < 1 || sizes[i] > uint64_t{1} << 32) return CUDA_ERROR_INVALID_VALUE;
    map->sizes[i] = sizes[i], map->box[i] = box[i];
  }
  for (int i = 0; i < 2; ++i) {
    if (strides[i] % 16 || strides[i] >= uint64_t{1} << 40) return CUDA_ERROR_INVALID_VALUE;
    map->strides[i] = strides[i];
  }
  return CUDA_SUCCESS;
}

using cudaError_t = int;
using cudaStream_t = void*;
enum { cudaSuccess, cudaEnableDefault, cudaDevAttrMultiProcessorCount, cudaFuncAttributeMaxDynamicSharedMemorySize };
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess, cudaDriverEntryPointSymbolNotFound };
#define CUDART_VERSION 13000
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
};
inline int cudaGetDriverEntryPointByVersion(const char*, void** found, unsigned, int, cudaDriverEntryPointQueryResult* result) {
  *found = reinterpret_cast<void*>(&cuTensorMapEncodeTiled);
  *result = cudaDriverEntryPointSuccess;
  return 0;
}
template <typename Kernel>
int cudaFuncSetAttribute(Kernel, int, int bytes) {
  return bytes <= 232448 ? 0 : 1;
}
inline int cudaGetDevice(int* device) { return *device = 0; }
inline int cudaDeviceGetAttribute(int* value, int, int) {
  *value = emulated::processors;
  return 0;
}
inline const char* cudaGetErrorString(int code) {
  return code == emulated::FAILED ? emulated::failure.c_str() : "an error of the runtime";
}

namespace prl {

using TensorMap = CUtensorMap;
constexpr uint32_t SHARED_START = 1024 + 16;  // not where a swizzled tile may begin

inline uint8_t* shared_memory() { return emulated::block(emulated::rank()).memory.data(); }
inline uint32_t shared_address(const void* p) { return SHARED_START + (static_cast<const uint8_t*>(p) - shared_memory()); }
inline uint8_t* shared_at(unsigned rank, uint32_t address) { return &emulated::block(rank).memory.at(address - SHARED_START); }

inline void barrier_init(uint32_t at, int arrivals) {
  emulated::block(emulated::rank()).barriers[at] = {arrivals, arrivals};
}
inline void barrier_init_done() {}
inline void barrier_change(unsigned rank, uint32_t at, int arrivals, int64_t bytes) {
  emulated::Barrier& barrier = emulated::barrier_at(rank, at);
  barrier.bytes += bytes;
  barrier.missing -= arrivals;
  emulated::settle(barrier);
}
inline void barrier_arrive_expecting(uint32_t at, uint32_t bytes) { barrier_change(emulated::rank(), at, 1, bytes); }
inline void barrier_arrive(uint32_t at, uint32_t rank) { barrier_change(rank, at, 1, 0); }
inline void barrier_wait(uint32_t at, uint32_t parity) {
  unsigned rank = emulated::rank();
  emulated::barrier_at(rank, at);
  emulated::wait_until([=] { return emulated::barrier_at(rank, at).phase != parity; });
}
inline void cluster_sync() {
  unsigned threads = emulated::machine->fibers.size(), turn = emulated::machine->at_sync++ / threads;
  emulated::wait_until([=] { return emulated::machine->at_sync / threads > turn; });
}

inline void prefetch_map(const TensorMap*) {}
inline void copy_tile(unsigned rank, uint32_t to, const TensorMap* map, uint32_t barrier, int x, int y, int z) {
  if (to % 1024) emulated::fail("a swizzled tile that is not aligned to an atom");
  emulated::machine->copies.push_back([=] {
    for (int row = 0; row < map->box[1]; ++row) {
      for (int byte = 0; byte < 128; ++byte) {
        bool inside = x + byte < map->sizes[0] && y + row < map->sizes[1] && z < map->sizes[2];
        uint32_t at = to + row * 128 + byte;
        at ^= (at >> 7 & 7) << 4;  // the hardware's swizzle: bits 4-6 of the address with bits 7-9
        *shared_at(rank, at) = inside ? map->data[z * map->strides[1] + (y + row) * map->strides[0] + x + byte] : 0;
      }
    }
    barrier_change(rank, barrier, 0, -map->box[1] * 128);
  });
}
inline void load_tile(uint32_t to, const TensorMap* map, uint32_t barrier, int x, int y, int z) {
  copy_tile(emulated::rank(), to, map, barrier, x, y, z);
}
inline void load_tile_for_both(uint32_t to, const TensorMap* map, uint32_t barrier, int x, int y, int z) {
  for (unsigned rank = 0; rank < emulated::CLUSTER; ++rank) copy_tile(rank, to, map, barrier, x, y, z);
}
inline void load_bytes(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  if (to % 16 || bytes % 16 || reinterpret_cast<uintptr_t>(from) % 16) emulated::fail("a copy that is not aligned to 16 bytes");
  emulated::check_readable(from, bytes);
  emulated::machine->copies.push_back([=, rank = emulated::rank()] {
    std::memcpy(shared_at(rank, to), from, bytes);
    barrier_change(rank, barrier, 0, -int64_t{bytes});
  });
}

template <int REGISTERS>
void give_registers() {}
template <int REGISTERS>
void take_registers() {}

inline void held(float (&)[64]) {}
inline void wgmma_begin() {
  if (!emulated::self().products.empty()) emulated::fail("products that nobody waited for");
}
inline void wgmma_64x128x32(float (&acc)[64], uint64_t a, uint64_t b, bool add) {
  emulated::self().acc = acc;
  emulated::self().products.push_back({a, b, add});
}
// 32 values of row `row` of a K-major descriptor with the 128-byte swizzle: atoms of eight rows, each row 128 bytes.
inline void operand(float (&values)[32], uint64_t descriptor, int row) {
  if (descriptor >> 62 != 1 || (descriptor >> 49 & 7) != 0) emulated::fail("a descriptor without the 128-byte swizzle");
  uint32_t start = (descriptor & 0x3FFF) << 4, stride = (descriptor >> 32 & 0x3FFF) << 4;
  for (int k = 0; k < 32; ++k) {
    uint32_t at = start + row / 8 * stride + row % 8 * 128 + k;
    at ^= (at >> 7 & 7) << 4;
    values[k] = emulated::codes.values[*shared_at(emulated::rank(), at)];
  }
}
inline void wgmma_end() {
  emulated::Fiber& fiber = emulated::self();
  emulated::wait_until([n = 0]() mutable { return n++ > 0; });  // later: others may go on meanwhile
  int thread = threadIdx.x % 128, row = thread / 32 * 16 + thread % 32 / 4, column = thread % 4 * 2;
  for (auto [a, b, add] : fiber.products) {
    float rows[2][32], columns[32];
    operand(rows[0], a, row);
    operand(rows[1], a, row + 8);
    for (int i = 0; i < 64; ++i) {
      operand(columns, b, i / 4 * 8 + column + (i & 1));
      float sum = add ? fiber.acc[i] : 0;
      for (int k = 0; k < 32; ++k) sum += rows[i >> 1 & 1][k] * columns[k];
      fiber.acc[i] = sum;
    }
  }
  fiber.products.clear();
}

template <typename T>
T from_lane(T x, int lane) {
  emulated::Warp& warp = emulated::block(emulated::rank()).warps[threadIdx.x / 32];
  int exchange = emulated::self().exchanges++;
  uint64_t* slots = warp.slots[exchange % 2];
  std::memcpy(&slots[threadIdx.x % 32], &x, sizeof(T));
  ++warp.arrived[exchange % 2];
  emulated::wait_until([&warp, exchange] { return warp.arrived[exchange % 2] >= (exchange / 2 + 1) * 32; });
  T other;
  std::memcpy(&other, &slots[lane], sizeof(T));
  return other;
}
template <typename T>
T from_lane_xor(T x, int mask) {
  return from_lane(x, threadIdx.x % 32 ^ mask);
}

inline uint16_t bf16_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (x != x) return 0x7FFF;
  return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
inline uint32_t pack_bf16(float low, float high) { return bf16_bits(low) | uint32_t{bf16_bits(high)} << 16; }

}  // namespace prl

namespace emulated {

inline std::function<void()>* body;
inline void enter() {
  try {
    (*body)();
  } catch (const std::runtime_error& error) {
    failure = error.what();
  }
  self().over = true;
  swapcontext(&self().context, &machine->home);
}

inline void run_cluster(unsigned first_block, unsigned threads, std::function<void()> kernel) {
  Machine m;
  machine = &m;
  body = &kernel;
  m.random.seed(seed);
  m.fibers.resize(CLUSTER * threads);
  for (Block& block : m.blocks) {
    block.running = threads;
    block.warps.resize(threads / 32);
  }
  for (Fiber& fiber : m.fibers) {
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = STACK;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, enter, 0);
  }
  for (unsigned left = CLUSTER * threads, idle = 0; left;) {
    ++idle;
    unsigned offset = m.random() % m.fibers.size();
    for (unsigned i = 0; i < m.fibers.size(); ++i) {
      unsigned index = (i + offset) % m.fibers.size();
      Fiber& fiber = m.fibers[index];
      m.current = &fiber;
      threadIdx.x = index % threads;
      blockIdx.x = first_block + index / threads;
      if (fiber.over || (fiber.ready && !fiber.ready())) continue;
      fiber.ready = nullptr;
      swapcontext(&m.home, &fiber.context);
      idle = 0;
      left -= fiber.over;
      m.blocks[index / threads].running -= fiber.over;
      if (!failure.empty()) return;
    }
    for (size_t i = m.copies.size(); i-- > 0;) {
      if (m.random() % 2) continue;
      m.copies[i]();
      m.copies.erase(m.copies.begin() + i);
      idle = 0;
    }
    if (idle > 100 && m.copies.empty()) fail("a deadlock");
  }
  if (!m.copies.empty()) fail("copies that land after the end");
}

}  // namespace emulated

template <typename... Parameters, typename... Arguments>
int cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...), Arguments... arguments) {
  emulated::failure.clear();
  gridDim.x = config->gridDim.x;
  if (gridDim.x % emulated::CLUSTER) return 1;
  for (unsigned block = 0; block < gridDim.x && emulated::failure.empty(); block += emulated::CLUSTER) {
    try {
      emulated::run_cluster(block, config->blockDim.x, [&] { kernel(arguments...); });
    } catch (const std::runtime_error& error) {
      emulated::failure = error.what();
    }
  }
  return emulated::failure.empty() ? 0 : emulated::FAILED;
}

// What a test sets before it calls: the number of processors, the order of events, and what may be read (count 0: anything).
extern "C" inline __attribute__((used)) void emulate(int processors, int seed, int count, const char** first, const char** last) {
  emulated::processors = processors;
  emulated::seed = seed;
  emulated::readable.clear();
  for (int i = 0; i < count; ++i) emulated::readable.push_back({first[i], last[i]});
}
