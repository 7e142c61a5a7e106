// Rotation of pairs (2i, 2i + 1). No product is fused into a sum, so an element's bits do not depend on where a vector ends.

#include "common.h"

namespace prl {
namespace {

template <class T>
void rotate(const T* x, const float* cos, const float* sin, int64_t begin, int64_t end, int64_t heads, int64_t pairs, T* y) {
  for (int64_t row = begin; row < end; ++row) {  // a head of a token
    const float *c = cos + row / heads * pairs, *s = sin + row / heads * pairs;
    const T* from = x + row * 2 * pairs;
    T* to = y + row * 2 * pairs;
    for (int64_t i = 0; i < pairs; ++i) {
      const float a = to_float(from[2 * i]), b = to_float(from[2 * i + 1]);
      to[2 * i] = from_float<T>(a * c[i] - b * s[i]);
      to[2 * i + 1] = from_float<T>(b * c[i] + a * s[i]);
    }
  }
}

Tensor rotate_pairs(const Tensor& x_THR, const Tensor& cos_TP, const Tensor& sin_TP) {
  const int64_t tokens = x_THR.size(0), heads = x_THR.size(1), pairs = cos_TP.size(1);
  Tensor y = empty({tokens, heads, 2 * pairs}, x_THR.scalar_type());
  const float *cos = in<float>(cos_TP), *sin = in<float>(sin_TP);
  parallel(tokens * heads, 1 + 16384 / (pairs + 1), [&](int64_t begin, int64_t end) {
    if (x_THR.scalar_type() == kBF16) {
      rotate(in<bf16>(x_THR), cos, sin, begin, end, heads, pairs, out<bf16>(y));
    } else {
      rotate(in<float>(x_THR), cos, sin, begin, end, heads, pairs, out<float>(y));
    }
  });
  return y;
}

}  // namespace
}  // namespace prl

STABLE_TORCH_LIBRARY_FRAGMENT(prl_cpu, m) { m.def("rotate_pairs(Tensor x_THR, Tensor cos_TP, Tensor sin_TP) -> Tensor"); }

STABLE_TORCH_LIBRARY_IMPL(prl_cpu, CPU, m) { m.impl("rotate_pairs", TORCH_BOX(&prl::rotate_pairs)); }
