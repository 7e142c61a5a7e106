// The GEMM engine: what a product is made of, whichever op asks and whichever path runs.
//
// A product is a · b with a tile of up to 6 rows of a and a panel of up to 64 columns of b. A unit is 32 bits along the sum:
// two bfloat16 or one float32. b is packed into a panel, units x width, so that 16 columns are one vector; a is read where it
// lies, one broadcast unit at a time. Each element is summed along K alone, in the same order whatever the rows and columns
// beside it: in runs of 256 (128 for FP8, each times its scales) that are then added up, which also keeps the error of a long
// sum small. So results depend on neither batch, tiles nor threads.

#pragma once

#include "common.h"

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>

namespace prl {

constexpr int64_t kRows = 6;
constexpr int64_t kColumns = 64;
constexpr int64_t kLanes = 16;

enum class Kind { bf16, f32 };  // what the units hold
enum class Store { bf16, f32, add };  // write c as bfloat16, as float32, or add to the float32 that is there

struct Tile {
  const void* a;  // unit u of row i lies i · a_row + u · a_unit bytes further
  int64_t a_row, a_unit;
  const float* b;  // panel
  int64_t units;
  int64_t rows, columns;
  void* c;
  int64_t c_row;  // elements
  Store store;
  // FP8: the scale of run r is a_scales[r · a_scales_run + row] · b_scales[r · 64 + column].
  const float* a_scales = nullptr;
  int64_t a_scales_run = 0;
  const float* b_scales = nullptr;
  // Memory wanted next, two cache lines for every unit that is multiplied.
  const char *next = nullptr, *next_end = nullptr;
  int64_t next_step = 0;
};

// Columns of a panel in memory: whole vectors, and as many as the tiles are compiled for.
inline int64_t panel_width(int64_t columns) { return columns > 32 ? 64 : columns > 16 ? 32 : 16; }

inline int64_t units_of(Kind kind, int64_t k) { return kind == Kind::bf16 ? (k + 1) / 2 : k; }

struct Kernels {
  void (*tile[2])(const Tile&);  // by Kind
  // Panels: `columns` columns of k elements; missing columns and the missing half of a last unit are zeros.
  // rows: column j is the row src + j · row (elements) of a matrix whose rows run along the sum;
  // columns: element i of all columns is the row src + i · row.
  void (*pack_rows_bf16)(float* panel, const bf16* src, int64_t row, int64_t columns, int64_t k);
  void (*pack_rows_f32)(float* panel, const float* src, int64_t row, int64_t columns, int64_t k);
  void (*pack_rows_f8)(float* panel, const f8* src, int64_t row, int64_t columns, int64_t k);  // k a multiple of 4
  void (*pack_columns_bf16)(float* panel, const bf16* src, int64_t row, int64_t columns, int64_t k);
  void (*pack_columns_f32)(float* panel, const float* src, int64_t row, int64_t columns, int64_t k);
  void (*widen)(float* dst, const bf16* src, int64_t n);
  void (*narrow)(bf16* dst, const float* src, int64_t n);
  void (*decode)(bf16* dst, const f8* src, int64_t n);  // exact: every e4m3 value is a bfloat16
};

extern const Kernels portable_kernels;
const Kernels& kernels();  // those of this processor

// Memory that grows and stays with its thread, so that calls do not pay for fresh pages.
class Scratch {
 public:
  template <class T>
  T* get(int64_t n) {
    size_t bytes = (size_t(n) * sizeof(T) + 64 + 63) / 64 * 64;
    if (bytes > size_) {
      memory_.reset();
      memory_.reset(std::aligned_alloc(64, bytes));
      if (!memory_) throw std::bad_alloc();
      size_ = bytes;
    }
    return static_cast<T*>(memory_.get());
  }

 private:
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  std::unique_ptr<void, Free> memory_;
  size_t size_ = 0;
};

// Asks for the part of c that a tile will add to.
inline void fetch(const float* c, int64_t c_row, int64_t rows, int64_t columns) {
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < columns; j += kLanes) __builtin_prefetch(c + i * c_row + j, 1, 2);
}

// Rows of a times one panel, in tiles of nearly equal height. `t` has everything but its rows' part: a, c, a_scales and rows
// are those of the first of `rows` rows.
inline void multiply(Kind kind, Tile t, int64_t rows) {
  const size_t element = t.store == Store::bf16 ? sizeof(bf16) : sizeof(float);
  for (int64_t left = rows; left > 0; left -= t.rows) {
    int64_t tiles = (left + kRows - 1) / kRows;
    t.rows = (left + tiles - 1) / tiles;
    if (t.store == Store::add && left > t.rows)
      fetch(static_cast<const float*>(t.c) + t.rows * t.c_row, t.c_row, std::min(t.rows, left - t.rows), t.columns);
    kernels().tile[int(kind)](t);
    t.a = static_cast<const char*>(t.a) + t.rows * t.a_row;
    t.c = static_cast<char*>(t.c) + t.rows * t.c_row * element;
    if (t.a_scales) t.a_scales += t.rows;
    if (t.next && (t.next += t.units * t.next_step) >= t.next_end) t.next = nullptr;
  }
}

// Operands as a product of `kind` takes them; a matrix of `dtype`, bfloat16 or float32, may be widened on the way.
inline int64_t size_of(ScalarType dtype) { return dtype == kBF16 ? sizeof(bf16) : sizeof(float); }

struct Rows {
  const char* data;
  int64_t row;  // bytes

  const char* at(int64_t i) const { return data + i * row; }
};

// `rows` rows of k elements, those of `index` where it is given. Copied to `scratch` where they cannot be read in place.
Rows rows_of(
    Kind kind, ScalarType dtype, const void* src, const int64_t* index, int64_t rows, int64_t k, Scratch& scratch);

// The panels of Kernels. `row` is the distance of rows in elements; `scratch` is used to widen.
void pack_rows(
    Kind kind, ScalarType dtype, float* panel, const void* src, int64_t row, int64_t columns, int64_t k, Scratch& scratch);
void pack_columns(
    Kind kind, ScalarType dtype, float* panel, const void* src, int64_t row, int64_t columns, int64_t k, Scratch& scratch);

// a · b into `rows` rows of float32 side by side, k wide: `a` is one panel, row i its column i; `b` all of b's panels, one after
// the other.
void outer(Kind kind, const float* a, int64_t rows, const float* b, int64_t units, int64_t k, float* c, Store store);

}  // namespace prl
