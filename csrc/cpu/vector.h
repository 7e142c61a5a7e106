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

PRL_INLINE vf load(const float* p) {
  vf v;
  memcpy(&v, p, sizeof v);
  return v;
}

PRL_INLINE vf load(const bf16* p) {
  vh v;
  memcpy(&v, p, sizeof v);
  return (vf)(__builtin_convertvector(v, vu) << 16);
}

PRL_INLINE vi load(const int32_t* p) {
  vi v;
  memcpy(&v, p, sizeof v);
  return v;
}

PRL_INLINE void store(int32_t* p, vi v) { memcpy(p, &v, sizeof v); }
PRL_INLINE void store(float* p, vf v) { memcpy(p, &v, sizeof v); }

// As `to_bf16`.
PRL_INLINE void store(bf16* p, vf v) {
  vu bits = (vu)v;
  vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  vh h = __builtin_convertvector(v == v ? rounded : vu{} + 0x7fc0, vh);
  memcpy(p, &h, sizeof h);
}

// The first n elements; the others are `rest`.
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

// e^x as a float, within 0.8 units in the last place (infinite from 88.72284, gradual underflow, NaN stays), and what rounding
// took from it. e^x = 2^n e^r, |r| <= ln 2 / 2, by the polynomial of Cephes' expf (S. Moshier). What r and 1 + r lose in
// rounding is added again at the end; 2^n goes in two factors so that neither overflows.
struct Exponential {
  vf value, rest;
};

PRL_INLINE Exponential exponential(vf x) {
  x = x > 89.0f ? splat(89.0f) : x;
  x = x < -105.0f ? splat(-105.0f) : x;
  const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, in the low bits
  vf shifted = x * 1.44269504088896341f + shift;
  vf n = shifted - shift;
  vf high = x - n * 0.693359375f, low = n * 2.12194440e-4f;
  vf r = high + low, lost = (high - r) + low;
  vf p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  vf one = 1.0f + r, rest = (r - (one - 1.0f)) + (p * (r * r) + lost), y = one + rest;
  vi exponent = (vi)shifted - 0x4b400000;
  vi half = exponent >> 1;
  vf scale = (vf)((half + 127) << 23), more = (vf)((exponent - half + 127) << 23);
  return {y * scale * more, (rest - (y - one)) * scale * more};
}

PRL_INLINE vf exp(vf x) { return exponential(x).value; }

// Within 1 unit; 0 where e^-x overflows. By way of e^-|x|, the error of numerator and denominator taken off at the end with a
// straight line for the reciprocal of the denominator, which is 1 to 2.
PRL_INLINE vf sigmoid(vf x) {
  Exponential e = exponential((vf)((vu)x | 0x80000000));
  vf below = 1.0f + e.value, below_rest = (e.value - (below - 1.0f)) + e.rest;
  vf above = x < 0.0f ? e.value : splat(1.0f), above_rest = x < 0.0f ? e.rest : vf{};
  vf s = above / below;
  s = s + (above_rest - s * below_rest) * (1.457f - 0.4857f * below);
  return x < -88.72284f ? vf{} : s;
}
