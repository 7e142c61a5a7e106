// The GEMM engine in plain C++, for every processor: the same panels, runs and order as with AVX-512.
//
// The inner loops have fixed bounds and no branches, so that any compiler makes vectors of them; 4 x 8 sums fit the registers
// of the narrowest machine.

#include "gemm.h"

#include <cmath>
#include <limits>

namespace prl {
namespace {

constexpr int kStripRows = 4, kStripColumns = 8;

inline uint32_t unit_at(const char* p) {
  uint32_t unit;
  std::memcpy(&unit, p, sizeof unit);
  return unit;
}

template <bool Pairs, int Rows>
void strip(const Tile& t, const char* a, const float* b, int64_t width, int64_t units, float (&sum)[Rows][kStripColumns]) {
  for (int i = 0; i < Rows; ++i)
    for (int j = 0; j < kStripColumns; ++j) sum[i][j] = 0;
  for (int64_t u = 0; u < units; ++u, a += t.a_unit, b += width) {
    for (int i = 0; i < Rows; ++i) {
      const uint32_t row = unit_at(a + i * t.a_row);
      if constexpr (Pairs) {
        const float low = bits_to_float(row << 16), high = bits_to_float(row & 0xffff0000);
        for (int j = 0; j < kStripColumns; ++j) {
          const uint32_t column = float_to_bits(b[j]);
          sum[i][j] += low * bits_to_float(column << 16);
          sum[i][j] += high * bits_to_float(column & 0xffff0000);
        }
      } else {
        const float value = bits_to_float(row);
        for (int j = 0; j < kStripColumns; ++j) sum[i][j] += value * b[j];
      }
    }
  }
}

template <bool Pairs, int Rows>
void rows(const Tile& t, int64_t from) {
  const int64_t run = t.a_scales ? 64 : Pairs ? 128 : 256;
  const int64_t width = panel_width(t.columns);
  for (int64_t j = 0; j < t.columns; j += kStripColumns) {
    float total[Rows][kStripColumns] = {}, sum[Rows][kStripColumns];
    const char* a = static_cast<const char*>(t.a) + from * t.a_row;
    const float* b = t.b + j;
    for (int64_t u = 0, r = 0; u < t.units; u += run, ++r) {
      strip<Pairs, Rows>(t, a, b, width, std::min(run, t.units - u), sum);
      for (int i = 0; i < Rows; ++i) {
        for (int l = 0; l < kStripColumns; ++l) {
          if (t.a_scales) sum[i][l] *= t.a_scales[r * t.a_scales_run + from + i] * t.b_scales[r * kColumns + j + l];
          total[i][l] = r ? total[i][l] + sum[i][l] : sum[i][l];
        }
      }
      a += run * t.a_unit, b += run * width;
    }
    const int64_t n = std::min<int64_t>(kStripColumns, t.columns - j);
    for (int i = 0; i < Rows; ++i) {
      const int64_t at = (from + i) * t.c_row + j;
      for (int64_t l = 0; l < n; ++l) {
        if (t.store == Store::bf16) static_cast<bf16*>(t.c)[at + l] = to_bf16(total[i][l]);
        if (t.store == Store::f32) static_cast<float*>(t.c)[at + l] = total[i][l];
        if (t.store == Store::add) static_cast<float*>(t.c)[at + l] += total[i][l];
      }
    }
  }
}

template <bool Pairs>
void tile(const Tile& t) {
  int64_t i = 0;
  for (; i + kStripRows <= t.rows; i += kStripRows) rows<Pairs, kStripRows>(t, i);
  for (; i < t.rows; ++i) rows<Pairs, 1>(t, i);
}

inline float pair(bf16 low, bf16 high) { return bits_to_float(uint32_t(low) | uint32_t(high) << 16); }

void pack_rows_bf16(float* panel, const bf16* src, int64_t row, int64_t columns, int64_t k) {
  const int64_t width = panel_width(columns);
  for (int64_t j = 0; j < width; ++j)
    for (int64_t i = 0; i < k; i += 2)
      panel[i / 2 * width + j] = j < columns ? pair(src[j * row + i], i + 1 < k ? src[j * row + i + 1] : bf16(0)) : 0;
}

void pack_rows_f32(float* panel, const float* src, int64_t row, int64_t columns, int64_t k) {
  const int64_t width = panel_width(columns);
  for (int64_t j = 0; j < width; ++j)
    for (int64_t i = 0; i < k; ++i) panel[i * width + j] = j < columns ? src[j * row + i] : 0;
}

void pack_columns_bf16(float* panel, const bf16* src, int64_t row, int64_t columns, int64_t k) {
  const int64_t width = panel_width(columns);
  for (int64_t i = 0; i < k; i += 2)
    for (int64_t j = 0; j < width; ++j)
      panel[i / 2 * width + j] = j < columns ? pair(src[i * row + j], i + 1 < k ? src[(i + 1) * row + j] : bf16(0)) : 0;
}

void pack_columns_f32(float* panel, const float* src, int64_t row, int64_t columns, int64_t k) {
  const int64_t width = panel_width(columns);
  for (int64_t i = 0; i < k; ++i)
    for (int64_t j = 0; j < width; ++j) panel[i * width + j] = j < columns ? src[i * row + j] : 0;
}

// Every code as bfloat16.
struct Codes {
  bf16 of[256];
  Codes() {
    for (int code = 0; code < 256; ++code) {
      const int exponent = code >> 3 & 15, mantissa = code & 7;
      const float size = exponent ? std::ldexp(float(8 + mantissa), exponent - 10) : std::ldexp(float(mantissa), -9);
      of[code] = (code & 127) == 127 ? bf16(0x7fc0 | (code & 128) << 8) : to_bf16(code & 128 ? -size : size);
    }
  }
};
const Codes codes;

void decode(bf16* dst, const f8* src, int64_t n) {
  for (int64_t i = 0; i < n; ++i) dst[i] = codes.of[src[i]];
}

void pack_rows_f8(float* panel, const f8* src, int64_t row, int64_t columns, int64_t k) {
  const int64_t width = panel_width(columns);
  for (int64_t j = 0; j < width; ++j)
    for (int64_t i = 0; i < k; i += 2)
      panel[i / 2 * width + j] = j < columns ? pair(codes.of[src[j * row + i]], codes.of[src[j * row + i + 1]]) : 0;
}

void widen(float* dst, const bf16* src, int64_t n) {
  for (int64_t i = 0; i < n; ++i) dst[i] = to_float(src[i]);
}

void narrow(bf16* dst, const float* src, int64_t n) {
  for (int64_t i = 0; i < n; ++i) dst[i] = to_bf16(src[i]);
}

}  // namespace

const Kernels portable_kernels = {
    {tile<true>, tile<false>}, pack_rows_bf16, pack_rows_f32, pack_rows_f8, pack_columns_bf16, pack_columns_f32, widen, narrow, decode};

}  // namespace prl
