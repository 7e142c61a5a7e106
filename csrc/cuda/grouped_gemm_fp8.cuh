// Block-scaled FP8 grouped GEMMs for Hopper: one kernel, two uses.
//
//   forward   out[r, n]     = a[r, :] . w[group of r][n, :]      (the input gradient is the same with transposed weights)
//   WEIGHT    out[e][n, k] += sum over group e's rows r of g[n, r] * a[k, r]
//
// Both are products of two operands whose contraction lies innermost (Hopper's FP8 tensor cores take no other), 128 of the
// contraction at a time. Why it is shaped so:
//
// * The tensor cores keep about 14 bits while they accumulate, so each 128 of the contraction goes into fresh accumulators and is
//   then added to float32 totals on the ordinary cores, times both scales. Those additions have to hide behind the other
//   warpgroup's products: two warpgroups take turns at the tensor cores, each with 64 rows of the tile.
// * A tile is 128 x 256: at the target rate a 128 x 128 tile asks more of L2 than it has (64 bytes per clock and SM against 48).
//   256 columns of totals and of accumulators do not fit into registers together, so a warpgroup computes its 64 x 256 as two
//   waves of 64 x 128 that use the same 64 accumulators after each other: 128 totals + 64 accumulators, no spills.
// * Two blocks (a cluster) compute tiles that lie below one another. Where these are of one group, and in WEIGHT always, each block
//   fetches half of the columns' operand for both: a third less to read from L2. Blocks of two groups fetch their own; a block
//   whose tile is nobody's goes along with the other, and stores zeros. So both always use the same number of stages.
// * A third warpgroup gives its registers away and feeds four stages of 48 KiB through TMA. It runs ahead into the next tile while
//   the others store theirs: the grid is as large as the machine, and a block walks over tiles (schedule.h).
// * Row scales are read from global memory one step ahead; they need no alignment. A column of the forward has one scale per
//   128 x 128 block, so a wave has one: the lanes hold those of 32 steps. In WEIGHT every column has its own, which come with
//   the stage.
// * Results go straight from registers to memory, four lanes exchanging so that each stores 16 bytes in a row and the four
//   64 in a row: there is no room in shared memory to stage them beside four stages.
//
// The order of every sum is fixed by the contraction alone: an output does not depend on the other rows, bit for bit.
#ifndef PRL_CUDA_GROUPED_GEMM_FP8_CUH
#define PRL_CUDA_GROUPED_GEMM_FP8_CUH

#include "hopper.cuh"
#include "layout.h"
#include "schedule.h"

namespace prl {

constexpr int STAGES = 4;
constexpr int WARPGROUP = 128;
constexpr int THREADS = 3 * WARPGROUP;
constexpr int WAVES = TILE_N / 128;
constexpr int ROWS_BYTES = TILE_M * ROW_BYTES;
constexpr int HALF_N = TILE_N / CLUSTER;  // what a block fetches for both
constexpr int COLUMNS_BYTES = TILE_N * ROW_BYTES;
constexpr int STAGE_BYTES = ROWS_BYTES + COLUMNS_BYTES;
constexpr int SCALES_BYTES = TILE_N * sizeof(float);

// Shared memory: the stages, aligned to an atom; then the stages' column scales (WEIGHT); then their barriers.
constexpr int SCALES_AT = STAGES * STAGE_BYTES;
constexpr int FULL_AT = SCALES_AT + STAGES * SCALES_BYTES;
constexpr int EMPTY_AT = FULL_AT + STAGES * 8;
constexpr int SHARED_BYTES = ATOM_BYTES + EMPTY_AT + STAGES * 8;
static_assert(SHARED_BYTES <= 232448, "more shared memory than a block has");

// out is [rows, columns], in WEIGHT [groups, rows, columns]; depth is the contraction (WEIGHT: the rows of the groups).
struct Problem {
  const float* row_scales;     // [depth / 128, rows]
  const float* column_scales;  // [groups, columns / 128, depth / 128]; WEIGHT: [depth / 128, columns]
  const int64_t* starts;
  const int64_t* counts;
  void* out;
  int rows, columns, depth, groups;
};

template <bool WEIGHT>
PRL_INLINE int64_t pairs_of(const Problem& p) {
  return count_pairs(p.rows, p.columns) * (WEIGHT ? p.groups : 1);
}

// A block's tile and what goes into it: blocks [first, last) of the contraction, none: nothing; rows from `live` on are of no
// group; `together`: the columns' operand is the same for both blocks of the cluster.
struct Work {
  int group, row, column, first, last, live;
  bool together;
};

template <bool WEIGHT>
PRL_INLINE Work work_of(const Problem& p, uint32_t pair, int rank) {
  if (WEIGHT) {
    auto pairs = static_cast<uint32_t>(count_pairs(p.rows, p.columns));
    int group = static_cast<int>(pair / pairs);
    Corner at = corner(pair % pairs, p.rows, p.columns);
    Blocks blocks = blocks_of(group, p.starts, p.counts, p.depth);
    return {group, at.row + rank * TILE_M, at.column, blocks.first, blocks.last, TILE_M, true};
  }
  Corner at = corner(pair, p.rows, p.columns);
  Owner upper = owner(at.row, p.starts, p.counts, p.groups);
  Owner lower = owner_after(upper, at.row + TILE_M, p.starts, p.counts, p.groups);
  bool two = upper.rows && lower.rows && upper.group != lower.group;
  int group = (two && rank) || !upper.rows ? lower.group : upper.group;
  int last = upper.rows || lower.rows ? p.depth / BLOCK : 0;
  return {group, at.row + rank * TILE_M, at.column, 0, last, rank ? lower.rows : upper.rows, !two};
}

// The stage in use, and how often all have been used.
struct Turn {
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void next() {
    if (++stage == STAGES) {
      stage = 0;
      phase ^= 1;
    }
  }
};

template <bool WEIGHT>
__device__ __forceinline__ void produce(const TensorMap* row_codes, const TensorMap* column_codes, const Problem& p, uint32_t shared) {
  int rank = blockIdx.x % CLUSTER;
  Turn turn;
  auto pairs = static_cast<uint32_t>(pairs_of<WEIGHT>(p));
  for (uint32_t pair = blockIdx.x / CLUSTER; pair < pairs; pair += gridDim.x / CLUSTER) {
    Work work = work_of<WEIGHT>(p, pair, rank);
    int group = WEIGHT ? 0 : work.group;
    uint32_t scale_bytes = WEIGHT ? static_cast<uint32_t>(clamp(p.columns - work.column, 0, TILE_N)) * sizeof(float) : 0;
    for (int block = work.first; block < work.last; ++block, turn.next()) {
      uint32_t to = shared + turn.stage * STAGE_BYTES, full = shared + FULL_AT + turn.stage * 8;
      uint32_t columns_to = to + ROWS_BYTES;
      int depth = block * BLOCK;
      barrier_wait(shared + EMPTY_AT + turn.stage * 8, turn.phase ^ 1);
      barrier_arrive_expecting(full, STAGE_BYTES + scale_bytes);
      load_tile(to, row_codes, full, depth, work.row, 0);
      if (work.together) {
        int half = rank * HALF_N;
        load_tile_for_both(columns_to + half * ROW_BYTES, column_codes, full, depth, work.column + half, group);
      } else {
        load_tile(columns_to, column_codes, full, depth, work.column, group);
        load_tile(columns_to + HALF_N * ROW_BYTES, column_codes, full, depth, work.column + HALF_N, group);
      }
      if (WEIGHT) {
        const float* scales = p.column_scales + int64_t{block} * p.columns + work.column;
        load_bytes(shared + SCALES_AT + turn.stage * SCALES_BYTES, scales, scale_bytes, full);
      }
    }
  }
}

// Four lanes hold, of four groups of eight columns, two columns each (packed): afterwards each holds all eight of one group.
__device__ __forceinline__ void transpose_quad(uint32_t (&v)[4], int lane) {
#pragma unroll
  for (int mask = 1; mask <= 2; mask *= 2) {
    bool upper = lane & mask;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & mask) continue;
      uint32_t other = from_lane_xor(upper ? v[i] : v[i | mask], mask);
      (upper ? v[i] : v[i | mask]) = other;
    }
  }
}

// A wave's totals of one row, `half` 0 or 1 of the fragment's two, to out at the wave's first column; as zeros where not `live`.
__device__ __forceinline__ void store_row(const float (&total)[64], int half, bool live, __nv_bfloat16* out, int lane) {
#pragma unroll
  for (int part = 0; part < 4; ++part) {
    uint32_t v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      int at = (part * 4 + i) * 4 + half * 2;
      v[i] = live ? pack_bf16(total[at], total[at + 1]) : 0;
    }
    transpose_quad(v, lane);
    if (out) *reinterpret_cast<uint4*>(out + (part * 4 + lane % 4) * 8) = make_uint4(v[0], v[1], v[2], v[3]);
  }
}

// The same in float32: two lanes hold two columns each of two groups; afterwards each holds four columns of one group.
template <bool ADD>
__device__ __forceinline__ void store_row(const float (&total)[64], int half, bool live, float* out, int lane) {
  bool odd = lane & 1;
  if (out) out += odd * 8 + (lane & 2) * 2;
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    float4 old[4];
    if (ADD && out) {
#pragma unroll
      for (int i = 0; i < 4; ++i) old[i] = *reinterpret_cast<const float4*>(out + (part * 4 + i) * 16);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      int at = (part * 4 + i) * 8 + half * 2;  // the even group's; the odd one's lie 4 further
      float x = odd ? total[at + 4] : total[at], y = odd ? total[at + 5] : total[at + 1];
      float give_x = odd ? total[at] : total[at + 4], give_y = odd ? total[at + 1] : total[at + 5];
      float got_x = from_lane_xor(give_x, 1), got_y = from_lane_xor(give_y, 1);
      float4 v = odd ? make_float4(got_x, got_y, x, y) : make_float4(x, y, got_x, got_y);
      if (!live) v = make_float4(0, 0, 0, 0);
      if (ADD && out) v = make_float4(old[i].x + v.x, old[i].y + v.y, old[i].z + v.z, old[i].w + v.w);
      if (out) *reinterpret_cast<float4*>(out + (part * 4 + i) * 16) = v;
    }
  }
}

template <typename OUT>
__device__ __forceinline__ void store_zeros(const Problem& p, const Work& work, int thread) {
  constexpr int PER_STORE = 16 / sizeof(OUT), PER_ROW = TILE_N / PER_STORE;
  for (int i = thread; i < TILE_M * PER_ROW; i += 2 * WARPGROUP) {
    int row = work.row + i / PER_ROW, column = work.column + i % PER_ROW * PER_STORE;
    OUT* out = static_cast<OUT*>(p.out) + int64_t{row} * p.columns + column;
    if (row < p.rows && column < p.columns) *reinterpret_cast<uint4*>(out) = make_uint4(0, 0, 0, 0);
  }
}

// The scales of a thread's rows and (forward) of its waves' columns, read ahead: rows by one step, columns by up to 32, one a lane.
template <bool WEIGHT>
struct Scales {
  const float *row_0, *row_1, *column[WAVES];
  float next_0, next_1, columns_32[WAVES];

  __device__ __forceinline__ void begin(const Problem& p, const Work& work, int row_0_at, int row_1_at, int lane) {
    const float* rows = p.row_scales + int64_t{work.first} * p.rows;
    next_0 = __ldg(row_0 = rows + clamp(work.row + row_0_at, 0, p.rows - 1));
    next_1 = __ldg(row_1 = rows + clamp(work.row + row_1_at, 0, p.rows - 1));
#pragma unroll
    for (int wave = 0; !WEIGHT && wave < WAVES; ++wave) {
      int64_t blocks = p.columns / BLOCK, block = clamp(work.column / BLOCK + wave, 0, blocks - 1);
      column[wave] = p.column_scales + (work.group * blocks + block) * (p.depth / BLOCK);
    }
    read_columns(work, work.first, lane);
  }

  __device__ __forceinline__ void next_rows(const Problem& p) {
    next_0 = __ldg(row_0 += p.rows);
    next_1 = __ldg(row_1 += p.rows);
  }

  __device__ __forceinline__ void read_columns(const Work& work, int block, int lane) {
#pragma unroll
    for (int wave = 0; !WEIGHT && wave < WAVES; ++wave) {
      if (block + lane < work.last) columns_32[wave] = __ldg(column[wave] + block + lane);
    }
  }
};

template <bool WEIGHT, typename OUT>
__device__ __forceinline__ void consume(const Problem& p, const uint8_t* memory, uint32_t shared, int warpgroup, int thread) {
  int lane = thread % 32, rank = blockIdx.x % CLUSTER;
  int row_0 = warpgroup * 64 + fragment_row(thread, 0), row_1 = warpgroup * 64 + fragment_row(thread, 2);
  Turn turn;
  Scales<WEIGHT> scales{};
  float acc[64] = {};
  auto pairs = static_cast<uint32_t>(pairs_of<WEIGHT>(p));
  Work coming = work_of<WEIGHT>(p, blockIdx.x / CLUSTER, rank);
  if (coming.first < coming.last) scales.begin(p, coming, row_0, row_1, lane);
  for (uint32_t pair = blockIdx.x / CLUSTER; pair < pairs;) {
    Work work = coming;
    float total[WAVES][64] = {};
    for (int block = work.first; block < work.last; ++block, turn.next()) {
      float now_0 = scales.next_0, now_1 = scales.next_1;
      if (block + 1 < work.last) scales.next_rows(p);
      if (block > work.first && block % 32 == 0) scales.read_columns(work, block, lane);
      uint32_t stage = shared + turn.stage * STAGE_BYTES, empty = shared + EMPTY_AT + turn.stage * 8;
      uint64_t rows = descriptor(stage + warpgroup * 64 * ROW_BYTES), columns = descriptor(stage + ROWS_BYTES);
      barrier_wait(shared + FULL_AT + turn.stage * 8, turn.phase);
#pragma unroll
      for (int wave = 0; wave < WAVES; ++wave) {
        held(acc);
        wgmma_begin();
#pragma unroll
        for (int k = 0; k < BLOCK; k += 32) {
          wgmma_64x128x32(acc, advanced(rows, k), advanced(columns, wave * 128 * ROW_BYTES + k), k > 0);
        }
        wgmma_end();
        held(acc);
        if (WEIGHT) {
          const uint8_t* at = memory + SCALES_AT + turn.stage * SCALES_BYTES;
          const float* own = reinterpret_cast<const float*>(at) + wave * 128 + fragment_column(thread, 0);
#pragma unroll
          for (int i = 0; i < 64; i += 4) {
            float2 column = *reinterpret_cast<const float2*>(own + fragment_column(0, i));
            total[wave][i] += now_0 * column.x * acc[i];
            total[wave][i + 1] += now_0 * column.y * acc[i + 1];
            total[wave][i + 2] += now_1 * column.x * acc[i + 2];
            total[wave][i + 3] += now_1 * column.y * acc[i + 3];
          }
          if (wave == WAVES - 1 && lane < CLUSTER) barrier_arrive(empty, lane);
        } else {
          if (wave == WAVES - 1 && lane < CLUSTER) barrier_arrive(empty, lane);
          float column = from_lane(scales.columns_32[wave], block % 32);
          float factor_0 = now_0 * column, factor_1 = now_1 * column;
#pragma unroll
          for (int i = 0; i < 64; i += 4) {
            total[wave][i] += factor_0 * acc[i];
            total[wave][i + 1] += factor_0 * acc[i + 1];
            total[wave][i + 2] += factor_1 * acc[i + 2];
            total[wave][i + 3] += factor_1 * acc[i + 3];
          }
        }
      }
    }
    // What the next tile needs first is on its way while this one is stored.
    pair += gridDim.x / CLUSTER;
    if (pair < pairs) coming = work_of<WEIGHT>(p, pair, rank);
    if (pair < pairs && coming.first < coming.last) scales.begin(p, coming, row_0, row_1, lane);
    if (work.first == work.last) {
      if (!WEIGHT) store_zeros<OUT>(p, work, warpgroup * WARPGROUP + thread);
      continue;
    }
    OUT* out = static_cast<OUT*>(p.out) + ((WEIGHT ? int64_t{work.group} * p.rows : 0) + work.row) * p.columns + work.column;
#pragma unroll
    for (int wave = 0; wave < WAVES; ++wave) {
      if (work.column + wave * 128 >= p.columns) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int row = half ? row_1 : row_0;
        OUT* to = work.row + row < p.rows ? out + int64_t{row} * p.columns + wave * 128 : nullptr;
        if constexpr (sizeof(OUT) == 2) {
          store_row(total[wave], half, row < work.live, to, lane);
        } else {
          store_row<WEIGHT>(total[wave], half, row < work.live, to, lane);
        }
      }
    }
  }
}

template <bool WEIGHT, typename OUT>
__global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    grouped_gemm_fp8(const __grid_constant__ TensorMap row_codes, const __grid_constant__ TensorMap column_codes,
                     const __grid_constant__ Problem problem) {
  uint8_t* memory = shared_memory();
  uint32_t start = shared_address(memory), shared = (start + ATOM_BYTES - 1) / ATOM_BYTES * ATOM_BYTES;
  int warpgroup = threadIdx.x / WARPGROUP;
  if (threadIdx.x == 0) {
    prefetch_map(&row_codes);
    prefetch_map(&column_codes);
    for (int stage = 0; stage < STAGES; ++stage) {
      barrier_init(shared + FULL_AT + stage * 8, 1);
      // A warp arrives when its own reads are over, at both blocks': either may fill the other's stages.
      barrier_init(shared + EMPTY_AT + stage * 8, CLUSTER * 2 * WARPGROUP / 32);
    }
    barrier_init_done();
  }
  cluster_sync();
  if (warpgroup == 0) {
    give_registers<40>();
    if (threadIdx.x == 0) produce<WEIGHT>(&row_codes, &column_codes, problem, shared);
    cluster_sync();  // the other block may still arrive at this one's barriers
  } else {
    take_registers<232>();
    consume<WEIGHT, OUT>(problem, memory + (shared - start), shared, warpgroup - 1, threadIdx.x % WARPGROUP);
    cluster_sync();
  }
}

}  // namespace prl

#endif
