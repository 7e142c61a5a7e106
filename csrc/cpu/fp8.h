// Block-scaled FP8 as prl/kernels/numerics.py defines it, for the kernels that quantise. Included after vector.h by the part of
// a source file that is compiled for each path.

constexpr int kParts = kBlock / kLanes;  // vectors in a block

// e4m3fn codes (in the low 8 bits) of |x| <= 448, rounded to nearest even. Adding 2^20 times x's binade (at least 2^-6, below
// which the step no longer shrinks) rounds to three bits of fraction; they then stand in the sum's lowest bits.
PRL_INLINE vu encode(vf x) {
  vu bits = (vu)x;
  vi binade = max((vi)(bits & 0x7f800000), vi{} + (121 << 23));
  vu big = (vu)(binade + (20 << 23)) | (bits & 0x80000000);
  vu steps = (vu)(x + (vf)big) - big;
  return (steps + (vu)((binade >> 20) - 121 * 8)) | ((bits >> 24) & 0x80);
}

PRL_INLINE void store_codes(f8* p, vu codes) {
  vb b = narrow_8(codes);
  memcpy(p, &b, sizeof b);
}

// The scales of blocks whose largest magnitudes have the bits `amax`; NaN where that is not finite.
PRL_INLINE vf scales_of(vi amax, bool pow2) {
  vf scale = (vf)max((vi)((vf)amax / 448.0f), vi{} + (1 << 23));  // at least 2^-126
  if (pow2) scale = (vf)((((vi)scale + 0x7fffff) >> 23) << 23);
  scale = amax == 0 ? splat(1.0f) : scale;
  return amax >= 0x7f800000 ? splat(NAN) : scale;
}

// One 1x128 block; returns its scale.
PRL_INLINE float quantise_row(const vf* x, bool pow2, f8* codes) {
  vi top = {};
  for (int j = 0; j < kParts; ++j) top = max(top, magnitude(x[j]));
  int32_t amax = max_of(top);
  if (amax >= 0x7f800000) {
    memset(codes, 0x7f, kBlock);
    return NAN;
  }
  float scale = scales_of(vi{} + amax, pow2)[0], inverse = 1.0f / scale;
  for (int j = 0; j < kParts; ++j) store_codes(codes + j * kLanes, encode(x[j] * inverse));
  return scale;
}

template <class T>
PRL_INLINE float quantise_row(const T* x, bool pow2, f8* codes) {
  vf v[kParts];
  for (int j = 0; j < kParts; ++j) v[j] = load(x + j * kLanes);
  return quantise_row(v, pow2, codes);
}

PRL_INLINE bytes low_pairs(bytes a, bytes b) {
#if PRL_WIDTH == 64
  return (bytes)_mm512_unpacklo_epi8((__m512i)a, (__m512i)b);
#else
  return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
#endif
}

PRL_INLINE bytes high_pairs(bytes a, bytes b) {
#if PRL_WIDTH == 64
  return (bytes)_mm512_unpackhi_epi8((__m512i)a, (__m512i)b);
#else
  return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#endif
}

// to[i][r] = from[r][i], for 16 rows r of PRL_WIDTH bytes. Pairing rows r and r + 8 four times over transposes each 16x16.
PRL_INLINE void transpose_16(const uint8_t* from, int64_t from_stride, uint8_t* to, int64_t to_stride) {
  bytes a[16], b[16];
  for (int r = 0; r < 16; ++r) memcpy(&a[r], from + r * from_stride, sizeof(bytes));
  for (int round = 0; round < 2; ++round) {
    for (int r = 0; r < 8; ++r) b[2 * r] = low_pairs(a[r], a[r + 8]), b[2 * r + 1] = high_pairs(a[r], a[r + 8]);
    for (int r = 0; r < 8; ++r) a[2 * r] = low_pairs(b[r], b[r + 8]), a[2 * r + 1] = high_pairs(b[r], b[r + 8]);
  }
  for (int part = 0; part < PRL_WIDTH / 16; ++part)
    for (int r = 0; r < 16; ++r) memcpy(to + (part * 16 + r) * to_stride, (const char*)&a[r] + part * 16, 16);
}

// What a tile of 128 rows and 128 columns becomes. Without columns (or rows) those pointers are null.
struct Tile {
  f8* row_codes;  // [128, row_stride]
  int64_t row_stride;
  float* row_scales;  // [128]
  f8* column_codes;   // [width, column_stride]
  int64_t column_stride;
  float* column_scales;  // [width]
  int width;             // columns that are kept
};

// rows: 128 pointers to 128 elements each. The columns' codes are transposed in a buffer, so that they leave in whole lines.
template <class T>
static void quantise_tile(const T* const* rows, bool pow2, const Tile& tile) {
  vi top[kParts] = {};
  for (int m = 0; m < kBlock; ++m) {
    vf v[kParts];
    for (int j = 0; j < kParts; ++j) v[j] = load(rows[m] + j * kLanes);
    if (tile.column_codes)
      for (int j = 0; j < kParts; ++j) top[j] = max(top[j], magnitude(v[j]));
    if (tile.row_codes) tile.row_scales[m] = quantise_row(v, pow2, tile.row_codes + m * tile.row_stride);
  }
  if (!tile.column_codes) return;
  alignas(64) f8 some[16][kBlock], turned[kBlock][kBlock];
  float scales[kBlock];
  vf inverse[kParts];
  for (int j = 0; j < kParts; ++j) {
    vf scale = scales_of(top[j], pow2);
    store(scales + j * kLanes, scale);
    inverse[j] = 1.0f / scale;
  }
  for (int m = 0; m < kBlock; m += 16) {
    for (int r = 0; r < 16; ++r)
      for (int j = 0; j < kParts; ++j)
        store_codes(some[r] + j * kLanes, encode(load(rows[m + r] + j * kLanes) * inverse[j]));
    for (int k = 0; k < kBlock; k += PRL_WIDTH) transpose_16(some[0] + k, kBlock, turned[k] + m, kBlock);
  }
  for (int k = 0; k < tile.width; ++k) {
    if (scales[k] != scales[k]) memset(turned[k], 0x7f, kBlock);
    memcpy(tile.column_codes + k * tile.column_stride, turned[k], kBlock);
  }
  memcpy(tile.column_scales, scales, tile.width * sizeof(float));
}
