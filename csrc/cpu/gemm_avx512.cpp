// The GEMM engine on AVX-512 with BF16.
//
// 6 x 64 is the tile because its 24 sums, 4 vectors of b and 1 of a fill the 32 registers, and its 10 loads stay hidden behind
// 24 multiplications. vdpbf16ps takes two bfloat16 per lane and step at the speed of one float32, so that FP8 codes, which are
// exact in bfloat16, go the same way once decoded: by two byte lookups in 128 entries.

#include "gemm.h"

#ifdef PRL_X86

namespace prl {
namespace {

template <bool Pairs>
PRL_AVX512_INLINE __m512 dot(__m512 sum, __m512i a, __m512i b) {
  if constexpr (Pairs) return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
  return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum);
}

PRL_AVX512_INLINE __m512i broadcast(const char* p) {
  int32_t unit;
  std::memcpy(&unit, p, sizeof unit);
  return _mm512_set1_epi32(unit);
}

PRL_AVX512_INLINE __mmask16 first(int64_t n) { return n >= 16 ? 0xffff : n <= 0 ? 0 : (1u << n) - 1; }

template <bool Pairs, bool Scaled, int Rows, int Vectors>
PRL_AVX512 void tile(const Tile& t) {
  constexpr int64_t run = Scaled ? 64 : Pairs ? 128 : 256;
  alignas(64) float total[Rows * Vectors * kLanes];
  __m512 sum[Rows][Vectors];
  const char* a = static_cast<const char*>(t.a);
  const float* b = t.b;
  int64_t left = t.units;
  const char* next = t.next ? t.next : a;
  const int64_t next_step = t.next ? t.next_step : 0;
  for (int64_t r = 0;; ++r) {
#pragma GCC unroll 8
    for (int i = 0; i < Rows; ++i)
#pragma GCC unroll 4
      for (int j = 0; j < Vectors; ++j) sum[i][j] = _mm512_setzero_ps();
    const float* end = b + std::min(left, run) * Vectors * kLanes;
    for (; b != end; b += Vectors * kLanes, a += t.a_unit, next += next_step) {
      _mm_prefetch(next, _MM_HINT_T1);
      _mm_prefetch(next + 64, _MM_HINT_T1);
      __m512i column[Vectors];
#pragma GCC unroll 4
      for (int j = 0; j < Vectors; ++j) column[j] = _mm512_load_si512(b + j * kLanes);
#pragma GCC unroll 8
      for (int i = 0; i < Rows; ++i) {
        __m512i row = broadcast(a + i * t.a_row);
#pragma GCC unroll 4
        for (int j = 0; j < Vectors; ++j) sum[i][j] = dot<Pairs>(sum[i][j], row, column[j]);
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < Vectors; ++j) {
        float* so_far = total + (i * Vectors + j) * kLanes;
        if constexpr (Scaled) {
          __m512 scale = _mm512_mul_ps(
              _mm512_set1_ps(t.a_scales[r * t.a_scales_run + i]), _mm512_loadu_ps(t.b_scales + r * kColumns + j * kLanes));
          sum[i][j] = r ? _mm512_fmadd_ps(sum[i][j], scale, _mm512_load_ps(so_far)) : _mm512_mul_ps(sum[i][j], scale);
        } else if (r) {
          sum[i][j] = _mm512_add_ps(_mm512_load_ps(so_far), sum[i][j]);
        }
        if (left > run) _mm512_store_ps(so_far, sum[i][j]);
      }
    }
    left -= run;
    if (left <= 0) break;
  }
#pragma GCC unroll 8
  for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < Vectors; ++j) {
      const __mmask16 mask = first(t.columns - j * kLanes);
      const int64_t at = i * t.c_row + j * kLanes;
      if (t.store == Store::bf16) {
        _mm256_mask_storeu_epi16(static_cast<bf16*>(t.c) + at, mask, (__m256i)_mm512_cvtneps_pbh(sum[i][j]));
      } else {
        float* c = static_cast<float*>(t.c) + at;
        if (t.store == Store::add) sum[i][j] = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, c), sum[i][j]);
        _mm512_mask_storeu_ps(c, mask, sum[i][j]);
      }
    }
  }
}

template <bool Pairs, bool Scaled, int Vectors>
void tile_of_rows(const Tile& t) {
  switch (t.rows) {
    case 1: return tile<Pairs, Scaled, 1, Vectors>(t);
    case 2: return tile<Pairs, Scaled, 2, Vectors>(t);
    case 3: return tile<Pairs, Scaled, 3, Vectors>(t);
    case 4: return tile<Pairs, Scaled, 4, Vectors>(t);
    case 5: return tile<Pairs, Scaled, 5, Vectors>(t);
    default: return tile<Pairs, Scaled, 6, Vectors>(t);
  }
}

template <bool Pairs, bool Scaled>
void tile_of_width(const Tile& t) {
  switch (panel_width(t.columns)) {
    case 16: return tile_of_rows<Pairs, Scaled, 1>(t);
    case 32: return tile_of_rows<Pairs, Scaled, 2>(t);
    default: return tile_of_rows<Pairs, Scaled, 4>(t);
  }
}

void tile_bf16(const Tile& t) { t.a_scales ? tile_of_width<true, true>(t) : tile_of_width<true, false>(t); }
void tile_f32(const Tile& t) { tile_of_width<false, false>(t); }

// 16 x 16 units, rows to columns: pairs of rows, then of pairs, inside each quarter of a vector; then the quarters.
PRL_AVX512_INLINE void transpose(__m512i (&v)[16]) {
  __m512i w[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    w[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
    w[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    v[i] = _mm512_unpacklo_epi64(w[i], w[i + 2]);
    v[i + 1] = _mm512_unpackhi_epi64(w[i], w[i + 2]);
    v[i + 2] = _mm512_unpacklo_epi64(w[i + 1], w[i + 3]);
    v[i + 3] = _mm512_unpackhi_epi64(w[i + 1], w[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    __m512i low = _mm512_shuffle_i32x4(v[i], v[i + 4], 0x88), high = _mm512_shuffle_i32x4(v[i], v[i + 4], 0xdd);
    __m512i low2 = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0x88), high2 = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0xdd);
    w[i] = _mm512_shuffle_i32x4(low, low2, 0x88);
    w[i + 8] = _mm512_shuffle_i32x4(low, low2, 0xdd);
    w[i + 4] = _mm512_shuffle_i32x4(high, high2, 0x88);
    w[i + 12] = _mm512_shuffle_i32x4(high, high2, 0xdd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) v[i] = w[i];
}

constexpr int64_t kAhead = 512, kRowsAhead = 32;  // bytes, rows

// Rows of `bytes` bytes (even), as 32-bit units, to a panel; `put(v)` writes 16 of them.
PRL_AVX512_INLINE void load_rows(__m512i (&v)[16], const char* src, int64_t row, int64_t rows, int64_t bytes) {
  if (bytes >= 64 && rows >= 16) {
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) v[i] = _mm512_loadu_si512(src + i * row);
    return;
  }
  const __mmask64 mask = bytes >= 64 ? ~0ull : (1ull << bytes) - 1;
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) v[i] = i < rows ? _mm512_maskz_loadu_epi8(mask, src + i * row) : _mm512_setzero_si512();
}

// Asks for what load_rows will read some 16 steps later: of these rows, then of the 16 after them.
PRL_AVX512_INLINE void fetch_rows(const char* src, int64_t row, int64_t at, int64_t bytes) {
  at += kAhead;
  if (at >= bytes) at += 16 * row - bytes;
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) _mm_prefetch(src + i * row + at, _MM_HINT_T0);
}

PRL_AVX512 void pack_rows(float* panel, const char* src, int64_t row, int64_t columns, int64_t bytes) {
  const int64_t width = panel_width(columns), units = (bytes + 3) / 4;
  for (int64_t j = 0; j < width; j += kLanes) {
    for (int64_t u = 0; u < units; u += 16) {
      __m512i v[16];
      fetch_rows(src + j * row, row, u * 4, bytes);
      load_rows(v, src + j * row + u * 4, row, columns - j, bytes - u * 4);
      transpose(v);
      float* dst = panel + u * width + j;
      if (units - u >= 16) {
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) _mm512_store_si512(dst + i * width, v[i]);
      } else {
        for (int64_t i = 0; i < units - u; ++i) _mm512_store_si512(dst + i * width, v[i]);
      }
    }
  }
}

PRL_AVX512 void pack_rows_bf16(float* panel, const bf16* src, int64_t row, int64_t columns, int64_t k) {
  pack_rows(panel, reinterpret_cast<const char*>(src), row * 2, columns, k * 2);
}

PRL_AVX512 void pack_rows_f32(float* panel, const float* src, int64_t row, int64_t columns, int64_t k) {
  pack_rows(panel, reinterpret_cast<const char*>(src), row * 4, columns, k * 4);
}

// Two rows to one row of pairs.
PRL_AVX512 void pack_columns_bf16(float* panel, const bf16* src, int64_t row, int64_t columns, int64_t k) {
  const int64_t width = panel_width(columns);
  alignas(64) uint16_t order[32];
  for (int i = 0; i < 16; ++i) order[2 * i] = uint16_t(i), order[2 * i + 1] = uint16_t(32 + i);
  const __m512i low = _mm512_load_si512(order), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  for (int64_t i = 0; i < k; i += 2) {
    const bf16* p = src + i * row;
    for (int64_t j = 0; j < columns; j += 32) {
      _mm_prefetch(p + kRowsAhead * row + j, _MM_HINT_T0);
      _mm_prefetch(p + (kRowsAhead + 1) * row + j, _MM_HINT_T0);
    }
    float* dst = panel + i / 2 * width;
    for (int64_t j = 0; j < width; j += 32) {
      const int64_t n = columns - j;
      const __mmask32 mask = n >= 32 ? ~0u : n <= 0 ? 0 : (1u << n) - 1;
      __m512i even = _mm512_maskz_loadu_epi16(mask, p + j);
      __m512i odd = i + 1 < k ? _mm512_maskz_loadu_epi16(mask, p + row + j) : _mm512_setzero_si512();
      _mm512_store_si512(dst + j, _mm512_permutex2var_epi16(even, low, odd));
      if (width > 16) _mm512_store_si512(dst + j + 16, _mm512_permutex2var_epi16(even, high, odd));
    }
  }
}

PRL_AVX512 void pack_columns_f32(float* panel, const float* src, int64_t row, int64_t columns, int64_t k) {
  const int64_t width = panel_width(columns);
  for (int64_t i = 0; i < k; ++i)
    for (int64_t j = 0; j < width; j += kLanes)
      _mm512_store_ps(panel + i * width + j, _mm512_maskz_loadu_ps(first(columns - j), src + i * row + j));
}

// bfloat16 of the codes 0 … 127 by bytes; the sign is the code's.
struct Codes {
  alignas(64) uint8_t low[128], high[128];
  Codes() {
    for (int code = 0; code < 128; ++code) {
      const int exponent = code >> 3, mantissa = code & 7;
      float value = exponent ? float(8 + mantissa) : float(mantissa);
      for (int e = std::max(exponent, 1); e < 10; ++e) value *= 0.5f;
      for (int e = std::max(exponent, 1); e > 10; --e) value *= 2.0f;
      const bf16 bits = code == 127 ? bf16(0x7fc0) : to_bf16(value);
      low[code] = uint8_t(bits), high[code] = uint8_t(bits >> 8);
    }
  }
};
const Codes codes;

struct Tables {
  __m512i low0, low1, high0, high1, sign;
};

PRL_AVX512_INLINE Tables tables() {
  return {_mm512_load_si512(codes.low), _mm512_load_si512(codes.low + 64), _mm512_load_si512(codes.high),
          _mm512_load_si512(codes.high + 64), _mm512_set1_epi8(char(0x80))};
}

PRL_AVX512_INLINE __m512i low_bytes(const Tables& t, __m512i code) { return _mm512_permutex2var_epi8(t.low0, code, t.low1); }
PRL_AVX512_INLINE __m512i high_bytes(const Tables& t, __m512i code) {
  // (code & sign) | lookup
  return _mm512_ternarylogic_epi32(_mm512_permutex2var_epi8(t.high0, code, t.high1), code, t.sign, 0xf8);
}

// Transposed while a unit of four codes is 32 bits, decoded into two units of pairs afterwards: half the shuffles.
PRL_AVX512 void pack_rows_f8(float* panel, const f8* src, int64_t row, int64_t columns, int64_t k) {
  const int64_t width = panel_width(columns);
  const Tables t = tables();
  alignas(64) uint8_t order[64];
  for (int i = 0; i < 64; ++i) order[i] = uint8_t(i / 4 * 4 + i % 4 / 2 + i % 2 * 64);
  const __m512i front = _mm512_load_si512(order), back = _mm512_add_epi8(front, _mm512_set1_epi8(2));
  for (int64_t j = 0; j < width; j += kLanes) {
    for (int64_t q = 0; q < k; q += 64) {
      __m512i v[16];
      fetch_rows(reinterpret_cast<const char*>(src) + j * row, row, q, k);
      load_rows(v, reinterpret_cast<const char*>(src) + j * row + q, row, columns - j, k - q);
      transpose(v);
      float* dst = panel + q / 2 * width + j;
      const int64_t n = std::min<int64_t>(16, (k - q) / 4);
      for (int64_t i = 0; i < n; ++i) {
        const __m512i low = low_bytes(t, v[i]), high = high_bytes(t, v[i]);
        _mm512_store_si512(dst + 2 * i * width, _mm512_permutex2var_epi8(low, front, high));
        _mm512_store_si512(dst + (2 * i + 1) * width, _mm512_permutex2var_epi8(low, back, high));
      }
    }
  }
}

PRL_AVX512 void widen(float* dst, const bf16* src, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const __mmask16 mask = first(n - i);
    __m512i bits = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, src + i));
    _mm512_mask_storeu_epi32(dst + i, mask, _mm512_slli_epi32(bits, 16));
  }
}

PRL_AVX512 void narrow(bf16* dst, const float* src, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const __mmask16 mask = first(n - i);
    _mm256_mask_storeu_epi16(dst + i, mask, (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(mask, src + i)));
  }
}

PRL_AVX512 void decode(bf16* dst, const f8* src, int64_t n) {
  const Tables t = tables();
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);  // unpacking takes 8 of every 16 bytes
  for (int64_t i = 0; i < n; i += 64) {
    const int64_t left = n - i;
    const __mmask64 mask = left >= 64 ? ~0ull : (1ull << left) - 1;
    __m512i code = _mm512_permutexvar_epi64(order, _mm512_maskz_loadu_epi8(mask, src + i));
    __m512i low = low_bytes(t, code), high = high_bytes(t, code);
    _mm512_mask_storeu_epi16(dst + i, __mmask32(mask), _mm512_unpacklo_epi8(low, high));
    _mm512_mask_storeu_epi16(dst + i + 32, __mmask32(mask >> 32), _mm512_unpackhi_epi8(low, high));
  }
}

const Kernels avx512_kernels = {
    {tile_bf16, tile_f32}, pack_rows_bf16, pack_rows_f32, pack_rows_f8, pack_columns_bf16, pack_columns_f32, widen, narrow, decode};

}  // namespace

const Kernels& kernels() { return avx512() ? avx512_kernels : portable_kernels; }

}  // namespace prl

#else

namespace prl {
const Kernels& kernels() { return portable_kernels; }
}  // namespace prl

#endif
