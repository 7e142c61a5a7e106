// Operands of the GEMM engine that need more than packing: odd widths, gathered rows, bfloat16 beside float32.

#include "gemm.h"

namespace prl {

Rows rows_of(
    Kind kind, ScalarType dtype, const void* src, const int64_t* index, int64_t rows, int64_t k, Scratch& scratch) {
  const int64_t element = size_of(dtype), bytes = units_of(kind, k) * 4;  // rows end with a whole unit
  const char* from = static_cast<const char*>(src);
  if (!index && bytes == k * element) return {from, bytes};
  char* to = scratch.get<char>(rows * bytes);
  for (int64_t i = 0; i < rows; ++i) {
    const char* row = from + (index ? index[i] : i) * k * element;
    char* copy = to + i * bytes;
    if (kind == Kind::f32 && dtype == kBF16) {
      kernels().widen(reinterpret_cast<float*>(copy), reinterpret_cast<const bf16*>(row), k);
    } else {
      std::memcpy(copy, row, k * element);
      std::memset(copy + k * element, 0, bytes - k * element);
    }
  }
  return {to, bytes};
}

namespace {

// `rows` rows of `width` elements, side by side.
const float* widened(const void* src, int64_t row, int64_t rows, int64_t width, Scratch& scratch) {
  float* to = scratch.get<float>(rows * width);
  for (int64_t i = 0; i < rows; ++i) kernels().widen(to + i * width, static_cast<const bf16*>(src) + i * row, width);
  return to;
}

}  // namespace

void pack_rows(
    Kind kind, ScalarType dtype, float* panel, const void* src, int64_t row, int64_t columns, int64_t k, Scratch& scratch) {
  if (kind == Kind::bf16) return kernels().pack_rows_bf16(panel, static_cast<const bf16*>(src), row, columns, k);
  if (dtype == kF32) return kernels().pack_rows_f32(panel, static_cast<const float*>(src), row, columns, k);
  kernels().pack_rows_f32(panel, widened(src, row, columns, k, scratch), k, columns, k);
}

void pack_columns(
    Kind kind, ScalarType dtype, float* panel, const void* src, int64_t row, int64_t columns, int64_t k, Scratch& scratch) {
  if (kind == Kind::bf16) return kernels().pack_columns_bf16(panel, static_cast<const bf16*>(src), row, columns, k);
  if (dtype == kF32) return kernels().pack_columns_f32(panel, static_cast<const float*>(src), row, columns, k);
  kernels().pack_columns_f32(panel, widened(src, row, k, columns, scratch), columns, columns, k);
}

void outer(Kind kind, const float* a, int64_t rows, const float* b, int64_t units, int64_t k, float* c, Store store) {
  constexpr int64_t resident = 128 << 10;  // floats of b that stay in the second-level cache
  const int64_t height = units * k > resident ? rows : kRows;
  for (int64_t i = 0; i < rows; i += height) {
    for (int64_t first = 0; first < k; first += kColumns) {
      const int64_t columns = std::min(kColumns, k - first);
      if (store == Store::add && i + height < rows)
        fetch(c + (i + height) * k + first, k, std::min(height, rows - i - height), columns);
      const Tile t = {a + i, 4, panel_width(rows) * 4, b + first * units, units, 0, columns, c + i * k + first, k, store};
      multiply(kind, t, std::min(height, rows - i));
    }
  }
}

}  // namespace prl
