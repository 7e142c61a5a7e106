// Which tile of the output is computed when, and from what: integers only, the same code on the device and in the host's tests.
//
// Output tiles are TILE_M x TILE_N; a cluster of two blocks takes two that lie below one another (a pair). Pairs are walked in bands
// of BAND rows of pairs, down the band first: those that run at the same time then share BAND stripes of one operand and few of
// the other, which stay in L2. The group of a tile is found on the device, so nothing about the groups is ever waited for on
// the host. What is out of range in `starts` or `counts` (never read on the host) may give wrong numbers but no access
// outside the operands.
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
constexpr int CLUSTER = 2;
constexpr int PAIR_M = CLUSTER * TILE_M;
constexpr int BAND = 8;

PRL_INLINE int64_t clamp(int64_t x, int64_t low, int64_t high) { return x < low ? low : x > high ? high : x; }
PRL_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
PRL_INLINE int64_t count_pairs(int64_t rows, int64_t columns) { return ceil_div(rows, PAIR_M) * ceil_div(columns, TILE_N); }

// The first row and column of a pair of output tiles.
struct Corner {
  int row, column;
};

PRL_INLINE Corner corner(uint32_t pair, int rows, int columns) {
  uint32_t down = (rows + uint32_t{PAIR_M} - 1) / PAIR_M, across = (columns + uint32_t{TILE_N} - 1) / TILE_N;
  uint32_t band = pair / (BAND * across), inside = pair % (BAND * across);
  uint32_t height = down - band * BAND < BAND ? down - band * BAND : BAND;
  return {static_cast<int>((band * BAND + inside % height) * PAIR_M), static_cast<int>(inside / height * TILE_N)};
}

// The group that holds a row (a multiple of TILE_M), and how many of the TILE_M rows from there on are its own; 0: none's.
struct Owner {
  int group, rows;
};

// `group` is the last that starts at or before `row` (-1: none does): groups before it that start there too are empty.
PRL_INLINE Owner owned(int group, int row, const int64_t* starts, const int64_t* counts) {
  return {group, group < 0 ? 0 : static_cast<int>(clamp(starts[group] + counts[group] - row, 0, TILE_M))};
}

PRL_INLINE Owner owner(int row, const int64_t* starts, const int64_t* counts, int groups) {
  int low = 0, high = groups;
  while (low < high) {
    int middle = (low + high) / 2;
    if (starts[middle] <= row) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return owned(low - 1, row, starts, counts);
}

// The same for a row a little after one whose owner was `before`.
PRL_INLINE Owner owner_after(Owner before, int row, const int64_t* starts, const int64_t* counts, int groups) {
  int group = before.group;
  while (group + 1 < groups && starts[group + 1] <= row) ++group;
  return owned(group, row, starts, counts);
}

// The blocks of rows that a group is made of, its padding included.
struct Blocks {
  int first, last;
};

PRL_INLINE Blocks blocks_of(int group, const int64_t* starts, const int64_t* counts, int rows) {
  int64_t all = rows / BLOCK, first = clamp(starts[group] / BLOCK, 0, all);
  int64_t last = counts[group] <= 0 ? first : clamp(ceil_div(starts[group] + counts[group], BLOCK), first, all);
  return {static_cast<int>(first), static_cast<int>(last)};
}

}  // namespace prl

#endif
