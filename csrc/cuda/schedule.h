// Which tile of the output is computed when, and from what: integers only, the same code on the device and in the host's tests.
//
// Output tiles are TILE_M x TILE_N. They are walked in bands of BAND rows of tiles, down the band first: the tiles that run at
// the same time then share BAND stripes of one operand and few of the other, which stay in L2. The group of a tile is
// found on the device, so nothing about the groups is ever waited for on the host. What is out of range in `starts` or
// `counts` (never read on the host) may give wrong numbers but no access outside the operands.
#ifndef PRL_CUDA_SCHEDULE_H
#define PRL_CUDA_SCHEDULE_H

#include <cstdint>

#ifdef __CUDACC__
#define PRL_INLINE __host__ __device__ __forceinline__
#else
#define PRL_INLINE inline
#endif

namespace prl {

constexpr int BLOCK = 128;  // rows or columns that share a scale, and the K that is summed before it is promoted
constexpr int TILE_M = 128;
constexpr int TILE_N = 256;
constexpr int BAND = 16;

PRL_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
PRL_INLINE int64_t clamp(int64_t x, int64_t low, int64_t high) { return x < low ? low : x > high ? high : x; }

// The first row and column of an output tile.
struct Corner {
  int64_t row, column;
};

PRL_INLINE int64_t count_tiles(int64_t rows, int64_t columns) { return ceil_div(rows, TILE_M) * ceil_div(columns, TILE_N); }

PRL_INLINE Corner corner(int64_t tile, int64_t rows, int64_t columns) {
  int64_t down = ceil_div(rows, TILE_M), across = ceil_div(columns, TILE_N);
  int64_t band = tile / (BAND * across), inside = tile % (BAND * across);
  int64_t height = down - band * BAND < BAND ? down - band * BAND : BAND;
  return {(band * BAND + inside % height) * TILE_M, inside / height * TILE_N};
}

// The group that holds row `row` (a multiple of TILE_M), and how many of the TILE_M rows from there on are its own; 0: none's.
struct Owner {
  int64_t group;
  int rows;
};

PRL_INLINE Owner owner(int64_t row, const int64_t* starts, const int64_t* counts, int64_t groups) {
  int64_t low = 0, high = groups;  // the last group that starts at or before `row`: those before it that start there are empty
  while (low < high) {
    int64_t middle = (low + high) / 2;
    if (starts[middle] <= row) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  if (low == 0) return {0, 0};
  return {low - 1, static_cast<int>(clamp(starts[low - 1] + counts[low - 1] - row, 0, TILE_M))};
}

// The blocks of rows that a group is made of, its padding included.
struct Blocks {
  int64_t first, last;
};

PRL_INLINE Blocks blocks_of(int64_t group, const int64_t* starts, const int64_t* counts, int64_t rows) {
  int64_t all = rows / BLOCK, first = clamp(starts[group] / BLOCK, 0, all);
  return {first, counts[group] <= 0 ? first : clamp(ceil_div(starts[group] + counts[group], BLOCK), first, all)};
}

}  // namespace prl

#endif
