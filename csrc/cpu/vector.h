// Vectors of PRL_WIDTH bytes in the compiler's own notation, and what the kernels need beyond arithmetic. Included by twice.h,
// inside the namespace of each path. Everything here acts on each element alone, whatever its lane, or has a fixed order.

#define PRL_INLINE static PRL_INLINE_MEMBER
#define PRL_INLINE_MEMBER inline __attribute__((always_inline))

constexpr int kLanes = PRL_WIDTH / 4;  // divides 16
typedef float vf __attribute__((vector_size(PRL_WIDTH)));
typedef int32_t vi __attribute__((vector_size(PRL_WIDTH)));
typedef uint32_t vu __attribute__((vector_size(PRL_WIDTH)));
typedef uint16_t vh __attribute__((vector_size(PRL_WIDTH / 2)));
typedef uint8_t vb __attribute__((vector_size(PRL_WIDTH / 4)));
typedef uint8_t bytes __attribute__((vector_size(PRL_WIDTH)));

PRL_INLINE vf splat(float x) { return vf{} + x; }

// Between the widths of integers; what does not fit is cut off. The compiler's own conversion takes three instructions for one.
#if PRL_WIDTH == 64
PRL_INLINE vu widen(vh v) { return (vu)_mm512_cvtepu16_epi32((__m256i)v); }
PRL_INLINE vu widen(vb v) { return (vu)_mm512_cvtepu8_epi32((__m128i)v); }
PRL_INLINE vh narrow_16(vu v) { return (vh)_mm512_cvtepi32_epi16((__m512i)v); }
PRL_INLINE vb narrow_8(vu v) { return (vb)_mm512_cvtepi32_epi8((__m512i)v); }
#else
PRL_INLINE vu widen(vh v) { return __builtin_convertvector(v, vu); }
PRL_INLINE vu widen(vb v) { return __builtin_convertvector(v, vu); }
PRL_INLINE vh narrow_16(vu v) { return __builtin_convertvector(v, vh); }
PRL_INLINE vb narrow_8(vu v) { return __builtin_convertvector(v, vb); }
#endif

PRL_INLINE vf load(const float* p) {
  vf v;
  memcpy(&v, p, sizeof v);
  return v;
}

PRL_INLINE vf load(const bf16* p) {
  vh v;
  memcpy(&v, p, sizeof v);
  return (vf)(widen(v) << 16);
}

PRL_INLINE vi load(const int32_t* p) {
  vi v;
  memcpy(&v, p, sizeof v);
  return v;
}

PRL_INLINE void store(int32_t* p, vi v) { memcpy(p, &v, sizeof v); }
PRL_INLINE void store(float* p, vf v) { memcpy(p, &v, sizeof v); }

// As prl::to_bf16.
PRL_INLINE vh to_bf16(vf v) {
  vu bits = (vu)v;
  vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return narrow_16(v == v ? rounded : vu{} + 0x7fc0);
}

PRL_INLINE void store(bf16* p, vf v) {
  vh h = to_bf16(v);
  memcpy(p, &h, sizeof h);
}

// The first n elements; the others are `rest`, and are not stored.
#if PRL_WIDTH == 64
PRL_INLINE __mmask16 first(int64_t n) { return n >= 16 ? 0xffff : (1u << n) - 1; }
PRL_INLINE vf load(const float* p, int64_t n, float rest = 0) {
  return (vf)_mm512_mask_loadu_ps((__m512)splat(rest), first(n), p);
}
PRL_INLINE vf load(const bf16* p, int64_t n) {
  return (vf)(widen((vh)_mm256_maskz_loadu_epi16(first(n), p)) << 16);
}
PRL_INLINE void store(float* p, vf v, int64_t n) { _mm512_mask_storeu_ps(p, first(n), (__m512)v); }
PRL_INLINE void store(bf16* p, vf v, int64_t n) { _mm256_mask_storeu_epi16(p, first(n), (__m256i)to_bf16(v)); }
#else
template <class T>
PRL_INLINE vf load(const T* p, int64_t n, T rest = 0) {
  if (n >= kLanes) return load(p);
  T part[kLanes];
  for (int i = 0; i < kLanes; ++i) part[i] = i < n ? p[i] : rest;
  return load(part);
}
template <class T>
PRL_INLINE void store(T* p, vf v, int64_t n) {
  if (n >= kLanes) return store(p, v);
  T part[kLanes];
  store(part, v);
  memcpy(p, part, n * sizeof(T));
}
#endif

PRL_INLINE vi max(vi a, vi b) { return a > b ? a : b; }

PRL_INLINE int32_t max_of(vi v) {
#if PRL_WIDTH == 64
  typedef int32_t vi8 __attribute__((vector_size(32)));
  vi8 a = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7), b = __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
  a = a > b ? a : b;
  __m128i c = _mm_max_epi32(_mm256_castsi256_si128((__m256i)a), _mm256_extracti128_si256((__m256i)a, 1));
  c = _mm_max_epi32(c, _mm_shuffle_epi32(c, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(c, _mm_shuffle_epi32(c, 0xb1)));
#else
  int32_t m = v[0];
  for (int i = 1; i < kLanes; ++i) m = v[i] > m ? v[i] : m;
  return m;
#endif
}

// The bits of |x|: as integers they are in the order of magnitude, infinity and then NaN last.
PRL_INLINE vi magnitude(vf x) { return (vi)x & 0x7fffffff; }

// A sum of floats in 16 lanes, whatever the width: element i of a row goes to lane i % 16.
struct Sum {
  vf part[16 / kLanes] = {};

  PRL_INLINE_MEMBER float total() const {
    float lane[16];
    memcpy(lane, part, sizeof lane);
    for (int width = 8; width > 0; width /= 2)
      for (int i = 0; i < width; ++i) lane[i] += lane[i + width];
    return lane[0];
  }
};

// 2^(i/16), and what rounding took from it.
static const float kRoots[16] = {0x1p+0f,        0x1.0b5586p+0f, 0x1.172b84p+0f, 0x1.2387a6p+0f, 0x1.306fep+0f,  0x1.3dea64p+0f,
                                 0x1.4bfdaep+0f, 0x1.5ab07ep+0f, 0x1.6a09e6p+0f, 0x1.7a1148p+0f, 0x1.8ace54p+0f, 0x1.9c4918p+0f,
                                 0x1.ae89fap+0f, 0x1.c199bep+0f, 0x1.d5818ep+0f, 0x1.ea4afap+0f};
static const float kRootRests[16] = {0x0p+0f,          0x1.9f3122p-25f, -0x1.c15742p-27f, 0x1.ceac48p-25f,
                                     0x1.4636e2p-25f,  0x1.824684p-25f, -0x1.593abcp-25f, -0x1.5bd5ecp-27f,
                                     0x1.9fcef4p-26f,  -0x1.829fdp-25f, 0x1.15506ep-27f,  0x1.51f848p-27f,
                                     -0x1.a94b14p-26f, -0x1.3d56b2p-27f, -0x1.822dbcp-27f, 0x1.52486cp-27f};

PRL_INLINE vf lookup(const float* table, vi index) {
#if PRL_WIDTH == 64
  return (vf)_mm512_permutexvar_ps((__m512i)index, _mm512_loadu_ps(table));
#else
  vf v;
  for (int i = 0; i < kLanes; ++i) v[i] = table[index[i] & 15];
  return v;
#endif
}

// e^x for x <= 0 as a float, within 0.51 units in the last place (gradual underflow, NaN stays), and what rounding took from it.
// x = n ln 2 / 16 + r, so that e^x is 2^(n/16), of which the table has the fraction, times 1 + r + r²/2 + r³/6 with |r| < 0.022.
// Adding `shift` rounds to n in the lowest bits, in such a way that the next eight are the exponent of 2^(64 + n/16).
struct Exponential {
  vf value, rest;
};

PRL_INLINE Exponential exponential(vf x) {
  const float shift = 12582912.0f + 16 * (127 + 64);
  x = x < -120.0f ? splat(-120.0f) : x;
  vf shifted = x * 23.083120654223414f + shift, n = shifted - shift;
  vf r = (x - n * 0x1.62ep-5f) - n * 1.9966364561696537e-6f;
  vf root = lookup(kRoots, (vi)shifted);
  vf small = root * (r + r * r * (0.5000162f + r * 0.16666667f)) + lookup(kRootRests, (vi)shifted);
  vf y = root + small, scale = (vf)(((vi)shifted << 19) & 0x7f800000);
  return {y * scale * 0x1p-64f, (small - (y - root)) * (scale * 0x1p-64f)};
}

PRL_INLINE vf exp(vf x) { return exponential(x).value; }

PRL_INLINE vf minus_magnitude(vf x) { return (vf)((vu)x | 0x80000000); }

// The logistic function by way of e^-|x|, so that nothing overflows; 0 where e^-x would. Within 2 units.
PRL_INLINE vf sigmoid(vf x) {
  vf e = exp(x < -88.72284f ? splat(-120.0f) : minus_magnitude(x));
  return (x < 0.0f ? e : splat(1.0f)) / (1.0f + e);
}

// Within 1 unit: the errors of numerator and denominator are taken off, with a straight line for 1 / denominator.
PRL_INLINE vf exact_sigmoid(vf x) {
  Exponential e = exponential(x < -88.72284f ? splat(-120.0f) : minus_magnitude(x));
  vf below = 1.0f + e.value, below_rest = (e.value - (below - 1.0f)) + e.rest;
  vf above = x < 0.0f ? e.value : splat(1.0f), above_rest = x < 0.0f ? e.rest : vf{};
  vf s = above / below;
  return s + (above_rest - s * below_rest) * (1.457f - 0.4857f * below);
}
